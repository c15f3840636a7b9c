"""``forge probe``: what can be read out of the sites of a store."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import attrs
import click

from forge_core.commands.json_output import json_option, print_json
from forge_core.errors import ConfigError, nearest_hint
from forge_plugins_interp.out_option import look_at_out, save_results
from forge_plugins_interp.tidy_table import read_csv

if TYPE_CHECKING:
    from forge_plugins_interp.probes.probe import Labelled
    from forge_plugins_interp.store import Store


@attrs.frozen(kw_only=True)
class Probed:
    """What can be read out of a site. Accuracies are of test rows, of documents that the probe has not seen."""

    site: str
    kind: str
    """Of probe."""
    classes: int
    """Their number."""
    accuracy: float
    low: float
    high: float
    """The 95 % interval of a bootstrap over test documents."""
    balanced: float
    """The mean over classes of the share that is right."""
    majority: float
    """Of always saying the commonest class."""
    chance: float
    """Of drawing classes by their shares."""
    control: float | None
    """Of a probe whose classes are random; null for labels of samples."""
    selectivity: float | None
    """``accuracy − control``."""
    bits: float
    """Of a label by online coding."""


@click.command()
@click.argument("folder", metavar="STORE", type=click.Path(path_type=Path))
@click.option(
    "--labels", "path", type=click.Path(path_type=Path), help="A .csv or .npz: stimulus_id, label, perhaps token."
)
@click.option("--documents", help="A column of the store's index: what is of one document stays on one side.")
@click.option("--column", help="In place of --labels: a column of the store's index.")
@click.option(
    "--kind", type=click.Choice(["logistic", "ridge", "mlp"]), default="logistic", show_default=True, help="The probe."
)
@click.option("--sites", "patterns", default="*", help="Names with commas, or patterns; by default all.")
@click.option(
    "--control",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="So many tokens, the last ones, decide the class of the control task.",
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0), help="Of the split by documents.")
@click.option("--out", type=click.Path(path_type=Path), help="Also write a .csv; or a .png, with a .csv beside it.")
@json_option(list[Probed])
def probe(
    folder: Path,
    path: Path | None,
    documents: str | None,
    column: str | None,
    kind: str,
    patterns: str,
    control: int,
    seed: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Train a probe on each site of STORE, on 60 % of its samples, and print accuracies on others.

    Labels are of samples, or with a column token (the place in the sample) of tokens. For tokens there is a control
    task: each token id, or with --control N each run of N tokens, has a random class.
    """
    look_at_out(out, path)
    if (path is None) == (column is None):
        raise ConfigError("give either --labels FILE or --column NAME")

    from forge_core.commands.table import aligned
    from forge_plugins_interp.figures.layers import layers_figure
    from forge_plugins_interp.probes.probe import probe as measure
    from forge_plugins_interp.store import Store

    store = Store(folder)
    rows, lines, sites = [], [], store.chosen(patterns)
    if control > 1 and all(store.manifest.sites[site].dims[0] == "sample" for site in sites):
        raise ConfigError(f"--control {control}: has no effect on rows of samples, which are no tokens; leave it out")
    for site in sites:
        data, classes = _labelled(store, site, path, column, control)
        if documents is not None:
            data = attrs.evolve(data, documents=_column(store, "--documents", documents)[data.documents])
        found = measure(data, kind=kind, seed=seed)  # type: ignore[arg-type]  # click has checked it
        keys = ("accuracy", "low", "high", "balanced", "majority", "chance", "control", "selectivity", "bits")
        values = {key: getattr(found, key) for key in keys}
        rows.append({"site": site, "kind": kind, "classes": len(classes), **values})
        lines.append((site, *("" if value is None else f"{value:.4f}" for value in values.values())))
    if as_json:
        print_json([Probed(**row) for row in rows])
    else:
        print("\n".join(aligned([("site", *keys), *lines])))
    shown = [{**row, "score": row["accuracy"], "ceiling": None} for row in rows]
    save_results(out, rows, lambda: layers_figure(shown, f"accuracy of {kind} probes"), as_json=as_json)


def _labelled(
    store: Store, site: str, path: Path | None, column: str | None, control: int
) -> tuple[Labelled, list[str]]:
    """The rows of a site that have a label, and the names of the classes."""
    import numpy as np
    import torch

    from forge_plugins_interp.probes.probe import Labelled

    is_token = store.manifest.sites[site].dims[0] == "token"
    ends = np.cumsum(store.columns["length"])
    starts = ends - store.columns["length"]
    if control > 1 and store.match is not None:
        raise ConfigError(f"--control {control}: {store.folder} keeps only tokens that match {store.match!r}, not runs")
    numbers, tokens, names = _labels(store, path, column, is_token=is_token)
    if is_token and (lacks := tokens < 0).any():  # the last one of none
        which = "1 sample" if lacks.sum() == 1 else f"{lacks.sum():,} samples"
        click.echo(f"{site}: left out {which} without a token that matches {store.match!r}", err=True)
        numbers, tokens, names = numbers[~lacks], tokens[~lacks], np.array(names)[~lacks].tolist()
    if not len(numbers):
        raise ConfigError(f"--labels: none of its stimulus_id is in {store.folder}")
    beyond = tokens >= store.columns["length"][numbers]
    if is_token and beyond.any():
        first = int(beyond.argmax())
        sample = store.ids[numbers[first]]
        raise ConfigError(
            f"--labels: token {tokens[first]} lies beyond the {store.columns['length'][numbers[first]]} of {sample}"
        )
    classes = sorted(set(names))
    labels = torch.tensor([classes.index(name) for name in names])
    rows = starts[numbers] + tokens if is_token else numbers
    words = _runs(store, starts[numbers], tokens, control) if is_token else None
    values = store.array(site)[torch.from_numpy(rows)].flatten(1)
    return Labelled(values=values, labels=labels, documents=numbers, words=words), classes


