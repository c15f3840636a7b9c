"""``forge score``: layers of a model against recordings."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from forge_core.checkpoint.manifest import as_size
from forge_core.commands.json_output import json_option, print_json
from forge_core.errors import ConfigError, nearest_hint
from forge_plugins_interp.out_option import look_at_out, save_results

if TYPE_CHECKING:
    import numpy as np
    import torch

    from forge_plugins_interp.neuro.encoding import EncodingScore
    from forge_plugins_interp.neuro.recordings import Recordings
    from forge_plugins_interp.neuro.resemblance import Resemblance
    from forge_plugins_interp.store import Store
    from forge_plugins_interp.tidy_table import Row

METHODS = ("ridge", "pls", "banded_ridge", "rsa", "cka")


@attrs.frozen(kw_only=True)
class Scored:
    """How alike a site is to recordings; with ``banded_ridge`` first all sites together, as ``all``."""

    site: str
    method: str
    stimuli: int
    """Those of both."""
    score: float | None
    """Null, as what follows, for one site of ``banded_ridge``."""
    low: float | None
    high: float | None
    """The 95 % interval."""
    ceiling: float | None
    """Null without repetitions."""
    ceiling_low: float | None
    ceiling_high: float | None
    """Its 95 % interval; of subjects, the lower and the upper bound."""
    normalised: float | None
    """The score, as a part of the ceiling."""
    p_value: float | None
    """Null without ``--null``."""
    null_mean: float | None
    null_high: float | None
    """The mean and the 95th percentile of scores for shuffled stimuli."""
    part: float | None = None
    """With ``banded_ridge``: the site's part of r."""


@click.command()
@click.argument("store", type=click.Path(path_type=Path))
@click.argument("recordings", type=click.Path(path_type=Path))
@click.option("--method", type=click.Choice(METHODS), default="ridge", show_default=True, help="How they are compared.")
@click.option("--components", type=click.IntRange(min=1), help="With pls; 25 by default.")
@click.option("--draws", type=click.IntRange(min=1), help="With banded_ridge; 100 by default.")
@click.option("--splits", type=click.IntRange(min=1), help="Of methods that predict; 10 by default.")
@click.option("--null", "shuffles", default=0, type=click.IntRange(min=0), help="Shuffle stimuli so many times, for p.")
@click.option("--groups", metavar="COLUMN", help="Hold out whole groups by this column of the store's index.")
@click.option("--delays", metavar="ROWS", help="Predict from rows so much earlier in the store, such as 1,2,3.")
@click.option("--reverse", is_flag=True, help="Predict the model from the recordings.")
@click.option("--sites", "patterns", default="*", help="Names with commas, or patterns; by default all.")
@click.option("--out", type=click.Path(path_type=Path), help="Also write a .csv; or a .png, with a .csv beside it.")
@json_option(list[Scored])
def score(
    store: Path,
    recordings: Path,
    method: str,
    components: int | None,
    draws: int | None,
    splits: int | None,
    shuffles: int,
    groups: str | None,
    delays: str | None,
    reverse: bool,
    patterns: str,
    out: Path | None,
    as_json: bool,
) -> None:
    """Tell for each site of STORE how alike it is to RECORDINGS, over the stimuli of both.

    RECORDINGS end with .npz, .csv, .nc, .h5, .mat or .nwb. The store has a row for each stimulus (forge extract
    --stimuli … --reduce last or mean). Where recordings have repetitions, scores have a ceiling. A group of the
    recordings is held out whole.

    banded_ridge predicts from all sites together, with a penalty for each, and tells each one's part of the score. With
    --delays, rows of the store are in the order of time within each group of --groups.
    """
    look_at_out(out, recordings)
    _refuse_numbers(method, components, draws, splits)
    components, draws, splits = components or 25, draws or 100, splits or 10
    _refuse_options(method, groups=groups, delays=delays, shuffles=shuffles, reverse=reverse)
    earlier = _rows_earlier(delays) if delays is not None else []

    from forge_plugins_interp.figures.layers import layers_figure
    from forge_plugins_interp.neuro.delays import delayed
    from forge_plugins_interp.neuro.recordings import read_recordings
    from forge_plugins_interp.neuro.resemblance import Comparison
    from forge_plugins_interp.store import Store

    acts, brain = Store(store), read_recordings(recordings)
    numbers, of_brain = _joined(acts, brain)
    sites = acts.chosen(patterns)
    if groups is not None:
        brain = attrs.evolve(brain, groups=_column(acts, groups, numbers, of_brain, len(brain.ids)))
    brain = brain.of(of_brain)
    for site in sites:
        if acts.manifest.sites[site].dims[0] != "sample":
            raise ConfigError(f"site {site}: {store} has a row a token; extract it with --reduce last or mean")

    def features(site: str) -> torch.Tensor:
        values = acts.array(site).flatten(1).double()
        if earlier:
            assert groups is not None, "it was refused"
            values = delayed(values, earlier, acts.columns[groups])
        return values[numbers]

    heading = f"{method} over {len(numbers)} stimuli, {len(brain.neuroids)} neuroids"
    if method == "banded_ridge":
        _refuse_too_large(acts, sites, len(numbers) * max(len(earlier), 1))
        known = {"method": method, "stimuli": len(numbers)}
        found = _banded({site: features(site) for site in sites}, brain, draws, splits, shuffles)
        rows = [{**row, **known} for row in found]
        _tell(rows, [heading, *_table(rows[:1]), *_parts(rows)], as_json)
        save_results(out, rows, lambda: layers_figure(_as_scores(rows[1:]), "part of r"), as_json=as_json)
        return
    measure: Callable[[torch.Tensor], EncodingScore | Resemblance]
    measure = _encoded(brain, method, components, splits, shuffles, reverse=reverse)
    if method in ("rsa", "cka"):
        measure = Comparison(brain, method, shuffles=shuffles).of  # type: ignore[arg-type]  # click has checked it
    rows = [
        {"site": site, "method": method, "stimuli": len(numbers), **_facts(measure(features(site)))} for site in sites
    ]
    _tell(rows, [heading, *_table(rows)], as_json)
    save_results(out, rows, lambda: layers_figure(rows, method), as_json=as_json)


