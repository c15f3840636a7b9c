"""The sections of a job that belong to the core. Sections that choose a component are that component's own class."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import attrs
from attrs.validators import ge, gt, in_, le, lt, optional, or_

from forge_core.config.time_limit import DEFAULT_LEAD, is_time_limit, lead_problem, seconds_of
from forge_core.contracts.component_ref import ComponentRef
from forge_core.contracts.evaluation import label_of
from forge_core.registry.component import Slot

__all__ = ["AXES", "DEFAULT_LEAD", "AnomaliesSection", "CheckpointSection", "EvalSection", "Job", "LoadSection"]
__all__ += ["MetricsSection", "Objections", "ParallelSection", "PhaseSection", "PluginsSection", "Precision"]
__all__ += ["RunSection"]
__all__ += ["ShardingAxis", "TrainSection", "is_time_limit", "lead_problem", "mesh_words", "seconds_of", "setting_of"]

Objections = Iterator[tuple[str, str]]
"""Problems that a section has with the job, as a component's ``check`` tells them: a key of its own, and a sentence."""

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The axes of the mesh, outermost first."""


def mesh_words(degrees: Mapping[str, int]) -> str:
    """``"dp_shard 4 × tp 2"``, without axes of one rank."""
    return " × ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1)


def setting_of(capability: str) -> tuple[str, str]:
    """The key that asks for what a pass serves: an axis of the mesh, ``"ep"`` or ``"precision"``."""
    return ("train" if capability == "precision" else "parallel", capability)


ShardingAxis = Literal["pp", "dp_shard", "cp", "tp"]
"""The axes of the mesh along which ranks hold different parameters."""

Precision = Literal["fp32", "bf16", "fp16", "bf16_pure"]


@attrs.frozen(kw_only=True)
class RunSection:
    """The name of the run and its place."""

    name: str | None = None
    """Name of the run and of its directory; by default the name of the TOML file."""
    dir: Path = Path("runs")
    """The run's files are in ``<dir>/<name>/``. Relative to the working directory."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """``auto`` takes CUDA, then MPS, then the CPU."""
    time_limit: int | str | None = attrs.field(default=None, validator=optional(is_time_limit))
    """How long one start of the run may last, such as ``"11:50:00"``, ``"2-00:00:00"`` or minutes, ``"30"``. The run
    saves and stops before that. The end of a cluster's job is known without it."""
    stop_before_end: float | None = attrs.field(default=None, validator=optional(gt(0)))
    """Seconds before ``time_limit``, or before the end of a cluster's job, at which the run saves and stops; 120 by
    default. They must hold a step and a checkpoint: a save that takes more than half of them moves the stop forward."""
    first_step_timeout: float = attrs.field(default=1800.0, validator=[gt(0), le(10**9)])
    """Seconds that a rank waits for the others until its first step is done: for them to start, to build, to read a
    checkpoint, to compile."""
    step_timeout: float = attrs.field(default=600.0, validator=[gt(0), le(10**9)])
    """The same from then on. A rank that makes the others wait longer is given up, and the run ends with exit code 5;
    so is one that gets no further for so long by itself, through a step, a batch of an evaluation, a callback: with
    several ranks, or with ``supervisor``."""
    supervisor: Annotated[ComponentRef | None, Slot("supervisor")] = None
    """Names a rank that is lost, in a run on several ranks; by default ``peers``, where that is installed. One process
    alone, too, is ended where it hangs, if this is set."""
    trackers_timeout: float = attrs.field(default=60.0, validator=[gt(0), le(10**9)])
    """Seconds that the start waits for each tracker to be ready, a checkpoint for those with state to be done with
    their lines, and the end of the run for all of them."""

    def check(self, job: Job) -> Objections:
        """A name that is no file's; a ``stop_before_end`` that is not below ``time_limit``."""
        name = str(self.name)
        if name.strip() != name or name in ("", ".", "..") or not name.isprintable() or set(name) & set("/\\"):
            yield "name", f"must be a plain file name, as it becomes a directory; got {name!r}"
        elif (size := len(name.encode())) > 200:
            yield "name", f"has {size} bytes, which are too many for a directory's name; at most 200 are allowed"
        if self.time_limit is not None and (
            problem := lead_problem(self.stop_before_end, self.time_limit, "run.time_limit")
        ):
            yield "stop_before_end", problem


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
    """``bf16``: fp32 parameters and optimizer state, bf16 compute, fp32 reductions. ``fp16``: the same with fp16, for
    GPUs without bf16; the loss is scaled for backward, and a step whose gradients overflow has no update.
    ``bf16_pure``: parameters, gradients, optimizer state and compute in bf16, microbatches of a step summed in bf16
    too, unless FSDP does so in fp32; buffers, such as counts of tokens, stay as a module has them."""


