"""The configuration of this distribution's components."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import attrs
from attrs.validators import deep_iterable, ge, gt, instance_of, le, lt, min_len

from forge_core.config.sections import Job


@attrs.frozen(kw_only=True)
class ActivationNormsConfig:
    """When ``activation_norms`` measures."""

    interval: int = attrs.field(default=100, validator=gt(0))
    """Steps between measurements: each is of the first logged step from there on."""


@attrs.frozen(kw_only=True)
class CurveExtrapolationConfig:
    """What ``curve_extrapolation`` fits, and when."""

    interval: int = attrs.field(default=100, validator=gt(0))
    """Steps between predictions: each is in the first logged step from there on."""
    skip: int = attrs.field(default=100, validator=ge(0))
    """Steps at the beginning that are not fitted: those of the warm-up, at least."""

    def check(self, job: Job) -> Iterable[tuple[str, str]]:
        """There must be something to fit."""
        if self.skip >= job.train.steps:
            yield "skip", f"must be below train.steps = {job.train.steps}, got {self.skip}: nothing would be fitted"


@attrs.frozen(kw_only=True)
class PeersConfig:
    """Nothing to set: the limits are those of ``[run]``."""


@attrs.frozen(kw_only=True)
class HealthConfig:
    """When ``health`` looks, and what it takes for unhealthy."""

    interval: int = attrs.field(default=200, validator=gt(0))
    """Steps between looks. At each, all ranks wait for their device and for each other."""
    collective_timeout: float = attrs.field(default=60.0, validator=gt(0))
    """Seconds for what the device still has to do and a small all-reduce. Below ``run.step_timeout``, which ends a rank
    that waits as well."""
    least_free: float = attrs.field(default=0.02, validator=[ge(0), lt(1)])
    """Say so when less than this part of a GPU's or the host's memory is free; 0 does not look."""
    on_memory_errors: Literal["stop", "warn"] = "stop"
    """What to do when a GPU has had memory errors that could not be corrected: save and stop with exit code 3, so that
    the run can go on elsewhere, or only say so."""


@attrs.frozen(kw_only=True)
class GarbageCollectionConfig:
    """When ``garbage_collection`` collects."""

    interval: int = attrs.field(default=50, validator=gt(0))
    """Steps between collections. Garbage that refers to itself, such as an error and its frames, takes memory until the
    next one."""


@attrs.frozen(kw_only=True)
class GpuMemoryConfig:
    """Nothing to set."""

    def check(self, job: Job) -> Iterable[tuple[str, str]]:
        """There must be CUDA."""
        if job.run.device not in ("auto", "cuda"):
            yield "", f'gpu_memory reports the memory of CUDA, and run.device = "{job.run.device}"; take it out'


@attrs.frozen(kw_only=True)
class GpuMetricsConfig:
    """Nothing to set."""

    def check(self, job: Job) -> Iterable[tuple[str, str]]:
        """There must be CUDA."""
        if job.run.device not in ("auto", "cuda"):
            yield "", f'gpu_metrics asks the driver of GPUs, and run.device = "{job.run.device}"; take it out'


@attrs.frozen(kw_only=True)
class LayerNormsConfig:
    """Norms of each layer, in the steps that are logged."""

    updates: bool = True
    """Also how far the update moves each layer, for which this rank's weights are copied in these steps."""


@attrs.frozen(kw_only=True)
class MemorySnapshotConfig:
    """What ``memory_snapshot`` records."""

    start: int = attrs.field(default=10, validator=gt(0))
    """The first step of the record."""
    steps: int = attrs.field(default=3, validator=gt(0))
    """Steps of the record, after which it is written and ends."""
    ranks: tuple[int, ...] = attrs.field(
        default=(0,), validator=[min_len(1), deep_iterable(member_validator=[instance_of(int), ge(0)])]
    )
    """The ranks that record, each into files of its own."""
    on_out_of_memory: bool = False
    """Record all along, so that there is a history whenever one of ``ranks`` fails for want of memory. Without it there
    is one in the steps of the record."""
    entries: int = attrs.field(default=100_000, validator=gt(0))
    """Allocations and frees that are kept, the newest; each takes some KB of the host's memory."""

    def check(self, job: Job) -> Iterable[tuple[str, str]]:
        """There must be CUDA, and the record must lie within the run."""
        if job.run.device not in ("auto", "cuda"):
            yield "", f'memory_snapshot records the memory of CUDA, and run.device = "{job.run.device}"; take it out'
        if self.start + self.steps - 1 > job.train.steps:
            end = f"the record ends with step {self.start + self.steps - 1}"
            yield "start", f"{end}, after the last one, train.steps = {job.train.steps}"


@attrs.frozen(kw_only=True)
class ProfileConfig:
    """The steps that ``profile`` records."""

    start: int = attrs.field(default=10, validator=gt(0))
    """The first step of the record."""
    steps: int = attrs.field(default=3, validator=gt(0))
    """Steps of the record. A trace grows by some MB a step."""
    warmup: int = attrs.field(default=1, validator=ge(1))
    """Steps before ``start`` in which the profiler runs and nothing is kept: its own start costs time."""
    all_ranks: bool = False
    """Every rank writes its own files, and not rank 0 alone."""
    memory: bool = False
    """Also note what is allocated and freed."""
    stacks: bool = False
    """Also note the Python lines that call operators; this makes steps slower."""

    def check(self, job: Job) -> Iterable[tuple[str, str]]:
        """A record must lie within the run."""
        if self.start + self.steps - 1 > job.train.steps:
            end = f"the record ends with step {self.start + self.steps - 1}"
            yield "start", f"{end}, after the last one, train.steps = {job.train.steps}"
        if self.start <= self.warmup:
            yield "start", f"must be above warmup = {self.warmup}, got {self.start}"


def _are_of_steps(_: object, __: attrs.Attribute[tuple[str, ...]], value: tuple[str, ...]) -> None:
    for name in value:
        if name.startswith("eval/"):
            raise ValueError(f"{name!r} is of evaluations, and the lines of steps are smoothed; remove it")
        if value.count(name) > 1:
            raise ValueError(f"{name!r} is named twice; keep one")


@attrs.frozen(kw_only=True)
class SmoothedConfig:
    """What ``smoothed`` smooths, and how much."""

    alpha: float = attrs.field(default=0.1, validator=[gt(0), le(1)])
    """Weight of the newest value; about ``1 / alpha`` lines count."""
    metrics: tuple[str, ...] = attrs.field(
        default=("loss", "tokens_per_second", "mfu", "step_seconds"), validator=[min_len(1), _are_of_steps]
    )
    """Names of logged values, as in ``metrics.jsonl``. One that comes later in the run is smoothed from there on."""