def _say(line: str) -> None:
    click.echo(line, err=True)


def _tell(rows: Sequence[Row], lines: Sequence[str], as_json: bool) -> None:
    if as_json:
        print_json([Scored(**row) for row in rows])
    else:
        print("\n".join(lines))


def _refuse_numbers(method: str, components: int | None, draws: int | None, splits: int | None) -> None:
    """Refuse numbers that are of another method."""
    for option, given, of in (
        ("--components", components, ("pls",)),
        ("--draws", draws, ("banded_ridge",)),
        ("--splits", splits, ("ridge", "pls", "banded_ridge")),
    ):
        if given is not None and method not in of:
            raise ConfigError(f"{option}: has no effect with --method {method}; leave it out")


def _refuse_options(method: str, *, groups: str | None, delays: str | None, shuffles: int, reverse: bool) -> None:
    if method in ("rsa", "cka"):
        for option, given in (("--groups", groups is not None), ("--delays", delays is not None)):
            if given:
                raise ConfigError(f"{option}: has no effect with --method {method}, which fits nothing; leave it out")
    if reverse and method in ("rsa", "cka", "banded_ridge"):
        raise ConfigError(f"--reverse: has no effect with --method {method}; leave it out")
    if delays is not None and reverse:
        raise ConfigError("--delays: are of the model's features, and --reverse predicts these; leave one of them out")
    if delays is not None and groups is None:
        raise ConfigError(
            "--delays: needs --groups, a column of the store, such as the story: neighbours in time are alike, and "
            "those of one group are not in training and test"
        )
    if delays is not None and shuffles:
        raise ConfigError(
            "--null: has no effect with --delays: neighbours in time are alike, which shuffled ones are not, so that p "
            "would be too small; leave it out"
        )


def _rows_earlier(delays: str) -> list[int]:
    """
    Raises:
        ConfigError: they are no list of different numbers from 0.
    """
    found = [part.strip() for part in delays.split(",")]
    if not all(part.isdecimal() for part in found) or len(set(map(int, found))) < len(found):
        raise ConfigError(f"--delays {delays}: must be different whole numbers from 0 with commas, such as 1,2,3")
    return [int(part) for part in found]


