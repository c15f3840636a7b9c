"""``forge sites``: what can be looked at in a model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from forge_core.commands.json_output import json_option, print_json

if TYPE_CHECKING:
    from forge_plugins_interp.site_table import SiteRow


@attrs.frozen(kw_only=True)
class ToldSite:
    """A site of a model."""

    name: str
    shape: str
    """Such as ``B × S × 192``: B is the number of samples, S of positions."""
    dims: Sequence[str]
    """The names of its dimensions."""
    dtype: str
    module: str
    """The module that computes it."""
    cut_by: Mapping[str, str]
    """The dimension that each axis of a layout cuts, or ``hidden``."""


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("patterns", nargs=-1)
@json_option(list[ToldSite], says="Print JSON: the sites, each by itself.")
@click.pass_obj
def sites(obj: Any, run: Path, patterns: tuple[str, ...], as_json: bool) -> None:
    """List the sites of RUN, a run's directory (its newest checkpoint) or a checkpoint's: all, or those of PATTERNS.
    A module is a site by its name (blocks.0.attention.o).

    B is the number of samples, S of positions. A dimension that an axis of the layout cuts has a part on each rank
    along it (parallel.tp, parallel.cp); what is read of it is whole again.
    """
    from forge_core.commands.table import aligned
    from forge_plugins_interp.session import open_session
    from forge_plugins_interp.site_table import site_rows

    with open_session(run, catalog=obj.catalog, log=lambda line: click.echo(line, err=True)) as session:
        rows = site_rows(session, obj.catalog(), patterns)
    if as_json:
        print_json([_told(row) for row in rows])
        return
    head = ("site", "shape", "dimensions", "cut by")
    lines = [(name, row.shape(), " × ".join(row.site.dims), row.cuts()) for name, row in _together(rows)]
    print("\n".join(aligned([head, *lines])))


def _told(row: SiteRow) -> ToldSite:
    return ToldSite(
        name=row.name,
        shape=row.shape(),
        dims=row.site.dims,
        dtype=str(row.dtype).removeprefix("torch."),
        module=row.site.module,
        cut_by=row.by_axis,
    )


def _together(rows: list[SiteRow]) -> list[tuple[str, SiteRow]]:
    """Rows that differ in the number of the layer alone as one, such as ``blocks.{0–3}.z`` and
    ``vision.layers.{0–3}.mlp_out``, ordered by the first."""
    groups: dict[tuple[str, ...], list[tuple[int, SiteRow]]] = {}
    for row in rows:
        match = _OF_LAYER.fullmatch(row.name)
        stack, number, site = match.groups() if match else (row.name, "0", "")
        groups.setdefault((stack, site, row.shape(), row.cuts()), []).append((int(number), row))
    found = []
    for (stack, site, *_), group in groups.items():
        name = group[0][1].name
        found.append((name if len(group) == 1 else f"{stack}.{{{_runs([n for n, _ in group])}}}.{site}", group[0][1]))
    return found


_OF_LAYER = re.compile(r"(blocks|.*layers)\.(\d+)\.(.+)")


def _runs(numbers: list[int]) -> str:
    """Such as ``0–3,5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(one[0]) if len(one) == 1 else f"{one[0]}–{one[-1]}" for one in runs)
