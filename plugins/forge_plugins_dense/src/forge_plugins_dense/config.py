"""What can be set for the model ``transformer`` and for the feed-forward layer ``mlp``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import attrs
from attrs.validators import ge, gt, optional

from forge_core.api import Slot, Use

if TYPE_CHECKING:
    from forge_core.config.sections import Job

AttentionBackend = Literal["auto", "flash", "efficient", "cudnn", "math", "flex"]
CUDA_KERNELS = ("efficient", "cudnn", "flex")
"""Those that exist on CUDA only; ``flash`` and ``math`` exist on the CPU too."""
NormName = Literal["rmsnorm", "layernorm"]
Activation = Literal["silu", "gelu", "relu"]


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


def _divides_dim(config: TransformerConfig, _: attrs.Attribute[int], value: int) -> None:
    if config.head_dim is not None:
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


def _is_even(_: TransformerConfig, __: attrs.Attribute[int | None], value: int | None) -> None:
    if value is not None and value % 2:
        raise ValueError(f"must be even, because rotary embeddings turn pairs of features; got {value}")


@attrs.frozen(kw_only=True)
class TransformerConfig:
    """A decoder of pre-norm blocks with rotary positions and grouped-query attention."""

    dim: int = attrs.field(validator=gt(0))
    """Width of the residual stream."""
    n_layers: int = attrs.field(validator=gt(0))
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
    feed_forward: Annotated[Use, Slot("feed_forward", default="mlp")]
    """The position-wise half of each block."""
    norm: NormName = "rmsnorm"
    """``layernorm`` has a bias, ``rmsnorm`` has none."""
    norm_eps: float = attrs.field(default=1e-5, validator=gt(0))
    """Added to the variance in every norm."""
    rope_theta: float = attrs.field(default=10_000.0, validator=gt(1))
    """Base of the rotary frequencies: the slowest rotation has a wavelength of about 2π times this many tokens."""
    rope_scaling: Llama3Scaling | None = None
    """Stretches the rotary frequencies for sequences longer than those first trained on."""
    qk_norm: bool = False
    """RMSNorm on each query and key head before the rotation (Qwen3)."""
    tie_embeddings: bool = False
    """Use the embedding table as the output head."""
    init_std: float = attrs.field(default=0.02, validator=gt(0))
    """Standard deviation of initial weights; for projections into the residual stream, divided by √(2 · n_layers)."""
    attention: AttentionBackend = attrs.field(default="auto", validator=_has_a_kernel)
    """The attention kernel in training and evaluation; generation leaves the choice to PyTorch. So does ``auto``, which
    takes FlexAttention for packed documents on CUDA, where ``flash`` cannot keep them apart. ``efficient``, ``cudnn``
    and ``flex`` need CUDA; ``efficient`` needs as many key-value heads as query heads."""

    @property
    def kv_heads(self) -> int:
        """Key and value heads, the default filled in."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def head_size(self) -> int:
        """Features a head, the default filled in."""
        return self.dim // self.n_heads if self.head_dim is None else self.head_dim

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """What is wrong with this model in this job."""
        if job.train.seq_len > self.max_seq_len:
            yield "max_seq_len", f"{self.max_seq_len} is shorter than train.seq_len = {job.train.seq_len}"
        tp = job.parallel.tp
        if self.n_heads % tp:
            yield "n_heads", f"{self.n_heads} heads cannot be shared out evenly to parallel.tp = {tp} ranks"
        elif self.kv_heads % tp:
            yield (
                "n_kv_heads",
                f"{self.kv_heads} key-value heads cannot be shared out evenly to parallel.tp = {tp} ranks",
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
        """What is wrong with this layer in this job."""
        tp = job.parallel.tp
        if self.hidden_dim is not None and self.hidden_dim % tp:
            yield "hidden_dim", f"{self.hidden_dim} features cannot be shared out evenly to parallel.tp = {tp} ranks"
