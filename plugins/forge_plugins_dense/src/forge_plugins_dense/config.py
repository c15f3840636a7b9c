"""What can be set for the model ``transformer`` and for the feed-forward layer ``mlp``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import attrs
from attrs.validators import ge, gt, le, optional

from forge_core.api import ComponentRef, Slot
from forge_plugins_dense.latent_config import LatentAttentionConfig
from forge_plugins_dense.multi_token_config import MultiTokenConfig
from forge_plugins_dense.sparse_shorthand import with_feed_forward

if TYPE_CHECKING:
    from forge_core.config.sections import Job
    from forge_core.contracts.model import ShardRole

AttentionBackend = Literal["auto", "flash", "efficient", "cudnn", "math", "flex"]
CUDA_KERNELS = ("efficient", "cudnn", "flex")
"""Those that exist on CUDA only; ``flash`` and ``math`` exist on the CPU too."""
NormName = Literal["rmsnorm", "layernorm"]
Activation = Literal["silu", "gelu", "relu"]
QKNormOver = Literal["head", "all"]


def _above_low_freq_factor(scaling: Llama3Scaling, _: attrs.Attribute[float], value: float) -> None:
    if value <= scaling.low_freq_factor:
        raise ValueError(f"must be greater than low_freq_factor = {scaling.low_freq_factor}, got {value}")


@attrs.frozen(kw_only=True)
class Llama3Scaling:
    """Llama 3.1's way to lengthen the context: slow rotations become slower, fast ones stay as they are."""

    factor: float = attrs.field(default=8.0, validator=ge(1))
    """What the frequency of a slow rotation is divided by."""
    low_freq_factor: float = attrs.field(default=1.0, validator=gt(0))
    """Rotations that turn less often than this within ``original_max_seq_len`` are slow."""
    high_freq_factor: float = attrs.field(default=4.0, validator=[gt(0), _above_low_freq_factor])
    """Rotations that turn more often than this within ``original_max_seq_len`` are fast; between the two, the frequency
    is interpolated."""
    original_max_seq_len: int = attrs.field(default=8192, validator=gt(0))
    """The sequence length, in tokens, that the model was first trained on."""


def _above_beta_slow(scaling: YarnScaling, _: attrs.Attribute[float], value: float) -> None:
    if value <= scaling.beta_slow:
        raise ValueError(f"must be greater than beta_slow = {scaling.beta_slow}, got {value}")


@attrs.frozen(kw_only=True)
class YarnScaling:
    """YaRN's way to lengthen the context (Peng et al. 2023, arXiv 2309.00071): slow rotations become slower, and
    attention sharper."""

    factor: float = attrs.field(validator=ge(1))
    """What the frequency of a slow rotation is divided by."""
    original_max_seq_len: int = attrs.field(validator=gt(0))
    """The sequence length, in tokens, that the model was first trained on."""
    beta_slow: float = attrs.field(default=1.0, validator=gt(0))
    """Rotations that turn less often than this within ``original_max_seq_len`` are slow."""
    beta_fast: float = attrs.field(default=32.0, validator=[gt(0), _above_beta_slow])
    """Rotations that turn more often than this within ``original_max_seq_len`` are fast; between the two, the frequency
    is interpolated."""
    logit_scale: float | None = attrs.field(default=None, validator=optional(gt(0)))
    """What the logits of attention are multiplied by; by default ``(0.1 · ln(factor) + 1)²``."""


_MOST = 10**14
"""Parameters; the largest models that have been trained have some 10¹²."""


def _divides_dim(config: TransformerConfig, _: attrs.Attribute[int], value: int) -> None:
    if config.head_dim is not None or config.latent_attention is not None:
        return
    if config.dim % value:
        raise ValueError(f"must divide dim = {config.dim}, got {value}; or say how wide a head is with head_dim")
    if config.dim // value % 2:
        raise ValueError(
            f"gives heads of dim / n_heads = {config.dim // value} features; rotary embeddings need an even number"
        )


def _divides_n_heads(config: TransformerConfig, _: attrs.Attribute[int | None], value: int | None) -> None:
    if value is not None and config.n_heads % value:
        raise ValueError(f"must divide n_heads = {config.n_heads}, got {value}")


