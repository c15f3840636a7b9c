"""What can be set for the feed-forward layer ``moe`` and the pass ``expert_parallel``. Nothing here imports torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import attrs
from attrs.validators import ge, gt, optional

from forge_core.api import ComponentRef, Slot
from forge_plugins_dense.activation_config import CLAMPED_SWIGLU, SILU, as_activation
from forge_plugins_dense.feed_forward_config import MLPConfig

if TYPE_CHECKING:
    from forge_core.config.sections import Job

DropPolicy = Literal["weight", "position"]

FLOAT8_MULTIPLE = 16
"""What an expert's features must be multiples of for products in float8: rows then begin at 16 bytes."""
_MOST_RANKS = 10**6
"""Any number may have been typed; the mesh refuses more than there are."""


def _is_alone(config: MoEConfig, attribute: attrs.Attribute[int], value: int) -> None:
    if config.layers is not None and value != attribute.default:
        raise ValueError("has no effect beside layers, which lists the sparse layers; give one of the two")


def _is_listed_once(_: object, __: attrs.Attribute[Any], value: tuple[int, ...] | None) -> None:
    twice = [layer for layer, count in Counter(value or ()).items() if count > 1]
    if twice:
        raise ValueError(f"names the layer {twice[0]} twice")


def _has_shared_experts(config: MoEConfig, _: attrs.Attribute[Any], value: int | None) -> None:
    if value and config.shared_experts == 0:
        raise ValueError("has no effect without shared_experts")


def _has_capacity(config: MoEConfig, attribute: attrs.Attribute[Any], value: object) -> None:
    if value != attribute.default and config.capacity_factor is None:
        raise ValueError("has no effect without capacity_factor")


def _is_the_only_width(config: MoEConfig, _: attrs.Attribute[float], value: float) -> None:
    if config.hidden_dim is not None and value != 1.0:
        raise ValueError("has no effect beside hidden_dim; give one of the two")


def _with_overlap(config: ExpertParallelConfig, _: attrs.Attribute[int], value: int) -> None:
    if value > 1 and not config.overlap:
        raise ValueError("has no effect without overlap = true")


def no_experts(job: Job) -> str:
    """Why there is nothing to share out."""
    return (
        f"the model {job.model.qualified_name} has no experts; set parallel.ep = 1, or make its feed-forward layers "
        "sparse (model.num_experts)"
    )


@attrs.frozen(kw_only=True)
class ExpertParallelConfig:
    """Experts shared out over the axis ``ep``."""

    dispatcher: Annotated[ComponentRef, Slot("dispatcher", default="all_to_all")]
    """How rows travel to their experts and back."""
    overlap: bool = False
    """Compute shared experts while rows travel, in backward too."""
    chunks: int = attrs.field(default=1, validator=[gt(0), _with_overlap])
    """The rows of a microbatch travel in so many parts, and experts work on one while the next travels. Products become
    smaller, and so slower."""

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """What is wrong with this pass in this job."""
        if job.parallel.ep == 1:
            yield "", "there is nothing to share experts with, as parallel.ep = 1; raise it or take the pass out"
        elif getattr(job.model.config, "n_experts", None) == 0:
            yield "", f"parallel.ep = {job.parallel.ep}: {no_experts(job)}"
        layer = getattr(job.model.config, "feed_forward", None)
        layer = getattr(layer, "config", None)
        if self.overlap and self.chunks == 1 and isinstance(layer, MoEConfig) and layer.shared_experts == 0:
            sentence = (
                "the layers have no shared experts that could be computed while rows travel; set chunks to 2 or more, "
                "or remove overlap"
            )
            yield "overlap", sentence


