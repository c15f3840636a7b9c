"""``state.json`` and ``job.toml`` of a checkpoint, structured: a stranger may have written them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, TypeVar

import attrs
from attrs.validators import ge, le, lt, min_len, optional

from forge_core.checkpoint.manifest import DamagedError, read_manifest
from forge_core.config.converter import structure
from forge_core.config.problems import InvalidError
from forge_core.config.regular_file import read_regular_file
from forge_core.config.toml_text import MAX_BYTES, parse_toml
from forge_core.registry.catalog import Catalog

STATE = "state.json"
JOB = "job.toml"
_MAX_BYTES = {STATE: 2**28, JOB: MAX_BYTES}
_COUNT = [ge(0), lt(2**62)]
"""Validators of counts: sums of them fit into 64 bits."""

T = TypeVar("T")


@attrs.frozen(kw_only=True)
class OptimizerFacts:
    """Values that an optimizer keeps besides tensors."""

    values: Mapping[str, bool | int | float | str | None]
    on_host: tuple[str, ...]
    version: int = attrs.field(default=1, validator=_COUNT)
    """The optimizer's ``state_version``."""


@attrs.frozen(kw_only=True)
class ComponentState:
    """The state of a callback, a tracker, or another component that has any."""

    version: int
    state: Mapping[str, Any]


@attrs.frozen
class SampleRange:
    """Steps in a row whose updates were left out, and their samples: positions ``start`` to ``stop − 1``."""

    first_step: int = attrs.field(validator=_COUNT)
    start: int = attrs.field(validator=_COUNT)
    stop: int = attrs.field(validator=_COUNT)
    steps: int = attrs.field(validator=_COUNT)


SavedRow = SampleRange
"""Its older name."""


@attrs.frozen(kw_only=True)
class SavedAnomalies:
    """The step guard's state."""

    skipped: int = attrs.field(validator=_COUNT)
    row: SampleRange | None
    mean_norm: tuple[float, float]
    loss_scale: tuple[float, float, float] | None = None


@attrs.frozen(kw_only=True)
class SavedRollingBack:
    """How often the run has gone back, and where to."""

    attempts: int = attrs.field(validator=_COUNT)
    to_step: int = attrs.field(validator=[ge(-1), lt(2**62)])


def _are_stretches(_: object, __: object, stretches: Sequence[tuple[int, int]]) -> None:
    last = 0
    for start, stop in stretches:
        if not last <= start < stop < 2**62:
            raise ValueError(f"must be stretches in their order, apart from each other; got {[start, stop]}")
        last = stop


@attrs.frozen(kw_only=True)
class ModelState:
    """State that a model needs to be used."""

    step: int = attrs.field(validator=_COUNT)
    vocab_size: int = attrs.field(validator=[ge(1), le(2**31)])
    tokenizer: Mapping[str, Any] | None = None
    modules: Mapping[str, int] = attrs.field(factory=dict)
    """The ``state_version`` of each module that has one."""
    optimizer: OptimizerFacts | None = None
    """``None`` where its state has been left out."""


@attrs.frozen(kw_only=True)
class ResumeState(ModelState):
    """State that a run needs to go on."""

    data_fingerprint: str
    optimizer: OptimizerFacts
    position: int = attrs.field(validator=_COUNT)
    left_out: tuple[tuple[int, int], ...] = attrs.field(default=(), validator=_are_stretches)
    callbacks: Mapping[str, ComponentState]
    trackers: Mapping[str, ComponentState] = attrs.field(factory=dict)
    anomalies: SavedAnomalies | None = None
    rolling_back: SavedRollingBack | None = None
    accumulation_asked_for: int | None = attrs.field(default=None, validator=optional([ge(1), lt(2**62)]))


@attrs.frozen(kw_only=True)
class SavedComponent:
    """The choice of a component; its own keys are checked where its class is known."""

    name: str = attrs.field(validator=min_len(1))


