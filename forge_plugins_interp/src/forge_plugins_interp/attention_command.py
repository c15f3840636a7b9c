"""``forge attention``: what heads look at in a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forge_core.errors import ConfigError
from forge_plugins_interp.tidy_table import Row, refuse_other_ending, save_results

if TYPE_CHECKING:
    from forge_plugins_interp.session import Session

KINDS = ("pattern", "scores", "scores_scaled", "scores_raw")


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
@click.pass_obj
def attention(
    obj: Any, run: Path, prompt: str, layers: str | None, heads: str | None, kind: str, out: Path | None
) -> None:
    """Run the model of RUN on a prompt, and print for each head which tokens the last one looks at most."""
    refuse_other_ending(out)

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
    for name, value in values.items():
        print(f"{name}: the last token, {words[-1]!r}, looks at")
        for head in chosen[name]:
            print(f"  head {head:<3} {_strongest(value[head, -1], words)}")
    shown = {name: values[name][chosen[name]] for name in names}
    save_results(out, _rows(values, chosen, words), lambda: attention_figure(shown, chosen, words))


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


def _strongest(row: Any, words: list[str]) -> str:
    values, places = row.topk(min(3, len(words)))
    pairs = zip(values.tolist(), places.tolist(), strict=True)
    return "  ".join(f"{value:6.3f} {place}:{words[place]!r}" for value, place in pairs)


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