@attrs.frozen(kw_only=True)
class AnomaliesSection:
    """Steps whose update would do harm, and is left out on all ranks: a loss, a gradient or an input is not finite, or
    the gradient is far larger than before."""

    roll_back_after: int = attrs.field(default=5, validator=ge(1))
    """So many such steps in a row, and the run goes back to the newest checkpoint from before them, and from then on
    goes without the samples of these steps."""
    give_up_after: int = attrs.field(default=3, validator=ge(0))
    """How often it goes back without getting a checkpoint further; then it ends with exit code 4. With 0, and
    ``roll_back_after = 1``, at the first such step."""
    spike_factor: float = attrs.field(default=0.0, validator=or_(in_([0.0]), gt(1)))
    """A gradient whose norm is more than so many times its running mean is left out as well; 0 lets all through."""
    spike_window: int = attrs.field(default=100, validator=ge(2))
    """Steps over which that mean runs, and before which nothing is taken for a spike."""


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
    passes: Mapping[str, Annotated[ComponentRef | None, Slot("parallel_pass")]] = attrs.field(factory=dict)
    """Passes by name: ``fsdp = true`` or a table of its keys; ``false`` keeps a pass out. Passes that a degree above 1
    or ``train.precision`` needs are added by themselves, if just one installed package has one."""


@attrs.frozen(kw_only=True)
class LoadSection:
    """Tensors of another run to begin with, instead of fresh ones. It is read when the run starts afresh, and never
    again."""

    path: Path
    """A checkpoint; the directory of a run, whose newest one is meant; or a folder in another format that an installed
    package reads (kind ``weight_source``)."""
    include: tuple[str, ...] = attrs.field(default=("model.*",), validator=attrs.validators.min_len(1))
    """Patterns of the tensors to load, such as ``"model.blocks.*"``; ``"optimizer.*"`` is the optimizer's state, and
    ``"evaluation.*"`` are averages in place of the trained weights."""
    exclude: tuple[str, ...] = ()
    """Patterns of those, of these, to leave out."""
    rename: Mapping[str, str] = attrs.field(factory=dict)
    """Names of parameters there, and here: ``{"blocks.*" = "decoder.blocks.*"}``. Each ``*`` of the second stands for
    what that of the first does; the longest pattern that fits counts."""

    def check(self) -> Objections:
        """Renamings that do not say what stands where."""
        for there, here in self.rename.items():
            if there.count("*") != here.count("*"):
                yield f"rename.{there}", f"{here!r} must have as many '*' as {there!r}, each for one of its"


