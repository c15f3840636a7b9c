"""The sections of a job that belong to the core. Sections that choose a component are that component's own class."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import attrs
from attrs.validators import ge, gt, in_, lt, or_

from forge_core.component import Slot, Use

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The axes of the mesh, outermost first."""

Precision = Literal["fp32", "bf16", "bf16_pure"]


@attrs.frozen(kw_only=True)
class RunSection:
    """What the run is called and where it lives."""

    name: str | None = None
    """Name of the run and of its directory; by default the name of the TOML file."""
    dir: Path = Path("runs")
    """The run's files are in ``<dir>/<name>/``. Relative to the working directory."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """``auto`` takes CUDA, then MPS, then the CPU."""
    first_step_timeout: float = attrs.field(default=1800.0, validator=gt(0))
    """Seconds that a rank waits for the others until its first step is done: for them to start, to build, to read a
    checkpoint, to compile."""
    step_timeout: float = attrs.field(default=600.0, validator=gt(0))
    """The same from then on. A rank that makes the others wait longer is given up, and the run ends with exit code
    5."""


@attrs.frozen(kw_only=True)
class TrainSection:
    """How long, on how much at a time."""

    steps: int = attrs.field(validator=gt(0))
    """Optimizer steps of the whole run."""
    seq_len: int = attrs.field(validator=gt(0))
    """Tokens a sample."""
    batch_size: int = attrs.field(default=8, validator=gt(0))
    """Sequences a microbatch a data-parallel rank."""
    grad_accumulation: int | None = attrs.field(default=None, validator=attrs.validators.optional(gt(0)))
    """Microbatches a step; 1 unless ``global_batch_size`` says otherwise."""
    global_batch_size: int | None = attrs.field(default=None, validator=attrs.validators.optional(gt(0)))
    """Sequences a step over all ranks; ``grad_accumulation`` follows from it. Give one of the two."""
    clip_norm: float = attrs.field(default=1.0, validator=ge(0))
    """Largest global L2 norm of the gradient; 0 does not clip. The norm is measured in both cases."""
    seed: int = attrs.field(default=42, validator=[ge(0), lt(2**63)])
    """Decides the initial weights, and the order of the data unless ``data_seed`` does."""
    data_seed: int | None = attrs.field(default=None, validator=attrs.validators.optional([ge(0), lt(2**63)]))
    """Decides the order of the data; by default ``seed``."""
    precision: Precision = "bf16"
    """``bf16``: fp32 parameters and optimizer state, bf16 compute, fp32 reductions. ``bf16_pure``: everything in
    bf16."""


@attrs.frozen(kw_only=True)
class ParallelSection:
    """The mesh, and what is done to the model."""

    dp_replicate: int = attrs.field(default=1, validator=gt(0))
    """Copies of the model."""
    dp_shard: int = attrs.field(default=-1, validator=or_(in_([-1]), gt(0)))
    """Ranks that share one copy's parameters (FSDP); −1 takes all ranks that the other axes leave."""
    tp: int = attrs.field(default=1, validator=gt(0))
    """Tensor parallelism."""
    pp: int = attrs.field(default=1, validator=gt(0))
    """Pipeline stages."""
    cp: int = attrs.field(default=1, validator=gt(0))
    """Context parallelism: ranks that share one sequence."""
    ep: int = attrs.field(default=1, validator=gt(0))
    """Expert parallelism, over ranks borrowed from data parallelism."""
    passes: Mapping[str, Annotated[Use | None, Slot("parallel_pass")]] = attrs.field(factory=dict)
    """Passes by name: ``fsdp = true`` or a table of its keys; ``false`` keeps a pass out. Passes that a degree above 1
    or ``train.precision`` needs are added by themselves, if just one installed package has one."""


@attrs.frozen(kw_only=True)
class CheckpointSection:
    """When to save. The last step is always saved."""

    interval: int = attrs.field(default=1000, validator=ge(0))
    """Steps between checkpoints; 0 saves at the end only."""


@attrs.frozen(kw_only=True)
class EvalSection:
    """Evaluation on held-out data during the run."""

    interval: int = attrs.field(default=0, validator=ge(0))
    """Steps between evaluations, the last step always included; 0 does not evaluate."""
    batches: int = attrs.field(default=0, validator=ge(0))
    """Global batches of ``train.batch_size`` sequences a rank each time; 0 takes the whole set."""
    data: Annotated[Use | None, Slot("data_source")] = None
    """Data of its own; by default the part that ``[data]`` holds out."""


@attrs.frozen(kw_only=True)
class MetricsSection:
    """When to log."""

    interval: int = attrs.field(default=10, validator=gt(0))
    """Steps between lines; the first and the last step are always logged."""


@attrs.frozen(kw_only=True)
class PluginsSection:
    """Which installed plugins this job sees."""

    disable: tuple[str, ...] = ()
    """Distributions that are not imported."""
    require: tuple[str, ...] = ()
    """Requirements that must be met, such as ``"acme-routers>=0.3,<0.4"``."""


@attrs.frozen(kw_only=True)
class Job:
    """A fully resolved configuration.

    The choices with a default name are looked up in the catalog like any other: the core has no component of its own.
    """

    run: RunSection = attrs.field(factory=RunSection)
    model: Annotated[Use, Slot("model")]
    data: Annotated[Use, Slot("data_source")]
    train: TrainSection
    optimizer: Annotated[Use, Slot("optimizer")]
    scheduler: Annotated[Use, Slot("scheduler", default="constant")]
    loss: Annotated[Use, Slot("loss", default="cross_entropy")]
    parallel: ParallelSection = attrs.field(factory=ParallelSection)
    checkpoint: CheckpointSection = attrs.field(factory=CheckpointSection)
    eval: EvalSection = attrs.field(factory=EvalSection)
    metrics: MetricsSection = attrs.field(factory=MetricsSection)
    callbacks: tuple[Annotated[Use, Slot("callback")], ...] = ()
    trackers: tuple[Annotated[Use, Slot("tracker")], ...] = ()
    plugins: PluginsSection = attrs.field(factory=PluginsSection)