def _has_a_kernel(config: TransformerConfig, _: attrs.Attribute[str], value: str) -> None:
    if value == "efficient" and config.kv_heads != config.n_heads:
        raise ValueError(
            f'"efficient" has no grouped heads, and n_kv_heads = {config.kv_heads} is not n_heads = {config.n_heads}'
        )


def _is_alone(config: TransformerConfig, _: attrs.Attribute[YarnScaling | None], value: YarnScaling | None) -> None:
    if value is not None and config.rope_scaling is not None:
        raise ValueError("has the same purpose as rope_scaling; give one of the two")


def _takes_the_place_of_heads(
    config: TransformerConfig, _: attrs.Attribute[Any], value: LatentAttentionConfig | None
) -> None:
    if value is None:
        return
    if config.kv_heads != config.n_heads:
        raise ValueError(f"has keys and values for each head, and n_kv_heads = {config.kv_heads}; leave that out")
    for key, default in (("head_dim", None), ("qk_norm", False)):
        if getattr(config, key) != default:
            raise ValueError(
                f"says what heads are made of, so that {key} has no effect beside it; remove one of the two"
            )
    if config.attention == "flash" and value.plain_dim + value.rotary_dim != value.value_dim:
        raise ValueError(
            f"has keys of {value.plain_dim + value.rotary_dim} features and values of {value.value_dim}, which "
            'attention = "flash" does not take; choose another kernel'
        )


def _has_qk_norm(config: TransformerConfig, attribute: attrs.Attribute[str], value: str) -> None:
    if value != attribute.default and not config.qk_norm:
        raise ValueError("has no effect without qk_norm")


def _is_even(_: TransformerConfig, __: attrs.Attribute[int | None], value: int | None) -> None:
    if value is not None and value % 2:
        raise ValueError(f"must be even, because rotary embeddings turn pairs of features; got {value}")


