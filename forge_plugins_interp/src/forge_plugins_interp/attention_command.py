"""``forge attention``: what heads look at in a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from forge_core.commands.json_output import json_option, print_json
from forge_core.errors import ConfigError
from forge_plugins_interp.out_option import look_at_out, save_results
from forge_plugins_interp.tidy_table import Row

if TYPE_CHECKING:
    from forge_plugins_interp.session import Session

KINDS = ("pattern", "scores", "scores_scaled", "scores_raw")


@attrs.frozen(kw_only=True)
class Strongest:
    """A token that is looked at."""

    position: int
    token: str
    value: float
    """As ``--kind`` says: a probability of the pattern, or a score."""


@attrs.frozen(kw_only=True)
class Attention:
    """What a head looks at from the last token."""

    site: str
    head: int
    token: str
    """The last one of the prompt."""
    looks_at: Sequence[Strongest]
    """The three tokens with the largest values, at most, largest first."""


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--prompt", required=True, help="The text.")
@click.option("--layers", help="Numbers of layers, such as 0,3; all by default.")
@click.option("--heads", help="Numbers of heads, such as 0,1; all by default.")
@click.option(
    "--kind",
    type=click.Choice(KINDS),
    default="pattern",
    show_default=True,
    help="The pattern, or the scores that it comes from: as softmax reads them, without mask and cap, without scale.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Also write a .csv; or a .png, with a .csv beside it.")
@json_option(list[Attention])
@click.pass_obj
def attention(
    obj: Any,
    run: Path,
    prompt: str,
    layers: str | None,
    heads: str | None,
    kind: str,
    out: Path | None,
    as_json: bool,
) -> None:
    """Run the model of RUN on a prompt, and print for each head which tokens the last one looks at most."""
    look_at_out(out)

    import torch

    from forge_plugins_interp.figures.attention import attention_figure
    from forge_plugins_interp.prompt import encoded, texts
    from forge_plugins_interp.session import open_session

    with open_session(run, catalog=obj.catalog, log=lambda line: click.echo(line, err=True)) as session:
        tokens = encoded(session, "--prompt", prompt)
        words = texts(session, tokens)
        names = _sites(session, kind, layers)
        with session.observe(*names) as seen, torch.no_grad():
            session.model(torch.tensor([tokens]))
        values = {name: seen[name][0] for name in names}
    chosen = {name: _heads(name, value, heads) for name, value in values.items()}
    told = [
        Attention(site=name, head=head, token=words[-1], looks_at=_strongest(value[head, -1], words))
        for name, value in values.items()
        for head in chosen[name]
    ]
    if as_json:
        print_json(told)
    else:
        _print(told)
    shown = {name: values[name][chosen[name]] for name in names}
    save_results(out, _rows(values, chosen, words), lambda: attention_figure(shown, chosen, words), as_json=as_json)


def _sites(session: Session, kind: str, layers: str | None) -> list[str]:
    if layers is None:
        return [placed.name for placed in session.sites.chosen([f"blocks.*.attn_{kind}"])]
    numbers = _numbers("--layers", layers)
    return [name for number in numbers for name in session.sites.names(f"blocks.{number}.attn_{kind}")]


def _heads(name: str, value: Any, heads: str | None) -> list[int]:
    if heads is None:
        return list(range(len(value)))
    numbers = _numbers("--heads", heads)
    for number in numbers:
        if number >= len(value):
            raise ConfigError(f"--heads {number}: {name} has the heads 0 to {len(value) - 1}")
    return numbers


def _numbers(option: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not part.isdecimal():
            raise ConfigError(f"{option} {text}: must be numbers with commas between them, such as 0,3; got {part!r}")
    return [int(part) for part in parts]


def _strongest(row: Any, words: list[str]) -> list[Strongest]:
    values, places = row.topk(min(3, len(words)))
    pairs = zip(values.tolist(), places.tolist(), strict=True)
    return [Strongest(position=place, token=words[place], value=value) for value, place in pairs]


def _print(told: Sequence[Attention]) -> None:
    for site, heads in groupby(told, key=lambda one: one.site):
        for number, one in enumerate(heads):
            if number == 0:
                print(f"{site}: the last token, {one.token!r}, looks at")
            shown = (f"{token.value:6.3f} {token.position}:{token.token!r}" for token in one.looks_at)
            print(f"  head {one.head:<3} {'  '.join(shown)}")


def _rows(values: dict[str, Any], heads: dict[str, list[int]], words: list[str]) -> list[Row]:
    return [
        {
            "site": name,
            "head": head,
            "query": query,
            "query_token": words[query],
            "key": key,
            "key_token": words[key],
            "value": one,
        }
        for name, value in values.items()
        for head in heads[name]
        for query, row in enumerate(value[head].tolist())
        for key, one in enumerate(row)
    ]