def _runs(store: Store, starts: Any, tokens: Any, length: int) -> Any:
    """A number for each run of ``length`` tokens that ends at a token, of its sample alone."""
    import numpy as np

    from forge_plugins_interp.store import TOKENS

    ids = store.array(TOKENS).numpy()
    back = np.arange(length)
    places = tokens[:, None] - back
    runs = np.where(places >= 0, ids[np.maximum(starts[:, None] + places, 0)], -1)
    _, found = np.unique(runs, axis=0, return_inverse=True)
    return found.ravel()


def _labels(store: Store, path: Path | None, column: str | None, *, is_token: bool) -> tuple[Any, Any, list[str]]:
    """Numbers of samples, places of tokens (the last one, where none is named), and names of classes."""
    import numpy as np

    if path is None:
        assert column is not None, "one of both was asked for"
        names = _column(store, "--column", column).astype(str).tolist()
        return np.arange(len(store)), store.columns["length"] - 1, names
    table = _table(path)
    for name in ("stimulus_id", "label"):
        if not table or name not in table[0]:
            raise ConfigError(f"--labels {path}: must have a column {name!r}")
    if "token" in table[0] and not is_token:
        raise ConfigError(f"--labels {path}: has labels of tokens, and the store a row a sample")
    places = {name: number for number, name in enumerate(store.ids.astype(str))}
    shown = Counter((row["stimulus_id"], row.get("token")) for row in table)
    if twice := [one for one, number in shown.items() if number > 1]:
        sample, token = twice[0]
        at = "" if token is None else f" at token {token}"
        raise ConfigError(f"--labels {path}: stimulus_id {sample!r} has a label{at} more than once")
    for line, row in enumerate(table, 2):
        if not row["label"]:
            raise ConfigError(f"--labels {path}: line {line} has no label")
        if "token" in row and not str(row["token"]).isdecimal():
            raise ConfigError(f"--labels {path}: line {line}: token must be a number from 0, got {row['token']!r}")
    known = [row for row in table if row["stimulus_id"] in places]
    numbers = np.array([places[row["stimulus_id"]] for row in known], dtype=np.int64)
    if "token" in table[0]:
        tokens = _kept(store, numbers, np.array([int(row["token"]) for row in known], dtype=np.int64))
    else:
        tokens = store.columns["length"][numbers] - 1
    return numbers, tokens, [row["label"] for row in known]


def _kept(store: Store, numbers: Any, positions: Any) -> Any:
    """Which of the tokens that a store keeps of a sample stand at these positions of it."""
    import numpy as np

    if store.match is None:
        return positions
    lengths = store.columns["length"]
    of_rows = np.concatenate([store.shard_positions(shard) for shard in range(store.manifest.n_shards())])
    of_sample = np.concatenate([np.arange(length) for length in lengths])
    samples = np.repeat(np.arange(len(store)), lengths)
    kept = dict(zip(zip(samples.tolist(), of_rows.tolist(), strict=True), of_sample.tolist(), strict=True))
    wanted = list(zip(numbers.tolist(), positions.tolist(), strict=True))
    if lacking := next((one for one in wanted if one not in kept), None):
        raise ConfigError(
            f"--labels: token {lacking[1]} of {store.ids[lacking[0]]} does not match {store.match!r}, and "
            f"{store.folder} keeps only tokens that do"
        )
    return np.array([kept[one] for one in wanted], dtype=np.int64)


def _table(path: Path) -> list[dict[str, str]]:
    """The rows of a .csv, or of the arrays of a .npz."""
    import numpy as np

    try:
        if path.suffix == ".npz":
            # opened here: NumPy leaves a damaged file open
            with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                columns = {name: file[name].astype(str).tolist() for name in file.files}
            return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        return read_csv(path)
    except (OSError, ValueError, csv.Error, BadZipFile) as error:
        raise ConfigError(f"--labels {path}: cannot be read: {error}") from error


def _column(store: Store, option: str, name: str) -> Any:
    if name not in store.columns:
        hint = nearest_hint(name, store.columns)
        raise ConfigError(f"{option} {name}: the index has {', '.join(store.columns)}{hint}")
    return store.columns[name]
