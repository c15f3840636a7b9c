"""The job of an evaluation: that of a checkpoint, on the ranks that there are."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import tomli_w

from forge_core.api import PassComponent
from forge_core.checkpoint.store import Checkpoint
from forge_core.config.sections import Job
from forge_core.errors import ConfigError
from forge_core.job import load_job, settings_of
from forge_core.loading import with_missing_plugins
from forge_core.registry.catalog import Catalog

_DEGREES = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")


def evaluation_job(
    checkpoint: Checkpoint,
    names: Sequence[str],
    overrides: Sequence[str],
    catalog: Callable[[Collection[str]], Catalog],
    world_size: int,
) -> Job:
    """The job that evaluates a checkpoint.

    On one rank it has no layout; on several, that of the run, unless ``overrides`` have degrees of another one.

    Args:
        names: evaluations in place of the job's own; none keeps these.
        overrides: settings of the command line. Those of ``data`` are about what ``names`` evaluate.
        catalog: the installed plugins without these distributions.
        world_size: ranks.

    Raises:
        ConfigError: the settings are wrong, or there is nothing to evaluate.
    """
    data, others = settings_of("data", overrides)
    if data and not names:
        raise ConfigError(f"{data[0]}: say with --evaluation what is evaluated on these data, such as perplexity")
    table = _table(checkpoint, names, world_size)
    disabled = table["plugins"].pop("disable", ())  # of the machine that it was trained on
    installed = catalog(disabled)
    for name in names:
        installed.lookup("evaluation", name)
    if world_size == 1 or any(map(_is_degree, settings_of("parallel", others)[0])):
        table["parallel"] = _on_one_rank(table["parallel"], installed)

    def load(settings: Sequence[str]) -> Job:
        try:
            return _load(table, settings, lambda more: catalog([*disabled, *more]), world_size)
        except ConfigError as error:  # of a file that is not there any more
            text = re.sub(r"\S*/job\.toml:\d+", f"{checkpoint.path}/job.toml", str(error))
            raise with_missing_plugins(ConfigError(text), checkpoint) from error

    job = load(others)
    if data:
        job = _with_data(job, load([*others, *data]), data[0])
    if not job.evaluations and not job.eval.interval:
        raise ConfigError(f"{checkpoint.path}: its job evaluates nothing; say with --evaluation what to measure")
    return attrs.evolve(job, plugins=attrs.evolve(job.plugins, disable=(*disabled, *job.plugins.disable)))


def _is_degree(setting: str) -> bool:
    """Return whether a setting says a layout, in place of the run's."""
    key = setting.removeprefix("--").partition("=")[0].removeprefix("parallel").removeprefix(".")
    return key in ("", *_DEGREES)


def _table(checkpoint: Checkpoint, names: Sequence[str], world_size: int) -> dict[str, Any]:
    """The checkpoint's job without what is about training."""
    table = dict(checkpoint.job())
    for section in ("train", "parallel", "plugins"):
        if not isinstance(table.setdefault(section, {}), dict):
            raise ConfigError(f"{checkpoint.path}/job.toml: {section} must be a table, got {table[section]!r}")
    table["train"] = {key: value for key, value in table["train"].items() if key != "global_batch_size"}
    table["train"]["grad_accumulation"] = world_size  # as many as any pipeline has stages; an evaluation takes one
    for section in ("checkpoint", "callbacks", "trackers", "anomalies", "metrics", "phases"):
        table.pop(section, None)
    if names:
        table.pop("eval", None)
        table["evaluations"] = [{"name": name} for name in names]
    return table


def _on_one_rank(parallel: Mapping[str, Any], catalog: Catalog) -> dict[str, Any]:
    """Without degrees, and without the passes that serve nothing else."""

    def serves_degrees(name: str) -> bool:
        component = catalog.lookup("parallel_pass", name).component
        return isinstance(component, PassComponent) and bool(set(component.serves) & set(_DEGREES))

    passes = parallel.get("passes", {})
    kept = {key: use for key, use in passes.items() if use and not serves_degrees(use.get("name", key))}
    return {"passes": kept}


def _load(
    table: Mapping[str, Any],
    overrides: Sequence[str],
    catalog: Callable[[Collection[str]], Catalog],
    world_size: int,
) -> Job:
    with tempfile.TemporaryDirectory(prefix="forge-") as folder:
        path = Path(folder) / "job.toml"
        path.write_text(tomli_w.dumps(table), encoding="utf-8")
        return load_job(path, overrides, catalog=catalog, world_size=world_size)


def _with_data(job: Job, other: Job, setting: str) -> Job:
    """With the whole of the other job's data for each evaluation."""
    evaluations = []
    for use in job.evaluations:
        if not hasattr(use.config, "data"):
            raise ConfigError(f"{setting}: the evaluation {use.name} has no data of its own")
        evaluations.append(attrs.evolve(use, config=attrs.evolve(use.config, data=other.data)))
    return attrs.evolve(job, evaluations=tuple(evaluations))