@attrs.frozen(kw_only=True)
class CheckpointSection:
    """When to save, what to keep, and where to start from. The last step is always saved."""

    interval: int = attrs.field(default=1000, validator=ge(0))
    """Steps between checkpoints; 0 saves at the end only."""
    minutes: float = attrs.field(default=0.0, validator=ge(0))
    """Minutes between checkpoints, beside ``interval``; 0 goes by steps alone."""
    powers_of_two_from: int = attrs.field(default=0, validator=ge(0))
    """With ``powers_of_two_until``: also save at this step and 1, 2, 4, 8, … steps after it. 0 is the untrained
    model."""
    powers_of_two_until: int = attrs.field(default=0, validator=ge(0))
    """The last step at which that happens; 0 switches it off."""
    keep_last: int | None = attrs.field(default=None, validator=attrs.validators.optional(ge(1)))
    """Keep so many of the newest, and what the next three keys keep; by default everything is kept."""
    keep_every: int = attrs.field(default=0, validator=ge(0))
    """Also keep those whose step is a multiple of this; 0 keeps none for that."""
    keep_best: int = attrs.field(default=0, validator=ge(0))
    """Also keep so many of the best by ``best_metric``."""
    best_metric: str = "eval/loss"
    """A value that was measured at the same step: ``eval/loss``, ``eval/perplexity``, ``eval/loss/<source>`` of a
    mixture, or ``eval/<label>/<value>`` of an entry of ``[[evaluations]]``."""
    best_is: Literal["lowest", "highest"] = "lowest"
    """Which of its values are good."""
    frozen: Literal["whole", "once"] = "whole"
    """Parameters that no phase of the run trains, such as those of a frozen encoder: ``whole`` writes them into each
    checkpoint; ``once`` lets checkpoints share the files that have them, by hard links. A mirror has them in each."""
    background: bool = True
    """Train on while files are written. It costs a copy of each rank's tensors in host memory."""
    on_failure: Literal["continue", "stop"] = "continue"
    """The reaction to a checkpoint that cannot be written (a full disk): say so and train on, or end the run. The
    one at the end of a run has to be written in any case."""
    timeout: float = attrs.field(default=1800.0, validator=[gt(0), le(10**9)])
    """Seconds that a rank waits for the others while a checkpoint is written, and the end of the run for the mirror."""
    mirror: Annotated[ComponentRef | None, Slot("checkpoint_mirror", default="fsspec", text_key="url")] = None
    """A second place for checkpoints, a path or a URL (``s3://bucket/runs``), to which each is copied in the background
    once it is committed: ``<mirror>/<run.name>/checkpoints/``. A run that finds a newer one there fetches it first. A
    table with ``name`` chooses another kind of mirror; a string is the ``url`` of ``fsspec``."""
    mirror_keep_last: int | None = attrs.field(default=None, validator=attrs.validators.optional(ge(1)))
    """Keep so many of the newest there, and what ``keep_every``, ``powers_of_two_*`` and ``keep_best`` keep; by default
    as many as ``keep_last`` says."""
    resume: str = attrs.field(default="auto", validator=attrs.validators.min_len(1))
    """``auto``: from the run's newest whole checkpoint, or afresh if it has none. ``never``: afresh; checkpoints that
    are there are put aside. A step: from the run's checkpoint of that step; later ones are put aside. A path: from that
    checkpoint, or the newest of that run, unless this run has one of its own."""
    load: LoadSection | tuple[LoadSection, ...] | None = None
    """Parts that a fresh start takes from another run: weights without the position in the data, for instance. An array
    of tables, ``[[checkpoint.load]]``, takes parts from several."""

    @property
    def loads(self) -> tuple[LoadSection, ...]:
        """The entries of ``load``."""
        return self.load if isinstance(self.load, tuple) else () if self.load is None else (self.load,)

    def check(self, job: Job) -> Objections:
        """Keys that contradict each other, or would do nothing."""
        start, end = self.powers_of_two_from, self.powers_of_two_until
        if start and not end:
            yield "powers_of_two_from", "has no effect without powers_of_two_until, the step up to which they are saved"
        elif start > end:
            yield "powers_of_two_from", f"{start} is after powers_of_two_until = {end}"
        elif start > job.train.steps:
            yield "powers_of_two_from", f"{start} is after the last step, train.steps = {job.train.steps}"
        for key in ("keep_every", "keep_best"):
            if getattr(self, key) and self.keep_last is None and self.mirror_keep_last is None:
                yield key, "has no effect without keep_last, since all are kept; set how many of the newest to keep"
        if self.keep_best:
            yield from self._check_best(job)
        if self.mirror is None and self.mirror_keep_last is not None:
            yield "mirror_keep_last", "has no effect without mirror"
        if self.load is not None and self.resume not in ("auto", "never"):
            yield "load", f"has no effect: checkpoint.resume = {self.resume!r} starts from a whole checkpoint"
        for index, one in enumerate(self.loads):
            at = f"load[{index}]" if isinstance(self.load, tuple) else "load"
            yield from ((f"{at}.{key}", sentence) for key, sentence in one.check())

    def _check_best(self, job: Job) -> Objections:
        """A checkpoint is judged by an evaluation at its own step."""
        measured = dict.fromkeys(("eval/loss", "eval/perplexity", "eval/loss/?*"), ("eval.interval", job.eval.interval))
        for index, use in enumerate(job.evaluations):
            measured[f"eval/{label_of(use)}/?*"] = f"evaluations[{index}].interval", getattr(use.config, "interval", 0)
        found = [measured[pattern] for pattern in measured if fnmatchcase(self.best_metric, pattern)]
        if not found:
            choices = ", ".join(measured).replace("?*", "<value>")
            yield "best_metric", f"{self.best_metric!r} is not measured in this job; choose one of {choices}"
            return
        key, evaluated = found[-1]
        if not evaluated:
            yield "keep_best", f"nothing is evaluated to tell which are the best; set {key}"
        elif not self.interval:
            yield "keep_best", "the last checkpoint is the only one while checkpoint.interval = 0"
        elif self.interval % evaluated:
            yield "keep_best", f"checkpoint.interval = {self.interval} must be a multiple of {key} = {evaluated}"

    def at_mirror(self) -> CheckpointSection:
        """The section as the mirror has it: it decides which checkpoints stay there."""
        return self if self.mirror_keep_last is None else attrs.evolve(self, keep_last=self.mirror_keep_last)


