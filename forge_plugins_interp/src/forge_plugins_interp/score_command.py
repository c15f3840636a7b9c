"""``forge score``: layers of a model against recordings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from forge_core.errors import ConfigError, nearest
from forge_plugins_interp.tidy_table import refuse_other_ending, save_results

if TYPE_CHECKING:
    import numpy as np
    import torch

    from forge_plugins_interp.neuro.encoding import EncodingScore
    from forge_plugins_interp.neuro.recordings import Recordings
    from forge_plugins_interp.neuro.resemblance import Resemblance
    from forge_plugins_interp.store import Store

METHODS = ("ridge", "pls", "rsa", "cka")


@click.command()
@click.argument("store", type=click.Path(path_type=Path))
@click.argument("recordings", type=click.Path(path_type=Path))
@click.option("--method", type=click.Choice(METHODS), default="ridge", show_default=True, help="How they are compared.")
@click.option("--components", default=25, show_default=True, type=click.IntRange(min=1), help="With pls.")
@click.option("--splits", default=10, show_default=True, type=click.IntRange(min=1), help="Of ridge and pls.")
@click.option("--null", "shuffles", default=0, type=click.IntRange(min=0), help="Shuffle stimuli so many times, for p.")
@click.option("--groups", metavar="COLUMN", help="Hold out whole groups by this column of the store's index.")
@click.option("--reverse", is_flag=True, help="Predict the model from the recordings.")
@click.option("--sites", "patterns", default="*", help="Names with commas, or patterns; by default all.")
@click.option("--out", type=click.Path(path_type=Path), help="Also write a .csv; or a .png, with a .csv beside it.")
def score(
    store: Path,
    recordings: Path,
    method: str,
    components: int,
    splits: int,
    shuffles: int,
    groups: str | None,
    reverse: bool,
    patterns: str,
    out: Path | None,
) -> None:
    """Tell for each site of STORE how alike it is to RECORDINGS, over the stimuli of both.

    RECORDINGS end with .npz, .csv, .nc, .h5, .mat or .nwb. The store has a row for each stimulus (forge extract
    --stimuli … --reduce last or mean). Where recordings have repetitions, scores have a ceiling. A group of the
    recordings is held out whole.
    """
    refuse_other_ending(out)
    if method in ("rsa", "cka") and reverse:
        raise ConfigError(f"--reverse: has no effect with --method {method}; leave it out")
    if method in ("rsa", "cka") and groups is not None:
        raise ConfigError(f"--groups: has no effect with --method {method}, which fits nothing; leave it out")

    import attrs
    import numpy as np

    from forge_core.commands.table import aligned
    from forge_plugins_interp.figures.layers import layers_figure
    from forge_plugins_interp.neuro.recordings import read_recordings
    from forge_plugins_interp.neuro.resemblance import Comparison
    from forge_plugins_interp.store import Store

    acts, brain = Store(store), read_recordings(recordings)
    numbers, of_brain = _joined(acts, brain)
    sites = acts.chosen(patterns)
    if groups is not None:
        brain = attrs.evolve(brain, groups=_column(acts, groups, numbers, of_brain, len(brain.ids)))
    brain = brain.of(of_brain)
    measure: Callable[[torch.Tensor], EncodingScore | Resemblance]
    measure = _encoded(brain, method, components, splits, shuffles, reverse=reverse)
    if method in ("rsa", "cka"):
        measure = Comparison(brain, method, shuffles=shuffles).of  # type: ignore[arg-type]  # click has checked it
    rows = []
    for site in sites:
        if acts.manifest.sites[site].dims[0] != "sample":
            raise ConfigError(f"site {site}: {store} has a row a token; extract it with --reduce last or mean")
        values = acts.array(site)[numbers].flatten(1).double()
        found = measure(values)
        null: dict[str, float | None] = {"null_mean": None, "null_high": None}
        if found.null:
            null = {"null_mean": float(np.mean(found.null)), "null_high": float(np.percentile(found.null, 95))}
        known = {key: getattr(found, key) for key in (*_SHOWN, "ceiling_low", "ceiling_high")}
        rows.append({"site": site, "method": method, "stimuli": len(numbers), **known, **null})
    shown = [(row["site"], *(_number(row[key]) for key in _SHOWN)) for row in rows]
    print(f"{method} over {len(numbers)} stimuli, {len(brain.neuroids)} neuroids")
    print("\n".join(aligned([("site", *_SHOWN), *shown])))
    save_results(out, rows, lambda: layers_figure(rows, method))


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
        close = nearest(name, store.columns)
        hint = f"; did you mean {close!r}?" if close else ""
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
        return encode(x, repetitions, regression, splits=Splits(number=splits), groups=brain.groups, shuffles=shuffles)

    return measure