@attrs.frozen(kw_only=True)
class HierarchicalConfig:
    """Each token crosses to a node once."""

    ranks_per_node: int | None = attrs.field(default=None, validator=optional(gt(0)))
    """Ranks on one node, of all, not only those of ``ep``; by default what the launcher says (``LOCAL_WORLD_SIZE``)."""

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """What is wrong with this dispatcher in this job; of nodes that the launcher knows, a run finds it out."""
        if self.ranks_per_node is None or job.parallel.ep > _MOST_RANKS:
            return
        ranks = [place * job.parallel.tp for place in range(job.parallel.ep)]  # the first that exchange rows
        on_each = Counter(rank // self.ranks_per_node for rank in ranks)
        if len({*on_each.values()}) > 1:
            sentence = (
                f"with {self.ranks_per_node} ranks a node, the {job.parallel.ep} ranks of parallel.ep are not shared "
                f"out evenly to {len(on_each)} nodes; let ep be a divisor or a multiple of the ranks a node"
            )
            yield "ranks_per_node", sentence


@attrs.frozen(kw_only=True)
class WatchConfig:
    """Which experts do how much, in ``experts.jsonl`` and ``experts.html`` of the run's directory."""

    dead_after: int = attrs.field(default=100, validator=gt(0))
    """Say so when an expert has had no token for so many steps. It is looked at on logged steps."""
    coactivation: bool = False
    """Also keep how often two experts work on the same token, of the tokens of one rank. It costs each microbatch a
    product ``(E, T) · (T, E)``."""


def _is_known_to_experts(config: MoEConfig, _: attrs.Attribute[Any], value: ComponentRef | None) -> None:
    try:
        as_activation(_of_dense(config) if value is None else value)
    except ValueError as error:
        raise ValueError(f"must be given, as that of the dense layer, {error}") from error


def _of_dense(config: MoEConfig) -> ComponentRef | str:
    """The activation of the dense layer, which may be any package's."""
    return getattr(config.dense.config, "activation", None) or SILU


def _is_possible(config: MoEConfig, _: attrs.Attribute[bool | None], value: bool | None) -> None:
    activation = _of_dense(config) if config.activation is None else config.activation
    if value is False and activation == CLAMPED_SWIGLU:
        raise ValueError("clamped_swiglu has a gate; remove gated, or choose another activation")


def _with_clamp(config: MoEConfig, attribute: attrs.Attribute[float], value: float) -> None:
    if value != attribute.default and config.activation != CLAMPED_SWIGLU:
        raise ValueError('has no effect without activation = "clamped_swiglu"')


@attrs.frozen(kw_only=True)
class MoEConfig:
    """A sparse feed-forward layer: each token visits some of many experts (Shazeer et al. 2017, arXiv 1701.06538)."""

    n_experts: int = attrs.field(validator=gt(0))
    """Routed experts a layer."""
    router: Annotated[ComponentRef, Slot("router", default="softmax_topk")]
    """Which experts see which token."""
    hidden_dim: int | None = attrs.field(default=None, validator=optional(gt(0)))
    """Width of each expert; by default that of the ``dense`` layer, times ``width_factor``."""
    width_factor: float = attrs.field(default=1.0, validator=[gt(0), _is_the_only_width])
    """Scales the default ``hidden_dim``. With 1/m, m times as many experts and m times as many a token, as much is
    computed, in finer grains (Dai et al. 2024, arXiv 2401.06066)."""
    activation: Annotated[ComponentRef | None, Slot("activation")] = attrs.field(
        default=None, validator=_is_known_to_experts
    )
    """As that of ``mlp``; by default that of the ``dense`` layer, with its limit, slope and gate."""
    gated: bool | None = attrs.field(default=None, validator=_is_possible)
    """As that of ``mlp``; by default as that of the ``dense`` layer, or as ``activation`` has it."""
    activation_limit: float = attrs.field(default=7.0, validator=[gt(0), _with_clamp])
    """The limit of ``clamped_swiglu``."""
    activation_slope: float = attrs.field(default=1.702, validator=[gt(0), _with_clamp])
    """The slope of ``clamped_swiglu``."""
    bias: bool = False
    """Add a bias in each matrix of the routed experts (gpt-oss)."""
    shared_experts: int = attrs.field(default=0, validator=ge(0))
    """Experts that every token visits beside the ones that the router chooses. They are one layer of so many times the
    width, which is the same."""
    shared_hidden_dim: int | None = attrs.field(default=None, validator=[optional(gt(0)), _has_shared_experts])
    """Width of one shared expert; by default ``hidden_dim``."""
    shared_gate: bool = attrs.field(default=False, validator=_has_shared_experts)
    """Multiply what the shared experts give with the sigmoid of a learned product (Qwen2-MoE)."""
    layers: tuple[int, ...] | None = attrs.field(default=None, validator=_is_listed_once)
    """The blocks that are sparse, from 0; by default the ones that ``every`` and ``first_dense`` leave."""
    every: int = attrs.field(default=1, validator=[gt(0), _is_alone])
    """Every n-th block is sparse, the n-th first: with 2, the blocks 1, 3, …"""
    first_dense: int = attrs.field(default=0, validator=[ge(0), _is_alone])
    """The first blocks, which stay dense (DeepSeek)."""
    dense: Annotated[ComponentRef, Slot("feed_forward", default="mlp")]
    """The layer of blocks that are not sparse, and the measure of experts."""
    capacity_factor: float | None = attrs.field(default=None, validator=optional(gt(0)))
    """An expert takes at most ``ceil(assignments / n_experts · capacity_factor)`` tokens of a microbatch, and the rest
    of its tokens go without it, so that the result depends on ``train.batch_size`` and ``parallel.cp``. Padding makes
    no room. By default an expert takes all, however many, and in any case in evaluation and when text is
    generated, so that ``eval/loss`` does not depend on how many are evaluated together."""
    drop: DropPolicy = attrs.field(default="weight", validator=_has_capacity)
    """Which assignments an expert beyond its capacity leaves out: those of least ``weight``, or the last by
    ``position``."""
    renormalize: bool = attrs.field(default=False, validator=_has_capacity)
    """Scale the weights that are left of a token to the sum that they had."""
    scale_gradients: bool = False
    """Multiply the gradient of each expert's weights with the mean load over its own, both of the step before, and at
    most with 10, so that an expert learns as much from few tokens as another from many. What is computed forward stays
    as it is."""
    check_routing: bool = False
    """Look in each forward whether the router keeps its contract, and name the router and the tensor if not. The host
    waits for the device."""

    @property
    def expert(self) -> MLPConfig:
        """A layer with the activation of experts, and their gate.

        Raises:
            ValueError: that of the ``dense`` layer is not known.
        """
        dense = self.dense.config
        if self.activation is not None:
            layer = MLPConfig(
                activation=self.activation,
                activation_limit=self.activation_limit,
                activation_slope=self.activation_slope,
            )
        elif isinstance(dense, MLPConfig):
            layer = dense
        else:
            layer = MLPConfig(activation=_of_dense(self))
        return attrs.evolve(layer, gated=layer.is_gated if self.gated is None else self.gated)

    def is_sparse(self, layer: int) -> bool:
        """Return whether the block of this index is sparse."""
        if self.layers is not None:
            return layer in self.layers
        return layer >= self.first_dense and (layer + 1) % self.every == 0

    def expert_width(self, dim: int) -> int | None:
        """Hidden features of one routed expert in a model of this width; ``None`` if neither this nor the dense layer
        says."""
        if self.hidden_dim is not None:
            return self.hidden_dim
        measure: Any = self.dense.config
        return max(1, round(measure.width(dim) * self.width_factor)) if hasattr(measure, "width") else None

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """Contradictions of this layer with the rest of the job."""
        ep = job.parallel.ep
        if self.n_experts % ep:
            yield "n_experts", f"{self.n_experts} experts cannot be shared out evenly to parallel.ep = {ep} ranks"
        elif problem := self._what_fsdp_leaves(job):
            yield "", problem
        yield from self._check_widths(job)
        if hasattr(self.router.config, "contradictions"):
            for key, sentence in self.router.config.contradictions(self.n_experts):
                yield f"router.{key}", sentence
        if hasattr(self.router.config, "contradictions_in"):
            for key, sentence in self.router.config.contradictions_in(job, self.n_experts):
                yield f"router.{key}", sentence
        yield from self._check_layers(job)

    def _what_fsdp_leaves(self, job: Job) -> str | None:
        """A stack that ``ep`` has cut, and that FSDP is to share out to the ranks that have the same experts."""
        dim: int | None = getattr(job.model.config, "dim", None)
        width = self.hidden_dim if dim is None else self.expert_width(dim)
        ep, fsdp, ranks = job.parallel.ep, job.parallel.passes.get("fsdp"), job.parallel.dp_shard * job.parallel.cp
        if ep == 1 or ranks < ep or not dim or not width or fsdp is None or getattr(fsdp.config, "keep_whole", None):
            return None
        cuts = ((self.n_experts, ep), (width, job.parallel.tp), (dim, 1))
        if any(size % (ranks // ep * parts) == 0 for size, parts in cuts):
            return None
        return (
            f"a stack of {self.n_experts} × {width} × {dim}, of which parallel.ep = {ep} ranks have other experts, "
            f"cannot be shared out evenly to the {ranks // ep} that have the same ones (dp_shard × cp / ep); "
            "change one of them"
        )

    def _check_widths(self, job: Job) -> Iterator[tuple[str, str]]:
        tp = job.parallel.tp
        dim: int | None = getattr(job.model.config, "dim", None)
        width = self.hidden_dim if dim is None else self.expert_width(dim)
        if width is not None and width % tp:
            yield "hidden_dim", f"{width} features cannot be shared out evenly to parallel.tp = {tp} ranks"
        elif width is not None and width // tp % FLOAT8_MULTIPLE and _multiplies_experts_in_float8(job):
            sentence = f"{width // tp} features on a rank are no multiple of {FLOAT8_MULTIPLE}, as products in float8"
            yield "hidden_dim", f"{sentence} need; change them, or remove parallel.passes.fp8.experts"
        shared = self.shared_experts * (self.shared_hidden_dim or width or 0)
        if shared % tp:
            sentence = f"the {shared} features of all shared experts cannot be shared out evenly to parallel.tp = {tp}"
            yield "shared_hidden_dim", f"{sentence} ranks"

    def _check_layers(self, job: Job) -> Iterator[tuple[str, str]]:
        n_layers = getattr(job.model.config, "n_layers", None)
        n_layers = n_layers and n_layers + getattr(job.model.config, "n_predictors", 0)
        sparse = [layer for layer in range(n_layers or 0) if self.is_sparse(layer)]
        if len(sparse) < (n_layers or 0) and hasattr(self.dense.config, "contradictions_in"):
            for key, sentence in self.dense.config.contradictions_in(job):
                yield f"dense.{key}", sentence
        if n_layers is not None and not sparse:
            key = "layers" if self.layers is not None else "first_dense" if self.first_dense >= n_layers else "every"
            yield key, f"leaves none of the {n_layers} layers sparse"
        beyond = [layer for layer in self.layers or () if n_layers is not None and not 0 <= layer < n_layers]
        if n_layers is not None and beyond and sparse:
            yield "layers", f"has {beyond[0]}, and the model's layers are 0 to {n_layers - 1}"


def _multiplies_experts_in_float8(job: Job) -> bool:
    passes = job.parallel.passes.values()
    return any(getattr(use.config, "experts", False) for use in passes if use is not None and use.name == "fp8")