@attrs.frozen(kw_only=True)
class EvalSection:
    """Evaluation on held-out data during the run."""

    interval: int = attrs.field(default=0, validator=ge(0))
    """Steps between evaluations, the last step always included; 0 does not evaluate."""
    batches: int = attrs.field(default=0, validator=ge(0))
    """How much each time, in batches of ``train.global_batch_size`` sequences, for any number of ranks; 0 takes
    the whole set."""
    data: Annotated[ComponentRef | None, Slot("data_source")] = None
    """Data of its own; by default the part that ``[data]`` holds out."""


@attrs.frozen(kw_only=True)
class MetricsSection:
    """When to log."""

    interval: int = attrs.field(default=10, validator=gt(0))
    """Steps between lines; the first and the last step are always logged."""
    grad_norm_per: tuple[ShardingAxis, ...] = ()
    """Axes of the mesh for which to log the norm of the gradient that each coordinate holds: with ``["pp"]``,
    ``grad_norm/pp0`` for the first pipeline rank and so on. Their squares add up to that of ``grad_norm``; of what
    several coordinates hold copies, each has an equal share. Not ``dp_replicate``, along which all is copied."""

    def check(self, job: Job) -> Objections:
        """Axes of ``grad_norm_per`` that would tell nothing."""
        axes = self.grad_norm_per
        for index, axis in enumerate(axes):
            if getattr(job.parallel, axis) == 1:
                sentence = f"there is one rank along {axis}, whose norm is grad_norm; leave {axis} out"
                yield f"grad_norm_per[{index}]", sentence
            elif axis in axes[:index]:
                yield f"grad_norm_per[{index}]", f"{axis} is named twice; keep one"


def _is_start(_: object, attribute: attrs.Attribute[Any], value: int | float | str) -> None:
    if isinstance(value, str):
        if not _TOKENS.fullmatch(value):
            raise ValueError(f'must be a step, a fraction of train.steps, or "2e9 tokens"; got {value!r}')
    elif isinstance(value, float):
        if not 0 < value < 1:
            raise ValueError(f"must be above 0 and below 1 as a fraction of train.steps, got {value}")
    elif value < 1:
        raise ValueError(f"must be at least 1, the first step, got {value}")


_TOKENS = re.compile(r"(\d{1,18}(?:\.\d+)?(?:e\d{1,2})?) tokens")


@attrs.frozen(kw_only=True)
class PhaseSection:
    """A part of the run that trains otherwise, up to the next phase or the end. It is a function of the step: nothing
    of it is saved."""

    at: int | float | str = attrs.field(validator=_is_start)
    """The step whose update is the first of the phase; or a fraction of ``train.steps``, or ``"2e9 tokens"``, after
    which it begins."""
    lr_scale: float | Mapping[str, float] = 1.0
    """Factor on the scheduled learning rate of all parameters; or factors by patterns of their names, such as
    ``{"blocks.*" = 0.1}``, of which the longest that fits counts. Groups that the model names may stand among them,
    ``{"@connector" = 10.0}``; the one that means the fewest parameters then counts."""
    train: tuple[str, ...] = attrs.field(default=("*",), validator=attrs.validators.min_len(1))
    """Patterns of the names of parameters that are trained; the others stay as they are, bit for bit. ``*`` stands for
    anything, dots included. Groups that the model names may stand among them, such as ``"@connector"``."""
    data: Mapping[str, Any] = attrs.field(factory=dict)
    """Changes of the data, with keys of the data source: ``{ weights = { books = 0.9 } }`` of a mixture."""

    def first_step(self, train: TrainSection) -> int | None:
        """The step whose update is the first of the phase; ``None`` as long as the tokens of a step are not known."""
        if isinstance(self.at, str):
            if train.global_batch_size is None:
                return None
            match = _TOKENS.fullmatch(self.at)
            assert match is not None, "the validator has seen to it"
            return int(float(match[1])) // (train.global_batch_size * train.seq_len) + 1
        # 0.29 of 100 steps is 28.999… in floats
        return int(self.at * train.steps + 1e-9) + 1 if isinstance(self.at, float) else self.at

    def check(self, job: Job) -> Objections:
        """Factors that are no factors, and a beginning after the end."""
        scales = self.lr_scale if isinstance(self.lr_scale, Mapping) else {"": self.lr_scale}
        for pattern, scale in scales.items():
            if not 0 <= scale <= 10**6:  # as those of an optimizer's groups
                yield f"lr_scale.{pattern}".rstrip("."), f"must be at least 0 and at most 1000000, got {scale:g}"
        first = self.first_step(job.train)
        if first is not None and first > job.train.steps:
            yield "at", f"{self.at!r} begins at step {first}, after the last one, train.steps = {job.train.steps}"


