"""Keys of the passes."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import attrs
from attrs.validators import and_, ge, gt, le, min_len, optional

from forge_core.api import ComponentRef
from forge_core.config.sections import Job
from forge_plugins_parallel.pipeline_actions import Actions, parse_actions
from forge_plugins_parallel.plugin import SPLIT_BACKWARD

C = TypeVar("C")


def config_in(job: Job, kind: type[C]) -> C | None:
    """Return the config of a pass of this package by its class; ``None`` where the job does not have the pass."""
    configs = (use.config for use in job.parallel.passes.values() if use is not None)
    return next((config for config in configs if isinstance(config, kind)), None)


_MODES = ("default", "max-autotune-no-cudagraphs")
_MODES_WITH_CUDA_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}


def _trains(_: object, __: "attrs.Attribute[str]", value: str) -> None:
    if value in _MODES_WITH_CUDA_GRAPHS:
        raise ValueError(
            f"\"{value}\" records CUDA graphs, and one block's overwrites what backward needs of another's; take "
            f'"{_MODES_WITH_CUDA_GRAPHS[value]}"'
        )
    if value not in _MODES:
        raise ValueError(f"must be one of {', '.join(_MODES)}; got {value!r}")


@attrs.frozen(kw_only=True)
class CompileConfig:
    """``[parallel.passes.compile]``."""

    mode: str = attrs.field(default="default", validator=_trains)
    """torch.compile's mode, what to spend compile time on: ``default``, or ``max-autotune-no-cudagraphs``, which tries
    several kernels for each product. The others record CUDA graphs, which training by blocks overwrites."""
    fullgraph: bool | None = None
    """Refuse graph breaks inside a block, with torch's explanation, instead of running slower. By default, so it is in
    all blocks but those with experts of which other ranks have some: the sizes of what is sent there depend on data."""
    whole_model: bool = False
    """One graph for the whole model, loss included, instead of one for all blocks: longer to compile with every block,
    and more to fuse. Whether the loss returns a sum is then not checked in the first step. Not with ``fsdp``, which
    gathers and frees parameters between blocks, nor with ``mode = "offload"`` of ``activation_checkpointing``."""
    on_recompile: Literal["error", "warn", "ignore"] = "warn"
    """What to do when training compiles again after a block's first forward, which costs as much as the first time and
    happens mostly because a shape changed: stop, or say so, with the guard that failed. Evaluation may compile."""


RING_WITHOUT_DOCUMENTS = (
    '"ring" cannot keep the documents of a packed sequence apart, since it sees one rank\'s keys at a time and only in '
    'causal order; take "gather", or data without (document_mask = false)'
)


@attrs.frozen(kw_only=True)
class ContextParallelConfig:
    """``[parallel.passes.context_parallel]``."""

    method: Literal["gather", "ring"] = "gather"
    """How a rank's queries come to the keys and values of others. ``gather``: each layer gathers all of them, and keeps
    them for backward. ``ring``: they go round from rank to rank, each part sent on while it is attended to, and a rank
    keeps its own only; without packed documents, for models that call ``scaled_dot_product_attention``. It has not run
    on a GPU yet."""

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """What is wrong with context parallelism in this job."""
        cp, seq_len = job.parallel.cp, job.train.seq_len
        if cp == 1:
            yield "", "there is nothing to share sequences with, as parallel.cp = 1; raise it or take the pass out"
        elif seq_len % (2 * cp):
            lower = seq_len - seq_len % (2 * cp)
            nearest = f"{lower} or {lower + 2 * cp}" if lower else f"{2 * cp}"
            sentence = (
                f"it cuts each sequence into 2 × parallel.cp = {2 * cp} chunks of one length, and train.seq_len = "
                f"{seq_len} does not divide into them; {nearest} does"
            )
            yield "", sentence
        if self.method == "ring":
            # other plugins may have no such keys: what is not found out here is refused at the first forward
            kernel = getattr(job.model.config, "attention", None)
            evaluated = (getattr(one.config, "data", None) for one in job.evaluations)
            read = [one.config for one in (job.data, job.eval.data, *evaluated) if isinstance(one, ComponentRef)]
            if any(getattr(config, "document_mask", False) for config in read):
                yield "method", RING_WITHOUT_DOCUMENTS
            if beyond := getattr(job.model.config, "beyond_causal", ""):
                yield "method", f'"ring" attends in causal order and no other way, and model.{beyond} asks for more'
            if kernel in ("flex", "math"):
                sentence = (
                    f'"ring" needs a kernel that gives the sums to merge by, and model.attention = "{kernel}" has'
                )
                yield "method", f'{sentence} none; "auto", "flash", "efficient" and "cudnn" have'


@attrs.frozen(kw_only=True)
class FullyShardConfig:
    """``[parallel.passes.fsdp]``."""

    reshard_after_forward: Literal["auto", "always", "never"] = "auto"
    """Whether to free a block's gathered parameters after its forward and gather them again in backward: less memory,
    more communication. ``auto`` does so except in a pipeline, where a stage has many forwards before its backwards, and
    where no rank shares the parameters, of which a copy in bf16 is then made once a step. The embedding is freed
    likewise before the first block, and not gathered again, unless the head is tied to it. Norm and head always keep
    theirs, since backward starts there."""
    keep_gathered: bool = False
    """Keep all gathered parameters from a step's first microbatch to its last (``train.grad_accumulation``), so that
    they are gathered once a step: the least communication, and the memory of the whole model in the compute dtype."""
    accumulate: Literal["auto", "sharded", "whole"] = "auto"
    """How the gradients of a step's microbatches (``train.grad_accumulation``) are summed. ``whole``: each rank keeps
    the gradient of every parameter in fp32, and all ranks reduce it with the last microbatch: 4 bytes a parameter,
    however many ranks there are. ``sharded``: they reduce it with each microbatch, and a rank keeps its share.
    ``auto`` takes ``whole`` where that is at most a sixteenth of the GPU's memory, and on other devices. With
    ``bf16_pure``, shards are summed in bf16."""
    prefetch: int = attrs.field(default=0, validator=ge(0))
    """Blocks to gather ahead of the one that computes, in forward and backward; each holds its whole parameters for
    that much longer. 0 leaves it to torch: in backward one ahead, in forward what the host has come to."""
    cpu_offload: bool = False
    """Keep this rank's parameters, their gradients and the optimizer's state in the host's memory, and let the
    optimizer run there. The GPU holds activations and what is gathered; every step copies parameters to it and
    gradients back, and waits for them, so that steps take longer. On CUDA only."""

    keep_whole: tuple[str, ...] = ()
    """Parameters that every rank keeps whole and that are never gathered, as patterns of their names, such as
    ``"vision.encoder.*"``; ``*`` stands for anything, dots included. For what the model freezes for the whole run, and
    is small. Each rank has them in fp32, as they are saved, and with a ``train.precision`` of bf16 or fp16 once more in
    it."""

    def reshards(self, *, pp: int, is_whole: bool) -> bool:
        """Return whether blocks free their parameters between forward and backward.

        Args:
            pp: ranks along ``pp``.
            is_whole: a rank's parameters are whole, and on its device.
        """
        if self.keep_gathered:
            return False
        if self.reshard_after_forward == "auto":
            # a pipeline stage has many forwards before its backwards, and would gather the same parameters for each
            return not is_whole and pp == 1
        return self.reshard_after_forward == "always"

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """Keys that would have no effect."""
        if self.keep_whole and self.cpu_offload:
            yield (
                "keep_whole",
                "is on the device, and cpu_offload has all parameters in the host's memory; take one out",
            )
        if self.keep_gathered and self.reshard_after_forward == "always":
            yield "keep_gathered", 'contradicts reshard_after_forward = "always"; leave out one of the two'
        if self.keep_gathered and job.train.grad_accumulation == 1:
            yield "keep_gathered", "there is one microbatch a step, as train.grad_accumulation = 1; leave it out"
        if self.accumulate != "auto" and job.train.grad_accumulation == 1:
            yield "accumulate", "there is one microbatch a step, as train.grad_accumulation = 1; leave it out"
        if self.prefetch and job.parallel.dp_shard * job.parallel.cp == 1:
            yield "prefetch", "no rank shares its parameters, so that nothing is gathered; leave it out"
        yield from self._check_what_tp_leaves(job)

    def _check_what_tp_leaves(self, job: Job) -> Iterator[tuple[str, str]]:
        """Matrices that ``tp`` has cut by rows, and that are sharded once more."""
        tp, ranks = job.parallel.tp, job.parallel.dp_shard * job.parallel.cp
        if tp == 1 or ranks <= 1:
            return
        for key, (rows, columns, role) in _matrices(job).items():
            if role in ("column", "vocab") and even_dimension((rows, columns), (tp, 1), ranks) is None:
                sentence = (
                    f"a matrix of {rows} × {columns} (model.{key}), cut into parallel.tp = {tp} parts by rows, cannot "
                    f"be shared out evenly to {ranks} ranks (dp_shard × cp) along either side; change one of them"
                )
                yield "", sentence
                return


def _matrices(job: Job) -> Mapping[str, tuple[int, int, str]]:
    """Same as ``ModelConfig.matrices``; none where the model does not say."""
    config = job.model.config
    return config.matrices() if hasattr(config, "matrices") else {}


def even_dimension(shape: Sequence[int], parts: Sequence[int], ranks: int) -> int | None:
    """The first dimension that ``ranks`` can share evenly when it has been cut into ``parts`` already, or ``None``."""
    places = enumerate(zip(shape, parts, strict=True))
    return next((dim for dim, (size, cut) in places if size % (ranks * cut) == 0), None)


ScheduleName = Literal["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]

_V_SCHEDULES = ("ZBVZeroBubble", "DualPipeV")


def _are_for_custom(config: "PipelineConfig", _: "attrs.Attribute[tuple[str, ...]]", rows: tuple[str, ...]) -> None:
    if not rows and config.schedule == "custom":
        raise ValueError('must be given with schedule = "custom": a row for each rank along pp, as "0F0 0F1 0B0 0B1"')
    if rows and config.schedule != "custom":
        raise ValueError(f'go with schedule = "custom", and the schedule is "{config.schedule}"; leave them out')
    if rows:
        parse_actions(rows)


def _fits_schedule(config: "PipelineConfig", _: "attrs.Attribute[int | None]", value: int | None) -> None:
    if value is None:
        return
    if config.schedule == "custom":
        raise ValueError(f"actions say which rank has which stages, got {value}; remove it")
    if config.schedule in ("GPipe", "1F1B") and value != 1:
        raise ValueError(f"{config.schedule} has one stage a rank, got {value}; several have the Interleaved schedules")
    if config.schedule in _V_SCHEDULES and value != 2:
        raise ValueError(f"{config.schedule} has two stages a rank, got {value}")
    if config.schedule == "Interleaved1F1B" and value < 2:
        raise ValueError(f"Interleaved1F1B has at least two stages a rank, got {value}; with one it is 1F1B")
    if value < 1:
        raise ValueError(f"must be at least 1, got {value}")


@attrs.frozen(kw_only=True)
class PipelineConfig:
    """``[parallel.passes.pipeline]``."""

    schedule: Literal[ScheduleName, "custom"] = "1F1B"
    """In which order a step's microbatches (``train.grad_accumulation``) pass the stages. ``GPipe``: all forwards, then
    all backwards. ``1F1B``: each backward as early as it can be, so that fewer activations are held.
    ``Interleaved1F1B``: several stages a rank, smaller gaps, more communication. ``InterleavedZeroBubble`` (ZB1P),
    ``ZBVZeroBubble`` and ``DualPipeV`` fill the gaps with gradients of weights, which no other stage waits for.
    ``custom``: one's own, in ``actions``."""
    stages_per_rank: int | None = attrs.field(default=None, validator=_fits_schedule)
    """Stages that each rank along ``pp`` holds; by default 1 for ``GPipe`` and ``1F1B``, and 2 for the others."""
    actions: tuple[str, ...] = attrs.field(default=(), validator=_are_for_custom)
    """The schedule ``custom``: for each rank along ``pp``, what it does in its order, such as ``"0F0 0F1 0B0 0B1"``.
    ``2F0`` is the forward of microbatch 0 in stage 2, and ``B`` a backward; ``I`` and ``W`` are one for the input of a
    stage and a later one for its weights. A rank holds the stages that it has actions of."""

    @property
    def own_schedule(self) -> Actions | None:
        """The schedule ``custom``."""
        return parse_actions(self.actions) if self.actions else None

    def rank_of(self, pp: int) -> Mapping[int, int]:
        """The rank along ``pp`` that holds each stage: round the ranks; in a V, down and up again."""
        if self.own_schedule is not None:
            return self.own_schedule.rank_of
        if self.schedule in _V_SCHEDULES:
            return {stage: min(stage, 2 * pp - 1 - stage) for stage in range(2 * pp)}
        return {stage: stage % pp for stage in range(self.n_stages(pp))}

    def n_stages(self, pp: int) -> int:
        """How many stages there are on all ranks along ``pp``, any number of which may have been typed."""
        if self.own_schedule is not None:
            return len(self.own_schedule.rank_of)
        one_each = self.schedule in ("GPipe", "1F1B")
        return pp * (self.stages_per_rank or (1 if one_each else 2))

    @property
    def splits_backward(self) -> bool:
        """Return whether a stage computes gradients of its input and those of its weights at two times."""
        own = self.own_schedule
        return self.schedule in SPLIT_BACKWARD if own is None else own.splits_backward

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """What is wrong with this pipeline in this job."""
        pp, microbatches = job.parallel.pp, job.train.grad_accumulation
        if pp == 1:
            yield "", "there is one stage only, as parallel.pp = 1; raise it or take the pass out"
            return
        n_layers: int | None = getattr(job.model.config, "n_layers", None)
        if n_layers is not None:
            at_head: int = getattr(job.model.config, "n_predictors", 0)
            problem = too_few_blocks(n_layers + at_head, self.n_stages(pp), at_head)
            if problem:
                yield "", problem
        if self.own_schedule is not None:
            yield from self._check_own(self.own_schedule, job)
        elif microbatches is not None:  # it is not known yet if it follows from the world size
            yield from self._check_microbatches(pp, microbatches)

    def _check_own(self, own: Actions, job: Job) -> Iterator[tuple[str, str]]:
        pp, microbatches, fsdp = job.parallel.pp, job.train.grad_accumulation, config_in(job, FullyShardConfig)
        if len(own.rows) != pp:
            yield "actions", f"has rows for {len(own.rows)} ranks, and parallel.pp = {pp}"
        if microbatches not in (None, own.n_microbatches):
            have = f"has {own.n_microbatches} microbatches, and a step train.grad_accumulation = {microbatches}"
            yield "actions", f"{have}; make them equal"
        if own.splits_backward and fsdp is not None and fsdp.reshard_after_forward == "always":
            yield "actions", 'with I and W cannot be combined with reshard_after_forward = "always" of fsdp'

    def _check_microbatches(self, pp: int, microbatches: int) -> Iterator[tuple[str, str]]:
        is_dual = self.schedule == "DualPipeV"
        least = 2 * pp if is_dual else pp
        rounds = max(1, microbatches // pp)
        if microbatches < least:
            why = f"train.grad_accumulation = {microbatches} gives a step fewer microbatches than the pipeline has "
            yield "", f"{why}{'stages' if is_dual else 'ranks'}; set it to at least {least}"
        elif self.schedule.startswith("Interleaved") and microbatches % rounds:
            why = f"{self.schedule} cannot run train.grad_accumulation = {microbatches} microbatches in {rounds} "
            yield "schedule", f"{why}rounds of one length; take a multiple of parallel.pp = {pp}"


def too_few_blocks(n_blocks: int, n_stages: int, at_head: int) -> str:
    """Why blocks, of which the last ``at_head`` stay together, cannot be shared out to stages; empty if they can."""
    if n_blocks >= n_stages - 1 + max(1, at_head):
        return ""
    last = f", the last {at_head} of them in one stage" if at_head > 1 else ""
    return (
        f"the model has {n_blocks} layers{last}, and each of {n_stages} stages needs at least one; lower parallel.pp "
        "or stages_per_rank, name fewer stages in actions, or raise model.n_layers"
    )


def rank_without_rows(rows: int, tp: int) -> str:
    """Why a table of ``rows`` cannot be cut into ``tp`` parts of one size, the last one smaller; empty if it can."""
    if (tp - 1) * -(-rows // tp) < rows:
        return ""
    return f"{rows} rows, cut into parallel.tp = {tp} parts, leave a rank with none; lower tp"


def _for_mode(*modes: str) -> Callable[[Any, "attrs.Attribute[Any]", Any], None]:
    """The key is for these modes only."""

    def validate(config: Any, attribute: "attrs.Attribute[Any]", value: Any) -> None:
        if config.mode not in modes and value != attribute.default:
            wanted = " or ".join(f'"{mode}"' for mode in modes)
            raise ValueError(f'goes with mode = {wanted}, and mode is "{config.mode}"; leave it out')

    return validate


def _given_for_budget(config: Any, _: "attrs.Attribute[Any]", value: Any) -> None:
    if config.mode == "budget" and value is None:
        raise ValueError('must be given with mode = "budget", a number from 0 to 1')


def _names_operations(_: object, __: "attrs.Attribute[Any]", patterns: tuple[str, ...]) -> None:
    for pattern in patterns:
        if not re.fullmatch(r"[\w*?\[\]!.-]+", pattern) or not re.search(r"[.*]", pattern):
            raise ValueError(
                'must be names of operations as in "aten.mm", or patterns of them such as "*attention*"; '
                f"got {pattern!r}"
            )


def splits_backward(job: Job) -> bool:
    """Same as ``PipelineConfig.splits_backward``, where the job has a pipeline."""
    pipeline = config_in(job, PipelineConfig)
    return pipeline is not None and job.parallel.pp > 1 and pipeline.splits_backward


@attrs.frozen(kw_only=True)
class ActivationCheckpointingConfig:
    """``[parallel.passes.activation_checkpointing]``."""

    mode: Literal["none", "full", "selective", "budget", "auto", "offload"] = "full"
    """What to compute again in backward instead of keeping it, in blocks and in further units of the model (the layers
    of an encoder). ``full``: all of a block, of which only the input is kept. ``selective``: all but the operations
    that the model calls dear (matrix products and attention). ``budget``: torch.compile decides within ``budget``.
    ``auto``: the least that fits into the memory. ``offload``: nothing; what a block keeps waits in the host's memory,
    and comes back before backward needs it (but for the last block's). ``none``: nothing."""
    every: int = attrs.field(default=1, validator=[ge(1), _for_mode("full", "selective", "offload")])
    """Recompute, or offload, only every n-th block, beginning with the first. Units of a model beside its blocks, such
    as the layers of an encoder, are not counted, and all are meant."""
    keep: tuple[str, ...] = attrs.field(default=(), validator=[_names_operations, _for_mode("selective", "auto")])
    """Operations whose results ``selective`` keeps, in place of the ones that the model calls dear and all that send:
    names, and patterns of them, such as ``["aten.mm", "*attention*", "_c10d_functional.*"]``. One product of matrices
    (``aten.mm``, ``aten.addmm``, ``aten._scaled_mm``) stands for all."""
    products_every: int = attrs.field(default=1, validator=[ge(1), _for_mode("selective", "auto")])
    """Of products of matrices, ``selective`` keeps the results of every n-th only, beginning with the first of a block;
    2 recomputes every second one."""
    budget: float | None = attrs.field(
        default=None, validator=[optional(and_(ge(0), le(1))), _given_for_budget, _for_mode("budget")]
    )
    """For ``budget``: the part of what a compiled block would keep without recomputation that it may keep; 0 keeps its
    inputs only, 1 everything."""
    memory_gib: float | None = attrs.field(default=None, validator=[optional(gt(0)), _for_mode("auto")])
    """For ``auto``: GiB that a rank may use for everything; by default what is free on its GPU."""

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """What the chosen mode needs of the job."""
        if self.mode == "auto" and self.memory_gib is None and job.run.device in ("cpu", "mps"):
            yield "memory_gib", f'must be given with mode = "auto" where run.device = "{job.run.device}"'


FLOAT8_BLOCKS = {"blockwise": 128, "mxfp8": 32}
"""Values in a row that share a scale, by recipe. Of weights, ``blockwise`` scales squares of 128 × 128."""


@attrs.frozen(kw_only=True)
class Float8Config:
    """``[parallel.passes.fp8]``."""

    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8"] = "tensorwise"
    """How values are scaled into float8: one scale per tensor (fastest); one per row (more exact); one per row with
    gradients of weights computed in ``train.precision`` (most exact). In blocks of a row with all gradients in float8:
    ``blockwise`` as DeepSeek-V3, 128 values each and weights in squares of 128 × 128 (GPUs from compute capability 9.0
    on); ``mxfp8``, 32 values each with powers of two (from 10.0 on)."""
    min_dim: int = attrs.field(default=1024, validator=ge(16))
    """Layers with fewer input or output features on a rank are left alone: converting costs them more than it saves."""
    exclude: tuple[str, ...] = ()
    """Further layers to leave alone, as patterns of their names: ``"blocks.0.*"``, ``"*.down"``."""
    experts: bool = False
    """Also multiply routed experts in float8: one scale a row, gradients of weights in ``train.precision``, with any
    ``recipe``. On GPUs with compute capability 9.0 (H100, H200), or with ``emulate``."""
    all_gather: bool = False
    """Let FSDP gather weights as float8, in a quarter to a half of the bytes. For ``tensorwise`` only, and for
    parameters that are sharded."""
    emulate: bool = False
    """Round values to float8 and multiply in ``train.precision``, to try it on machines without float8. Slow."""

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """What torchao cannot do with one value of a key and another of another."""
        if self.all_gather and self.recipe != "tensorwise":
            yield "all_gather", f"is for tensorwise scales only (torchao), and recipe is {self.recipe}"
        tp, layers = job.parallel.tp, [one for one in _matrices(job).values() if one[2] in ("column", "row")]
        on_a_rank = [(out // tp, into) if role == "column" else (out, into // tp) for out, into, role in layers]
        knows_all = getattr(job.model.config, "n_experts", None) == 0
        if layers and knows_all and not any(self.takes(features) for features in on_a_rank):
            sentence = (
                f"no linear layer of a block has at least {self.min_dim} input and output features on a rank, in "
                f"multiples of {self._multiple}, so that none would be in float8; lower it, or take the pass out"
            )
            yield "min_dim", sentence

    def takes(self, features: Sequence[int]) -> bool:
        """Return whether a linear layer with so many features on a rank is converted, its name permitting."""
        return all(size >= self.min_dim and size % self._multiple == 0 for size in features)

    @property
    def _multiple(self) -> int:
        return FLOAT8_BLOCKS.get(self.recipe, 16)


@attrs.frozen(kw_only=True)
class LoraConfig:
    """``[parallel.passes.lora]``."""

    rank: int = attrs.field(default=16, validator=and_(ge(1), le(65536)))
    """Rows of the first matrix and columns of the second, of each adapted layer."""
    alpha: float = attrs.field(default=32.0, validator=gt(0))
    """What adapters add is multiplied by ``alpha / rank``."""
    include: tuple[str, ...] = attrs.field(default=("*",), validator=min_len(1))
    """Linear layers of blocks to adapt, as patterns of their names: ``"*.attention.*"``, ``"blocks.1?.*"``. The head,
    the embedding, routers and stacks of experts are never adapted."""
    exclude: tuple[str, ...] = ()
    """Layers among these to leave alone."""

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """Adapters have no size at the base width of a parametrization."""
        if job.parametrization is not None:
            yield "", "adapters have no place in a parametrization; take [parametrization] out, or the pass"


@attrs.frozen(kw_only=True)
class TensorParallelConfig:
    """``[parallel.passes.tensor_parallel]``."""

    sequence_parallel: bool = True
    """Between the layers that are cut, give each rank a part of the tokens and not a copy of all: norms cost and
    hold ``1 / tp``, for the same communication. It needs a model whose plan has the role ``sequence``."""
    async_tp: bool = False
    """Let torch.compile cut up matrix products in blocks and what is gathered for them or scattered from them, so that
    ranks compute on one piece while they send another (asynchronous tensor parallelism). It needs CUDA and ``compile``,
    and GPUs that read each other's memory: those of one host joined by NVLink."""

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """What is wrong with tensor parallelism in this job."""
        parallel, seq_len = job.parallel, job.train.seq_len
        if parallel.tp == 1:
            yield "", "there is nothing to share layers with, as parallel.tp = 1; raise it or take the pass out"
        elif self.async_tp and not self.sequence_parallel:
            yield (
                "async_tp",
                "overlaps gathering tokens, and sequence_parallel = false does not; remove one of the two",
            )
        elif self.sequence_parallel and seq_len % (parallel.tp * parallel.cp):
            ranks = f"parallel.tp = {parallel.tp} ranks"
            if parallel.cp > 1:
                ranks = f"parallel.tp × parallel.cp = {parallel.tp * parallel.cp} ranks"
            yield (
                "sequence_parallel",
                f"train.seq_len = {seq_len} cannot be shared out evenly to {ranks}; change one, or set this to false",
            )
        rows: int | None = getattr(job.model.config, "vocab_size", None)
        if rows is not None and rank_without_rows(rows, parallel.tp):
            yield "", f"the vocabulary of model.vocab_size = {rank_without_rows(rows, parallel.tp)}"