def _is_written_out(config: TransformerConfig, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Files have shorthands; what is left of one here contradicts ``feed_forward``, or would have no effect."""
    if attribute.name == "moe" and value and "dense" in value:
        raise ValueError("has dense, and feed_forward is that layer too; give one of the two")
    if value:
        raise ValueError(
            f"feed_forward is {config.feed_forward.name!r} already, a layer of its own; set its keys there"
        )


@attrs.frozen(kw_only=True)
class TransformerConfig:
    """A decoder of pre-norm blocks with rotary positions and grouped-query attention."""

    dim: int = attrs.field(validator=gt(0))
    """Width of the residual stream."""
    n_layers: int = attrs.field(validator=[gt(0), le(10_000)])
    """Blocks."""
    n_heads: int = attrs.field(validator=[gt(0), _divides_dim])
    """Query heads."""
    n_kv_heads: int | None = attrs.field(default=None, validator=[optional(gt(0)), _divides_n_heads])
    """Key and value heads, each shared by ``n_heads / n_kv_heads`` query heads; by default as many as ``n_heads``."""
    head_dim: int | None = attrs.field(default=None, validator=[optional(gt(0)), _is_even])
    """Features a head; by default ``dim / n_heads``."""
    vocab_size: int | None = attrs.field(default=None, validator=optional(gt(0)))
    """Rows of the embedding table; by default the tokenizer's."""
    max_seq_len: int = attrs.field(default=2048, validator=gt(0))
    """The longest sequence, in tokens, in training and in generation. It costs no memory by itself."""
    feed_forward: Annotated[ComponentRef, Slot("feed_forward", default="mlp")]
    """The position-wise half of each block."""
    num_experts: int | None = attrs.field(default=None, validator=[optional(ge(0)), _is_written_out])
    """Makes the model sparse: short for a ``feed_forward`` named ``moe`` with so many ``n_experts``, whose ``dense``
    layer is the ``feed_forward`` that is given. 0: dense, whatever ``moe`` says."""
    moe: Mapping[str, Any] | None = attrs.field(default=None, validator=_is_written_out)
    """Further keys of that layer, such as ``router``; with ``n_experts`` among them, it is sparse without
    ``num_experts``, which wins over it. ``forge plugins show feed_forward moe`` lists them."""
    norm: NormName = "rmsnorm"
    """``layernorm`` has a bias, ``rmsnorm`` has none."""
    norm_eps: float = attrs.field(default=1e-5, validator=gt(0))
    """Added to the variance in every norm."""
    rope_theta: float = attrs.field(default=10_000.0, validator=gt(1))
    """Base of the rotary frequencies: the slowest rotation has a wavelength of about 2π times this many tokens."""
    rope_scaling: Llama3Scaling | None = None
    """Stretches the rotary frequencies for sequences longer than those first trained on."""
    yarn: YarnScaling | None = attrs.field(default=None, validator=_is_alone)
    """The same, another way."""
    qk_norm: bool = False
    """RMSNorm on queries and keys before the rotation (Qwen3)."""
    qk_norm_over: QKNormOver = attrs.field(default="head", validator=_has_qk_norm)
    """What ``qk_norm`` is taken over: each ``head`` by itself, or ``all`` heads of a position together (OLMoE)."""
    tie_embeddings: bool = False
    """Use the embedding table as the output head."""
    multi_token: MultiTokenConfig | None = None
    """In training, also predict tokens further ahead; by default the next one only."""
    init_std: float = attrs.field(default=0.02, validator=gt(0))
    """Standard deviation of initial weights; for projections into the residual stream, divided by
    √(2 · init_layers)."""
    init_layers: int | None = attrs.field(default=None, validator=optional(gt(0)))
    """By default ``n_layers``. The parametrization ``complete_p`` sets it."""
    output_multiplier: float = attrs.field(default=1.0, validator=gt(0))
    """Factor on the logits. A parametrization multiplies it, and the next two."""
    residual_multiplier: float = attrs.field(default=1.0, validator=gt(0))
    """Factor on the output of each attention and feed-forward layer before it is added to the residual stream."""
    attention_multiplier: float = attrs.field(default=1.0, validator=gt(0))
    """Factor on the logits of attention, beside ``1 / √head_dim``."""
    attention: AttentionBackend = attrs.field(default="auto", validator=_has_a_kernel)
    """The attention kernel in training and evaluation; generation leaves the choice to PyTorch. So does ``auto``, which
    takes FlexAttention for packed documents on CUDA, where ``flash`` cannot keep them apart. ``efficient``, ``cudnn``
    and ``flex`` need CUDA; ``efficient`` needs as many key-value heads as query heads."""

    latent_attention: LatentAttentionConfig | None = attrs.field(default=None, validator=_takes_the_place_of_heads)
    """Multi-head latent attention (DeepSeek); by default there is none, and heads have keys and values of their own."""

    @property
    def kv_heads(self) -> int:
        """Key and value heads, the default filled in."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def rotary_size(self) -> int:
        """Features a head that are rotated."""
        return self.head_size if self.latent_attention is None else self.latent_attention.rotary_dim

    @property
    def mean_head_size(self) -> float:
        """The mean of a head's features of keys and of values."""
        latent = self.latent_attention
        return self.head_size if latent is None else (latent.plain_dim + latent.rotary_dim + latent.value_dim) / 2

    @property
    def logit_scale(self) -> float:
        """What the logits of attention are multiplied by, beside ``1 / √head_dim``, by all that asks for it."""
        if self.yarn is None:
            return self.attention_multiplier
        sharper = self.yarn.logit_scale or (0.1 * math.log(self.yarn.factor) + 1) ** 2
        return self.attention_multiplier * sharper

    @property
    def n_predictors(self) -> int:
        """Blocks after the ``n_layers``, which predict further tokens."""
        return 0 if self.multi_token is None else self.multi_token.depths

    @property
    def n_experts(self) -> int | None:
        """Same as ``ModelConfig.n_experts``: the layer's own word, or none in ours."""
        layer = self.feed_forward.config
        return 0 if isinstance(layer, MLPConfig) else getattr(layer, "n_experts", None)

    def matrices(self) -> Mapping[str, tuple[int, int, ShardRole]]:
        """Same as ``ModelConfig.matrices``, for heads with keys and values of their own and our own feed-forward
        layer."""
        if self.latent_attention is not None:
            return {}
        dim, layer = self.dim, self.feed_forward.config
        queries, keys = self.n_heads * self.head_size, self.kv_heads * self.head_size
        kinds: dict[str, tuple[int, int, ShardRole]] = {
            "n_heads": (queries, dim, "column"),
            "n_kv_heads": (keys, dim, "column"),
            "head_dim": (dim, queries, "row"),
        }
        if isinstance(layer, MLPConfig):
            width = layer.width(dim)
            kinds |= {"feed_forward.hidden_dim": (width, dim, "column"), "feed_forward": (dim, width, "row")}
        return kinds if self.vocab_size is None else {**kinds, "vocab_size": (self.vocab_size, dim, "vocab")}

    @property
    def head_size(self) -> int:
        """Features a head, the default filled in; in latent attention those of keys."""
        if self.latent_attention is not None:
            return self.latent_attention.plain_dim + self.latent_attention.rotary_dim
        return self.dim // self.n_heads if self.head_dim is None else self.head_dim

    @classmethod
    def expand(cls, table: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, str]]:
        """``num_experts`` and ``moe`` as the ``feed_forward`` that they stand for, and which keys of it they were."""
        return with_feed_forward(table) if {"num_experts", "moe"} & table.keys() else (table, {})

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """What is wrong with this model in this job."""
        if job.train.seq_len > self.max_seq_len:
            yield "max_seq_len", f"{self.max_seq_len} is shorter than train.seq_len = {job.train.seq_len}"
        if (parameters := self.n_layers * sum(out * into for out, into, _ in self.matrices().values())) > _MOST:
            gib = 4 * parameters / 2**30
            shape = f"{self.dim} in {self.n_layers} layers makes about {parameters:.1e} parameters"
            yield "dim", f"{shape}, {gib:,.0f} GiB in fp32, more than any cluster holds; lower one of them"
        if self.n_predictors >= job.train.seq_len:
            reach = f"no token is {self.n_predictors} ahead of another in train.seq_len = {job.train.seq_len}"
            yield "multi_token.depths", reach
        tp = job.parallel.tp
        if self.n_heads % tp:
            yield "n_heads", f"{self.n_heads} heads cannot be shared out evenly to parallel.tp = {tp} ranks"
        elif self.kv_heads % tp:
            yield (
                "n_kv_heads",
                f"{self.kv_heads} key-value heads cannot be shared out evenly to parallel.tp = {tp} ranks",
            )
        if self.qk_norm_over == "all" and tp > 1:
            yield (
                "qk_norm_over",
                f'"all" needs all heads of a position, and parallel.tp = {tp} puts them on several ranks',
            )
        if self.tie_embeddings and job.parallel.pp > 1:
            yield (
                "tie_embeddings",
                f"embedding and head are one tensor, and parallel.pp = {job.parallel.pp} puts them on different ranks",
            )
        if self.attention in CUDA_KERNELS and job.run.device in ("cpu", "mps"):
            yield "attention", f'"{self.attention}" needs CUDA, and run.device is "{job.run.device}"'


