"""Beginning with tensors of another run: ``[checkpoint.load]``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import attrs
import torch

from forge_core.checkpoint.contents import model_problem
from forge_core.checkpoint.safe_reader import refuse_misfits
from forge_core.checkpoint.state_dict import empty_optimizer_state
from forge_core.checkpoint.store import Checkpoint, find_checkpoint
from forge_core.config.sections import Job, LoadSection
from forge_core.distributed.collective_errors import run_on_all_ranks
from forge_core.distributed.mesh import Mesh
from forge_core.errors import ConfigError, nearest
from forge_core.train.build import BuiltModel


@attrs.frozen
class WarmStart:
    """A part of a checkpoint to load."""

    checkpoint: Checkpoint
    chosen: frozenset[str]
    """Keys of the checkpoint that the patterns match."""
    others: frozenset[str]


@attrs.frozen
class Loaded:
    """The fate of every tensor, by sorted keys, over all ranks."""

    source: str
    loaded: Sequence[str]
    left_out: Sequence[str]
    """Keys of the checkpoint that the patterns exclude."""
    without_a_place: Sequence[str]
    """Keys of the checkpoint that are chosen, and that this run does not have."""
    fresh: Sequence[str]
    """Tensors of this run's model that keep their first values."""


def choose_warm_start(job: Job, report: Callable[[str], None]) -> WarmStart | None:
    """Resolve ``checkpoint.load``, before anything is built. All ranks call it together.

    Raises:
        ConfigError: there is no whole checkpoint; a pattern means nothing in it; or what is chosen would not be the
            state of this optimizer.
    """
    section = job.checkpoint.load
    if section is None:
        return None
    checkpoint = find_checkpoint(section.path.expanduser(), report, model_problem)
    keys = {*checkpoint.saved_tensors(), *_optimizer_facts(checkpoint)["values"]}
    chosen = _chosen(keys, section)
    start = WarmStart(checkpoint, frozenset(chosen), frozenset(keys - chosen))
    _refuse_foreign_optimizer(job, start)
    return start


def load_warm_start(
    start: WarmStart, model: BuiltModel, optimizer: torch.optim.Optimizer, mesh: Mesh, report: Callable[[str], None]
) -> Loaded:
    """Read what was chosen into model and optimizer, each rank its own part, and report what else there is.

    Raises:
        ConfigError: a tensor has another shape or dtype here; or nothing of what was chosen has a place.
    """
    checkpoint, names, fresh = start.checkpoint, model.parameters, model.tensors()
    tensors = {key: tensor for key, tensor in fresh.items() if key in start.chosen}
    in_all_stages = {name for stage in mesh.gather_over("pp", [*names]) for name in stage}
    state = {key for key in start.chosen if key.startswith("optimizer.") and _parameter(key) in in_all_stages}

    def match() -> None:
        saved = {key: entry for key, entry in checkpoint.saved_tensors().items() if key in state}
        facts = _optimizer_facts(checkpoint)
        values = {key: value for key, value in facts["values"].items() if key in state}
        elsewhere = in_all_stages - names.keys()
        tensors.update(empty_optimizer_state(optimizer, names, saved, {**facts, "values": values}, elsewhere))
        try:
            refuse_misfits(checkpoint.path, tensors)
        except ConfigError as error:
            raise ConfigError(f"checkpoint.load: {error}\nLeave them out with checkpoint.load.exclude.") from error

    run_on_all_ranks(match)  # before they read together
    loaded = _accounted(start, {*tensors, *state}, {*fresh}, mesh)
    run_on_all_ranks(lambda: _refuse_nothing(start, loaded))
    checkpoint.load(tensors)
    _tell(loaded, report)
    return loaded


def _accounted(start: WarmStart, own: Collection[str], own_model: Collection[str], mesh: Mesh) -> Loaded:
    read = {key for stage in mesh.gather_over("pp", sorted(own)) for key in stage}
    model = {key for stage in mesh.gather_over("pp", sorted(own_model)) for key in stage}
    return Loaded(
        source=str(start.checkpoint.path),
        loaded=sorted(read),
        left_out=sorted(start.others),
        without_a_place=sorted(start.chosen - read),
        fresh=sorted(model - read),
    )


def _refuse_nothing(start: WarmStart, loaded: Loaded) -> None:
    if not loaded.loaded:
        raise ConfigError(
            f"checkpoint.load: nothing that was chosen of {loaded.source} has a place in this run: "
            f"{_some(start.chosen)}; this model has {_some(loaded.fresh)}"
        )


def _tell(loaded: Loaded, report: Callable[[str], None]) -> None:
    for words, keys in (
        (f"loaded from {loaded.source}", loaded.loaded),
        ("left out by checkpoint.load", loaded.left_out),
        ("in the checkpoint, but not in this run", loaded.without_a_place),
        ("not loaded, with their first values", loaded.fresh),
    ):
        if keys:
            report(f"{words}: {_some(keys)}")


def _chosen(keys: set[str], section: LoadSection) -> set[str]:
    for name in ("include", "exclude"):
        for pattern in getattr(section, name):
            if not any(fnmatchcase(key, pattern) for key in keys):
                near = nearest(pattern, keys)
                hint = f"did you mean '{near}'?" if near else f"it has {_some(keys)}"
                raise ConfigError(f"checkpoint.load.{name}: {pattern!r} means nothing in {section.path}; {hint}")
    included = {key for key in keys if _matches(key, section.include)}
    chosen = {key for key in included if not _matches(key, section.exclude)}
    if not chosen:
        raise ConfigError(
            f"checkpoint.load: exclude = {[*section.exclude]} leaves nothing of include = {[*section.include]}"
        )
    return chosen


def _matches(key: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def _refuse_foreign_optimizer(job: Job, start: WarmStart) -> None:
    """State of another kind of optimizer, or only a part of what it keeps of a parameter, would fail in the first
    step."""
    state = {key for key in start.chosen if key.startswith("optimizer.")}
    if not state:
        return
    path = start.checkpoint.path
    saved = start.checkpoint.job().get("optimizer", {}).get("name")
    if saved != job.optimizer.qualified_name:
        raise ConfigError(
            f"checkpoint.load: {path} has state of the optimizer {saved}, and this job has "
            f'{job.optimizer.qualified_name}; leave it out with exclude = ["optimizer.*"]'
        )
    for key in sorted(start.others):
        if key.startswith("optimizer.") and any(_parameter(one) == _parameter(key) for one in state):
            raise ConfigError(
                f"checkpoint.load: the patterns leave out {key}, but not all state of {_parameter(key)}; an optimizer "
                "needs all of it or none"
            )


def _optimizer_facts(checkpoint: Checkpoint) -> Mapping[str, Any]:
    return checkpoint.state().get("optimizer") or {"values": {}, "on_host": []}


def _parameter(key: str) -> str:
    return key.removeprefix("optimizer.").rpartition(".")[0]


def _some(keys: Collection[str]) -> str:
    more = ", …" if len(keys) > 3 else ""
    return f"{len(keys)} tensors ({', '.join(sorted(keys)[:3])}{more})"