def _banded(
    bands: Mapping[str, torch.Tensor], brain: Recordings, draws: int, splits: int, shuffles: int
) -> list[dict[str, Any]]:
    """The score of all bands together, then each band's part of it."""
    import torch

    from forge_plugins_interp.neuro.banded_ridge import BandedRidge
    from forge_plugins_interp.neuro.encoding import Splits, encode

    if len(bands) < 2:
        raise ConfigError(
            f"--method banded_ridge: needs two sites at least, and there is {', '.join(bands)}; use ridge"
        )
    widths = [band.shape[1] for band in bands.values()]
    found = encode(
        torch.cat(list(bands.values()), 1),
        brain.repetitions,
        BandedRidge(widths=widths, draws=draws),
        splits=Splits(number=splits),
        groups=brain.groups,
        shuffles=shuffles,
        widths=widths,
        log=_say,
    )
    assert found.of_bands is not None, "it was asked for"
    parts = found.of_bands.nanmean(1).tolist()
    together = {"site": "all", **_facts(found), "part": sum(parts)}
    nothing = dict.fromkeys(_facts(found))
    return [together, *({"site": site, **nothing, "part": part} for site, part in zip(bands, parts, strict=True))]


def _refuse_too_large(acts: Store, sites: Sequence[str], rows: int) -> None:
    """Features of all sites are in memory together, as float64 and, at the peak, about six times."""
    size = 6 * 8 * rows * sum(math.prod(acts.manifest.sites[site].sizes) for site in sites)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > memory:
        raise ConfigError(
            f"--method banded_ridge: the features of {len(sites)} sites take {as_size(size)}, and this machine has "
            f"{as_size(memory)}; choose fewer with --sites, or extract the store with --features"
        )


def _parts(rows: Sequence[Row]) -> list[str]:
    from forge_core.commands.table import aligned

    return aligned([("site", "part of r"), *((row["site"], _number(row["part"])) for row in rows)])


def _as_scores(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [{"site": row["site"], "score": row["part"], "low": None, "ceiling": None} for row in rows]


def _facts(found: EncodingScore | Resemblance) -> dict[str, float | None]:
    import numpy as np

    null: dict[str, float | None] = {"null_mean": None, "null_high": None}
    if found.null:
        null = {"null_mean": float(np.mean(found.null)), "null_high": float(np.percentile(found.null, 95))}
    return {key: getattr(found, key) for key in (*_SHOWN, "ceiling_low", "ceiling_high")} | null


def _table(rows: Sequence[Row]) -> list[str]:
    from forge_core.commands.table import aligned

    return aligned([("site", *_SHOWN), *((row["site"], *(_number(row[key]) for key in _SHOWN)) for row in rows)])


_SHOWN = ("score", "low", "high", "ceiling", "normalised", "p_value")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _joined(store: Store, brain: Recordings) -> tuple[torch.Tensor, np.ndarray]:
    """The numbers of the common stimuli, in both.

    Raises:
        ConfigError: there are none.
    """
    import numpy as np
    import torch

    from forge_plugins_interp.alignment import refuse_repeated

    ids = refuse_repeated(store.folder, store.ids.astype(str))
    _, mine, theirs = np.intersect1d(ids, brain.ids, return_indices=True)
    if not len(mine):
        raise ConfigError(
            f"{store.folder} and the recordings have no stimulus_id in common; the store has {str(ids[0])!r}, and the "
            f"recordings {str(brain.ids[0])!r}"
        )
    return torch.from_numpy(mine), theirs


def _column(store: Store, name: str, numbers: torch.Tensor, of_brain: np.ndarray, n: int) -> np.ndarray:
    """A column of the store's index, in the order of n recordings."""
    import numpy as np

    if name not in store.columns:
        hint = nearest_hint(name, store.columns)
        raise ConfigError(f"--groups {name}: the index of {store.folder} has {', '.join(store.columns)}{hint}")
    found = np.full(n, "", dtype=object)
    found[of_brain] = store.columns[name][numbers.numpy()]
    return found.astype(str)


def _encoded(
    brain: Recordings, method: str, components: int, splits: int, shuffles: int, *, reverse: bool
) -> Callable[[torch.Tensor], EncodingScore]:
    from forge_plugins_interp.neuro.encoding import Splits, encode
    from forge_plugins_interp.neuro.regression import PLS, Ridge

    def measure(x: torch.Tensor) -> EncodingScore:
        repetitions = brain.repetitions
        if reverse:
            x, repetitions = repetitions.mean(1), x[:, None]
        regression = Ridge() if method == "ridge" else PLS(components=components)
        how: Any = {"splits": Splits(number=splits), "groups": brain.groups, "shuffles": shuffles, "log": _say}
        return encode(x, repetitions, regression, **how)

    return measure