@attrs.frozen(kw_only=True)
class PluginsSection:
    """Which installed plugins this job sees."""

    disable: tuple[str, ...] = ()
    """Distributions that are not imported."""
    require: tuple[str, ...] = ()
    """Requirements that must be met, such as ``"acme-routers>=0.3,<0.4"``."""
    files: tuple[Path, ...] | Mapping[str, str] = ()
    """Plugins in a file: ``["my_router.py"]``, relative to the configuration; a resolved job has their texts."""

    @property
    def texts(self) -> Mapping[str, str]:
        """The texts of ``files``, by name."""
        return self.files if isinstance(self.files, Mapping) else {}


@attrs.frozen(kw_only=True)
class Job:
    """A fully resolved configuration.

    The choices with a default name are looked up in the catalog like any other: the core has no component of its own.
    """

    run: RunSection = attrs.field(factory=RunSection)
    model: Annotated[ComponentRef, Slot("model")]
    data: Annotated[ComponentRef, Slot("data_source")]
    train: TrainSection
    optimizer: Annotated[ComponentRef, Slot("optimizer")]
    scheduler: Annotated[ComponentRef, Slot("scheduler", default="constant")]
    loss: Annotated[ComponentRef, Slot("loss", default="cross_entropy")]
    parametrization: Annotated[ComponentRef | None, Slot("parametrization")] = None
    anomalies: AnomaliesSection = attrs.field(factory=AnomaliesSection)
    parallel: ParallelSection = attrs.field(factory=ParallelSection)
    checkpoint: CheckpointSection = attrs.field(factory=CheckpointSection)
    eval: EvalSection = attrs.field(factory=EvalSection)
    metrics: MetricsSection = attrs.field(factory=MetricsSection)
    phases: tuple[PhaseSection, ...] = ()
    evaluations: tuple[Annotated[ComponentRef, Slot("evaluation")], ...] = ()
    callbacks: tuple[Annotated[ComponentRef, Slot("callback")], ...] = ()
    trackers: tuple[Annotated[ComponentRef, Slot("tracker")], ...] = ()
    plugins: PluginsSection = attrs.field(factory=PluginsSection)

    def check(self) -> Objections:
        """Phases out of order; two evaluations of one label. With ``run.time_limit``: whether a step and a save fit
        into the time before it at which the run stops."""
        run = self.run
        if run.time_limit is not None and not lead_problem(run.stop_before_end, run.time_limit, "run.time_limit"):
            lead = DEFAULT_LEAD if run.stop_before_end is None else run.stop_before_end
            yield from self.too_long_to_stop(lead, "run.stop_before_end", "run.time_limit")
        for index, phase in enumerate(self.phases):
            for key, sentence in phase.check(self):
                yield f"phases[{index}].{key}", sentence
        starts = [phase.first_step(self.train) for phase in self.phases]
        for index, (before, start) in enumerate(pairwise(starts), start=1):
            if before is not None and start is not None and start <= before:
                yield f"phases[{index}].at", f"begins at step {start}, not after step {before} of the phase before it"
        labels = [label_of(use) for use in self.evaluations]
        for index, label in enumerate(labels):
            if label in labels[:index]:
                sentence = f"another entry is logged as eval/{label} already; give each a label of its own"
                yield f"evaluations[{index}].label", sentence

    def too_long_to_stop(self, lead: float, name: str, end: str) -> Objections:
        """Timeouts by which a step or a save may take longer than there is time for it before the end.

        One that has not been raised above its default says nothing about how long things take in this run.

        Args:
            lead: seconds between the moment when the run is told to stop and its end.
            name: of the key that says so.
            end: what ends it.
        """
        for section_name, key, what in (("checkpoint", "timeout", "save"), ("run", "step_timeout", "step")):
            section = getattr(self, section_name)
            seconds = getattr(section, key)
            if seconds > max(getattr(attrs.fields(type(section)), key).default, lead):
                sentence = (
                    f"by {seconds:g} s, a {what} may take longer than {name} = {lead:g} s, after which {end} ends the "
                    f"run: raise {name} to what a step and a save take, or lower this one below it"
                )
                yield f"{section_name}.{key}", sentence
