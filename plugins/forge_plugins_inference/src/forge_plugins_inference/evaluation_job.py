"""The job of an evaluation: that of a checkpoint, on the ranks that there are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import attrs

from forge_core.checkpoint.store import Checkpoint
from forge_core.config.overrides import settings_in
from forge_core.config.sections import Job
from forge_core.errors import ConfigError
from forge_core.job import settings_of
from forge_core.registry.catalog import Catalog
from forge_plugins_inference.checkpoint_job import CheckpointJob


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
        names: evaluations in place of the job's own; none keeps these. One that the job has keeps its keys.
        overrides: settings of the command line. Those of ``data`` are about what ``names`` evaluate. A ``data.path``
            of a run whose source has no such key, such as a mixture, is text for the run's tokenizer.
        catalog: the installed plugins without these distributions.
        world_size: ranks.

    Raises:
        ConfigError: the settings are wrong, or there is nothing to evaluate.
    """
    data, others = settings_of("data", overrides)
    if data and not names:
        raise ConfigError(f"{data[0]}: say with --evaluation what is evaluated on these data, such as perplexity")
    given = CheckpointJob.of(checkpoint, others, catalog, world_size)
    installed = catalog(given.disabled)
    asked = [installed.lookup("evaluation", name).qualified_name for name in names]
    if names:
        given.table.pop("eval", None)
        given.table["evaluations"] = [_own_or_new(given.table.get("evaluations", ()), name) for name in asked]
    job = given.load(others)
    if data:
        if not hasattr(job.data.config, "path") and _are_only_a_path(data):
            given.table["data"] = _text_data(checkpoint, job, data[0])
        job = _with_data(job, given.load([*others, *data]), data[0])
    if not job.evaluations and not job.eval.interval:
        raise ConfigError(f"{checkpoint.path}: its job evaluates nothing; say with --evaluation what to measure")
    return job


def _own_or_new(own: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    """The table of an evaluation: that of the job, if it has one of this name, and else one of defaults.

    Args:
        name: with its distribution, as jobs of checkpoints have it.
    """
    found = [table for table in own if table.get("name") == name]
    return found[0] if len(found) == 1 else {"name": name}


def _are_only_a_path(settings: Sequence[str]) -> bool:
    """Return whether settings of ``data`` say where the data are, and not which source reads them."""
    keys = {words[0].removeprefix("--").partition("=")[0] for words in settings_in(settings, ("data",))}
    return "data.path" in keys and keys.isdisjoint({"data", "data.name"})


def _text_data(checkpoint: Checkpoint, job: Job, setting: str) -> Mapping[str, Any]:
    """The table of a source that reads text by the run's tokenizer, which is in the checkpoint.

    Raises:
        ConfigError: there is no tokenizer.
    """
    tokenizer = checkpoint.state().get("tokenizer")
    if tokenizer is None:
        raise ConfigError(
            f"{setting}: the run's data ({job.data.name}) have no key path, and {checkpoint.path} has no tokenizer to "
            "read text by; name the source as well, as in data.name=token_files data.path=…"
        )
    folder = checkpoint.path.absolute() / "tokenizer"
    found = {key: value for key, value in tokenizer.items() if value is not None}
    files = {key: str(folder / value) for key, value in found.items() if (folder / str(value)).is_file()}
    return {"name": "forge-plugins-data:text_files", "tokenizer": {**found, **files}}


def _with_data(job: Job, other: Job, setting: str) -> Job:
    """With the whole of the other job's data for each evaluation."""
    evaluations = []
    for use in job.evaluations:
        if not hasattr(use.config, "data"):
            raise ConfigError(f"{setting}: the evaluation {use.name} has no data of its own")
        evaluations.append(attrs.evolve(use, config=attrs.evolve(use.config, data=other.data)))
    return attrs.evolve(job, evaluations=tuple(evaluations))
