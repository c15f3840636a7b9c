"""``forge compare``: how alike two stores are, site by site."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from forge_core.commands.json_output import json_option, print_json
from forge_core.errors import ConfigError
from forge_plugins_interp.out_option import look_at_out, save_results

if TYPE_CHECKING:
    import torch

    from forge_core.contracts.component_ref import ComponentRef
    from forge_plugins_interp.metrics.contract import RepresentationMetric


@attrs.frozen(kw_only=True)
class ComparedSites:
    """A site of each store."""

    site_a: str
    site_b: str
    value: float
    """Of the metric."""


@attrs.frozen(kw_only=True)
class Comparison:
    """How alike the sites of two stores are."""

    metric: str
    is_distance: bool
    """Whether a small value stands for much alike."""
    rows: int
    """Of a site: stimuli, or their tokens."""
    stimuli: int
    """In both stores."""
    sites: Sequence[ComparedSites]
    """Each of the first with each of the second."""


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--metric", "name", default="cka", show_default=True, help="A representation_metric; forge plugins lists."
)
@click.option("--sites", "patterns", default="*", help="Names with commas, or patterns; by default all.")
@click.option("--out", type=click.Path(path_type=Path), help="Also write a .csv; or a .png, with a .csv beside it.")
@json_option(Comparison)
@click.pass_obj
def compare(
    obj: Any,
    first: Path,
    second: Path,
    overrides: tuple[str, ...],
    name: str,
    patterns: str,
    out: Path | None,
    as_json: bool,
) -> None:
    """Compare each site of the store FIRST with each of SECOND, which may be the same one, on the stimuli that both
    have.

    OVERRIDES are keys of the metric, such as metric.kernel=rbf.
    """
    look_at_out(out)

    from forge_core.commands.table import aligned
    from forge_core.config.builder import ComponentBuilder
    from forge_plugins_interp.alignment import Alignment
    from forge_plugins_interp.figures.similarity import similarity_figure
    from forge_plugins_interp.store import Store

    build = ComponentBuilder(obj.catalog())
    use = _metric(build, name, overrides)
    metric: RepresentationMetric = build(use)
    stores = Store(first), Store(second)
    sites = [store.chosen(patterns) for store in stores]
    both = Alignment.of(*stores)
    both.refuse_other_rows(sites)
    xs = [both.values(0, site) for site in sites[0]]
    same = stores[0].folder.resolve() == stores[1].folder.resolve()
    values = metric.matrix(xs, None if same else [both.values(1, site) for site in sites[1]])
    told = Comparison(
        metric=use.name,
        is_distance=metric.is_distance,
        rows=len(xs[0]),
        stimuli=len(both.samples[0]),
        sites=[
            ComparedSites(site_a=a, site_b=b, value=float(values[i, j]))
            for i, a in enumerate(sites[0])
            for j, b in enumerate(sites[1])
        ],
    )
    if as_json:
        print_json(told)
    else:
        print(f"{use.name} of {told.rows} rows of {told.stimuli} stimuli")
        lines = _closest(values, sites, is_distance=metric.is_distance, same=same)
        print("\n".join(aligned([("site", use.name, "most alike"), *lines])))
    of_all = {"metric": use.name, "rows": told.rows}
    rows = [{"site_a": one.site_a, "site_b": one.site_b, **of_all, "value": one.value} for one in told.sites]
    save_results(out, rows, lambda: similarity_figure(values, sites[0], sites[1], use.name), as_json=as_json)


def _metric(build: Any, name: str, overrides: Sequence[str]) -> ComponentRef:
    from forge_core.config.overrides import with_overrides
    from forge_core.config.toml_file import Document

    table = with_overrides(Document({"metric": {"name": name}}, {}), overrides, sections=("metric",)).table
    if more := [section for section in table if section != "metric"]:
        raise ConfigError(f"{more[0]}: this command takes settings of metric only")
    use: ComponentRef = build.resolve("representation_metric", table["metric"])
    return use


def _closest(
    values: torch.Tensor, sites: Sequence[Sequence[str]], *, is_distance: bool, same: bool
) -> list[tuple[str, str, str]]:
    """For each site of the first store, the one of the second that is most alike; in one store, another one."""
    lines = []
    for number, (site, row) in enumerate(zip(sites[0], values, strict=True)):
        worst = float("inf") if is_distance else float("-inf")
        ordered = row.nan_to_num(nan=worst)
        if same and len(sites[1]) > 1:
            ordered[number] = worst
        best = int(ordered.argmin() if is_distance else ordered.argmax())
        lines.append((site, f"{float(row[best]):.4f}", sites[1][best]))
    return lines