def _has_effect(config: MLPConfig, _: attrs.Attribute[float], value: float) -> None:
    if config.hidden_dim is not None and value != 1.0:
        raise ValueError("has no effect beside hidden_dim; give one of the two")


@attrs.frozen(kw_only=True)
class MLPConfig:
    """A dense feed-forward layer without biases."""

    hidden_dim: int | None = attrs.field(default=None, validator=optional(gt(0)))
    """Width of the hidden layer; by default ``8/3 · dim · multiplier``, rounded up to a multiple of 256 (Llama)."""
    multiplier: float = attrs.field(default=1.0, validator=[gt(0), _has_effect])
    """Scales the default ``hidden_dim``."""
    activation: Activation = "silu"
    """``silu`` is SwiGLU, three matrices: ``down(silu(gate(x)) · up(x))``. ``gelu`` (exact) and ``relu`` have two:
    ``down(gelu(up(x)))``."""

    def width(self, dim: int) -> int:
        """Width of the hidden layer in a model of width ``dim``."""
        if self.hidden_dim is not None:
            return self.hidden_dim
        return 256 * math.ceil(int(8 / 3 * dim * self.multiplier) / 256)

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """What is wrong with this layer in this job, unless it is part of another one, which knows where it stands."""
        own = getattr(job.model.config, "feed_forward", None)
        if own is None or own.config is self:
            yield from self.contradictions_in(job)

    def contradictions_in(self, job: Job) -> Iterator[tuple[str, str]]:
        """What is wrong with this layer in a block of this job's model."""
        tp = job.parallel.tp
        dim: int | None = getattr(job.model.config, "dim", None)
        width = self.hidden_dim if dim is None else self.width(dim)
        if width is not None and width % tp:
            default = "" if self.hidden_dim is not None else " (the default)"
            yield "hidden_dim", f"{width} features{default} cannot be shared out evenly to parallel.tp = {tp} ranks"