@attrs.frozen(kw_only=True)
class SavedTrain:
    """The keys of ``[train]`` that a resume looks at."""

    batch_size: int = attrs.field(validator=[ge(1), lt(2**62)])
    global_batch_size: int = attrs.field(validator=[ge(1), lt(2**62)])


@attrs.frozen(kw_only=True)
class ModelJob:
    """The keys of a job without which its model cannot be used."""

    model: SavedComponent
    optimizer: SavedComponent | None = None


@attrs.frozen(kw_only=True)
class ResumeJob(ModelJob):
    """The keys of a job without which its run cannot go on."""

    optimizer: SavedComponent
    train: SavedTrain


def resume_problem(folder: Path) -> str | None:
    """Why no run can go on from the checkpoint in ``folder``, whose files are those of its manifest; or ``None``."""
    return _problem(folder, ResumeState, ResumeJob)


def model_problem(folder: Path) -> str | None:
    """Why the model of a checkpoint cannot be used, as ``resume_problem`` has it."""
    return _problem(folder, ModelState, ModelJob)


def read_state(folder: Path) -> dict[str, Any]:
    """The table in ``state.json``.

    Raises:
        DamagedError: it cannot be read, or is no table of JSON values.
    """
    return parse_state(read_text(folder, STATE))


def parse_state(text: bytes) -> dict[str, Any]:
    """Read the text of ``state.json``. Raises as ``read_state`` does."""
    try:
        state = json.loads(text)
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise DamagedError(f"{STATE} is no table of JSON values")
    return state


def read_job(folder: Path) -> dict[str, Any]:
    """The table in ``job.toml``, which stands alone: it extends nothing.

    Raises:
        DamagedError: it cannot be read, or is no such table.
    """
    return parse_job(read_text(folder, JOB))


def parse_job(text: bytes) -> dict[str, Any]:
    """Read the text of ``job.toml``. Raises as ``read_job`` does."""
    try:
        job = parse_toml(text.decode())
    except ValueError as error:
        raise DamagedError(f"{JOB} is no TOML: {str(error)[:200]}") from None
    if "extends" in job:
        raise DamagedError(f"{JOB}: extends: a checkpoint stands alone, and reads no other file")
    return job


def read_text(folder: Path, name: str) -> bytes:
    """The content of ``STATE`` or ``JOB``.

    Raises:
        DamagedError: it cannot be read.
    """
    try:
        return read_regular_file(folder / name, _MAX_BYTES[name], follow_link=False)
    except OSError as error:
        raise DamagedError(f"{name} cannot be read ({error.strerror})") from error


def leads_outside(value: Any) -> str | None:
    """The first text in a table that would be a path to outside of the folder it is relative to."""
    if isinstance(value, (Mapping, list, tuple)):
        items = value.values() if isinstance(value, Mapping) else value
        return next((found for item in items if (found := leads_outside(item)) is not None), None)
    if not isinstance(value, str):
        return None
    is_outside = value.startswith(("/", "~")) or ".." in PurePath(value).parts or "\0" in value
    return value if is_outside else None


def _problem(folder: Path, state_class: type[ModelState], job_class: type[ModelJob]) -> str | None:
    try:
        state = _structured(read_state(folder), state_class, STATE)
        _structured(read_job(folder), job_class, JOB)
        manifest, outside = read_manifest(folder), leads_outside(state.tokenizer)
    except DamagedError as error:
        return str(error)
    except RecursionError:
        return f"{STATE} nests too deep"
    if state.step != manifest.step:
        return f"{STATE}: step: it is of step {state.step}, the checkpoint of step {manifest.step}"
    if outside is not None:
        return f"{STATE}: tokenizer: {outside!r} leads outside of the checkpoint"
    return None


def _structured(table: Mapping[str, Any], cls: type[T], file: str) -> T:
    """Other versions, and components, have more to say than is looked at."""
    try:
        return structure(table, cls, Catalog([]), ignores_unknown=True)
    except InvalidError as error:
        more = f" (and {len(error.problems) - 1} more)" if len(error.problems) > 1 else ""
        raise DamagedError(f"{file}: {str(error.problems[0])[:300]}{more}") from None
