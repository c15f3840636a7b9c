"""What can be set for the model ``transformer``."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import attrs
from attrs.validators import ge, gt, le, lt, optional

from forge_core.api import ComponentRef, Slot
from forge_plugins_dense.feed_forward_config import MLPConfig
from forge_plugins_dense.latent_shorthand import with_latent_mixer
from forge_plugins_dense.layer_config import Layer, LayerConfig
from forge_plugins_dense.mixer_checks import heads_that_grow_apart, idle_keys
from forge_plugins_dense.mixer_config import Heads, MixerConfig
from forge_plugins_dense.multi_token_config import MultiTokenConfig
from forge_plugins_dense.norm_config import LAYERNORM, RMSNORM, ZERO_CENTERED_RMSNORM, as_norm
from forge_plugins_dense.rope_config import Llama3Scaling, LongRope, YarnScaling
from forge_plugins_dense.sparse_shorthand import with_feed_forward

if TYPE_CHECKING:
    from forge_core.config.sections import Job
    from forge_core.contracts.model import ShardRole

AttentionBackend = Literal["auto", "flash", "efficient", "cudnn", "math", "flex"]
CUDA_KERNELS = ("efficient", "cudnn", "flex")
MIN_FLEX_FEATURES = 16
"""A head's features from which on FlexAttention has a kernel for CUDA."""
"""Kernels that exist on CUDA only; ``flash`` and ``math`` exist on the CPU too."""
NormPlacement = Literal["input", "output", "both"]
AttentionBias = Literal["none", "qkv", "all"]
QKNormOver = Literal["head", "all"]
InitDepth = Literal["model", "layer"]

_MOST_LAYERS = 10_000
_MOST = 10**14
"""Parameters; the largest models that have been trained have some 10¹²."""


def _divides_dim(config: TransformerConfig, _: attrs.Attribute[int], value: int) -> None:
    size = config.dim / value
    if config.head_dim is not None or size % 2 == 0 or not config.has_mixer_with("head_dim"):
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
    if value == "efficient" and config.kv_heads != config.n_heads and config.has_mixer_with("n_kv_heads"):
        raise ValueError(
            f'"efficient" has no grouped heads, and n_kv_heads = {config.kv_heads} is not n_heads = {config.n_heads}'
        )
    if value == "flex" and config.narrowest_head < MIN_FLEX_FEATURES:
        raise ValueError(
            f'"flex" needs heads of at least {MIN_FLEX_FEATURES} features, and these have {config.narrowest_head}; '
            'raise head_dim, or take "auto"'
        )
    if value == "flash":
        for heads in config.heads:
            if heads.keys != heads.values:
                pad = ", or set pad_values of the mixer" if heads.values < heads.keys else ""
                raise ValueError(
                    f'"flash" takes values as wide as keys, and a mixer has {heads.values} and {heads.keys} features; '
                    f"choose another kernel{pad}"
                )


_SCALINGS = ("rope_scaling", "yarn", "long_rope")


def _is_the_only_scaling(config: TransformerConfig, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Each of ``_SCALINGS`` looks at those before it, ``rope_factor`` at all."""
    before = _SCALINGS[: _SCALINGS.index(attribute.name)] if attribute.name in _SCALINGS else _SCALINGS
    other = next((key for key in before if getattr(config, key) is not None), None)
    if value != attribute.default and other is not None:
        raise ValueError(f"has the same purpose as {other}; give one of the two")


def _has_a_factor_for_each_pair(config: TransformerConfig, _: attrs.Attribute[Any], value: LongRope | None) -> None:
    if value is None:
        return
    for number in range(config.n_layers):
        layer = config.layer(number)
        pairs = config.rotary_size(layer) // 2
        if layer.rope_stretched and pairs not in (0, len(value.short_factor)):
            raise ValueError(
                f"has {len(value.short_factor)} factors, and layer {number} rotates {pairs} pairs of features a head"
            )


def _leaves_pairs(config: TransformerConfig, _: attrs.Attribute[Any], value: Any) -> None:
    """Of ``rotary_fraction`` and of ``layers``."""
    for fraction in [layer.rotary_fraction for layer in value] if isinstance(value, tuple) else [value]:
        if fraction in (None, 1):  # whole heads are n_heads' and head_dim's to check
            continue
        if int(config.head_size * fraction) % 2:
            raise ValueError(
                f"rotates {fraction:g} of {config.head_size} features a head, {int(config.head_size * fraction)}; "
                "rotary positions turn pairs of features"
            )


def _selects_layers(config: TransformerConfig, _: attrs.Attribute[Any], value: tuple[LayerConfig, ...]) -> None:
    for number, layer in enumerate(value):
        if not layer.layers(config.n_layers):
            raise ValueError(f"[{number}].at = {layer.at!r} selects none of the n_layers = {config.n_layers} layers")
        others = [one.name for one in attrs.fields(LayerConfig) if one.name != "at"]
        if all(getattr(layer, name) is None for name in others):
            raise ValueError(f"[{number}] changes nothing; give at least one of {', '.join(others)}")
        if layer.rope_stretched is not None and not config.rope_stretched:
            raise ValueError(f"[{number}].rope_stretched is given, and the model has none of {', '.join(_SCALINGS)}")


def _has_a_capped_kernel(config: TransformerConfig, _: attrs.Attribute[Any], value: float | None) -> None:
    if value is not None and config.attention not in ("auto", "math", "flex"):
        raise ValueError(f'attention = "{config.attention}" does not cap logits; "auto", "math" and "flex" do')


def _has_weights_in_reach(config: TransformerConfig, _: attrs.Attribute[float], value: float) -> None:
    if value > 0 and config.attention not in ("auto", "math"):
        raise ValueError(
            f'attention = "{config.attention}" has no weights that could be dropped; "auto" and "math" have'
        )


def _looks_up_one_position(config: TransformerConfig, _: attrs.Attribute[bool], value: bool) -> None:
    if value and config.multi_token is not None:
        raise ValueError("multi_token reads embeddings of tokens without their positions; remove one of the two")


def _is_in_place_of_attention(config: TransformerConfig, _: attrs.Attribute[Any], value: Any) -> None:
    """Files have it, and what is left of it here has no layer to go to."""
    if value is not None:
        has_layers = config.has_mixer_with("n_kv_heads")
        raise ValueError("is for files; set mixer" if has_layers else "all layers have other mixers; remove it")


def _has_qk_norm(config: TransformerConfig, attribute: attrs.Attribute[str], value: str) -> None:
    if value != attribute.default and not config.qk_norm:
        raise ValueError("has no effect without qk_norm")


def _is_an_rmsnorm(config: TransformerConfig, _: attrs.Attribute[str], value: str) -> None:
    if value == "all" and config.norm not in (RMSNORM, LAYERNORM, ZERO_CENTERED_RMSNORM):
        raise ValueError(f'"all" is an RMSNorm, and norm = "{config.norm.name}" is another; choose "head"')


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
    n_layers: int = attrs.field(validator=[gt(0), le(_MOST_LAYERS)])
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
    layer is the ``feed_forward`` that is given. 0: dense, with any ``moe``."""
    moe: Mapping[str, Any] | None = attrs.field(default=None, validator=_is_written_out)
    """Further keys of that layer, such as ``router``; with ``n_experts`` among them, it is sparse without
    ``num_experts``, which wins over it. ``forge plugins show feed_forward moe`` lists them."""
    norm: Annotated[ComponentRef, Slot("norm", default="rmsnorm")] = attrs.field(
        default="rmsnorm",  # type: ignore[assignment]  # what the converter takes
        converter=as_norm,
    )
    """``layernorm`` has a bias, ``rmsnorm`` has none. ``zero_centered_rmsnorm`` multiplies by 1 plus its weight
    (Gemma). Packages bring others."""
    norm_placement: NormPlacement = "input"
    """Where the norms of a layer are: at its ``input`` (Llama), at its ``output``, before that is added to the residual
    stream (OLMo 2), or at ``both`` (Gemma 2)."""
    norm_eps: float = attrs.field(default=1e-5, validator=gt(0))
    """Added to the variance in every norm."""
    rope_theta: float = attrs.field(default=10_000.0, validator=gt(1))
    """Base of the rotary frequencies: the slowest rotation has a wavelength of about 2π times this many tokens."""
    rope_scaling: Llama3Scaling | None = None
    """Stretches the rotary frequencies for sequences longer than those first trained on."""
    yarn: YarnScaling | None = attrs.field(default=None, validator=_is_the_only_scaling)
    """The same, another way."""
    long_rope: LongRope | None = attrs.field(
        default=None, validator=[_is_the_only_scaling, _has_a_factor_for_each_pair]
    )
    """The same, with a factor for each pair of features (Phi-3, Phi-4-mini)."""
    rope_factor: float = attrs.field(default=1.0, validator=[ge(1), _is_the_only_scaling])
    """Divides all rotary frequencies (position interpolation, Chen et al. 2023, arXiv 2306.15595)."""
    rotary_fraction: float = attrs.field(default=1.0, validator=[ge(0), le(1), _leaves_pairs])
    """The part of each head's features that is rotated, the first ones (GPT-NeoX: 0.25); 0: no rotary positions."""
    learned_positions: bool = attrs.field(default=False, validator=_looks_up_one_position)
    """Add a learned vector for each of the ``max_seq_len`` positions to the embedding (GPT-2)."""
    window: int = attrs.field(default=0, validator=ge(0))
    """Positions that attention sees, the query's own and those right before it (sliding window, Mistral); 0: all."""
    attention_bias: AttentionBias = "none"
    """Biases of attention: of queries, keys and values (``qkv``, Qwen2), or of the output projection too (``all``)."""
    attention_sinks: bool = False
    """Each head has a learned logit that takes part in its softmax and has no value, so that it need not attend to
    anything (gpt-oss)."""
    attention_softcap: float | None = attrs.field(default=None, validator=[optional(gt(0)), _has_a_capped_kernel])
    """Caps the logits of attention smoothly, ``cap · tanh(logits / cap)`` (Gemma 2)."""
    attention_dropout: float = attrs.field(default=0.0, validator=[ge(0), lt(1), _has_weights_in_reach])
    """Fraction of attention's weights that is dropped in training (GPT-2: 0.1). Weights of all pairs of positions are
    then in memory. Like the next two, it drops the same in every layout, and after a resume."""
    residual_dropout: float = attrs.field(default=0.0, validator=[ge(0), lt(1)])
    """The same of what attention and feed-forward layers give, before it is added to the residual stream."""
    embedding_dropout: float = attrs.field(default=0.0, validator=[ge(0), lt(1)])
    """The same of embeddings."""
    output_softcap: float | None = attrs.field(default=None, validator=optional(gt(0)))
    """Caps the model's logits in the same way."""
    parallel_residual: bool = False
    """Attention and feed-forward layer of a block both read what the block is given (GPT-NeoX), and not the latter what
    the former has added."""
    mixer: Annotated[ComponentRef | None, Slot("sequence_mixer")] = None
    """What works between positions in each block; by default attention, as the keys here describe it."""
    qk_norm: bool = False
    """RMSNorm on queries and keys before the rotation (Qwen3), or ``norm`` where that is neither it nor
    ``layernorm``."""
    qk_norm_over: QKNormOver = attrs.field(default="head", validator=[_has_qk_norm, _is_an_rmsnorm])
    """What ``qk_norm`` is taken over: each ``head`` by itself, or ``all`` heads of a position together (OLMoE)."""
    tie_embeddings: bool = False
    """Use the embedding table as the output head."""
    multi_token: MultiTokenConfig | None = None
    """In training, also predict tokens further ahead; by default the next one only."""
    init_std: float = attrs.field(default=0.02, validator=gt(0))
    """Standard deviation of initial weights; for projections into the residual stream, divided as ``init_depth``
    says."""
    init_depth: InitDepth = "model"
    """``model`` divides by √(2 · init_layers) in all layers (GPT-2), ``layer`` by √(2 · n) in the n-th layer, counted
    from 1, so that what a layer adds is smaller the deeper it is (torchtitan)."""
    init_layers: int | None = attrs.field(default=None, validator=optional(gt(0)))
    """By default ``n_layers``. The parametrization ``complete_p`` sets it; it says nothing with ``init_depth =
    "layer"``."""
    embed_multiplier: float = attrs.field(default=1.0, validator=gt(0))
    """Factor on the embedding of tokens (Gemma: √dim)."""
    output_multiplier: float = attrs.field(default=1.0, validator=gt(0))
    """Factor on the logits. A parametrization multiplies it, and the next two."""
    residual_multiplier: float = attrs.field(default=1.0, validator=gt(0))
    """Factor on the output of each attention and feed-forward layer before it is added to the residual stream."""
    attention_multiplier: float = attrs.field(default=1.0, validator=gt(0))
    """Factor on the logits of attention, beside ``1 / √head_dim``."""
    attention: AttentionBackend = attrs.field(default="auto", validator=_has_a_kernel)
    """The attention kernel in training and evaluation; generation leaves the choice to PyTorch. So does ``auto``, which
    takes FlexAttention for packed documents on CUDA, where ``flash`` cannot keep them apart. ``efficient``, ``cudnn``
    and ``flex`` need CUDA; ``efficient`` needs as many key-value heads as query heads, ``flex`` heads of at least 16
    features."""

    latent_attention: Mapping[str, Any] | None = attrs.field(default=None, validator=_is_in_place_of_attention)
    """Former spelling of the keys of ``mixer = {name = "latent"}``, in place of ``attention`` in all layers that have
    it. Files from before still have it; write ``mixer``."""
    layers: tuple[LayerConfig, ...] = attrs.field(default=(), validator=[_selects_layers, _leaves_pairs])
    """Layers that differ from the others, each table with ``at`` and the keys that are otherwise there."""

    def layer(self, number: int) -> Layer:
        """What the layer of this number is. Blocks that predict further tokens, which come after the ``n_layers``, are
        as the model says."""
        return self._each_layer[number] if number < self.n_layers else self._usual_layer

    @property
    def windows(self) -> tuple[int, ...]:
        """The distinct windows of all layers, 0 for none; empty where no layer has one."""
        found = {layer.window for layer in self._each_layer}
        if self.n_predictors:
            found.add(self.window)
        return tuple(sorted(found)) if found != {0} else ()

    @property
    def beyond_causal(self) -> str:
        """Same as ``ModelConfig.beyond_causal``."""
        has_sinks = any(self.layer(number).attention_sinks for number in range(self.n_layers + self.n_predictors))
        asked = {
            "window": self.windows,
            "attention_softcap": self.attention_softcap,
            "attention_sinks": has_sinks,
            "attention_dropout": self.attention_dropout,
        }
        return next((key for key, value in asked.items() if value), "")

    @property
    def has_dropout(self) -> bool:
        """Return whether anything is dropped in training."""
        return max(self.attention_dropout, self.residual_dropout, self.embedding_dropout) > 0

    @functools.cached_property
    def _usual_layer(self) -> Layer:
        return Layer(**{one.name: getattr(self, one.name) for one in attrs.fields(Layer)})

    @functools.cached_property
    def _each_layer(self) -> tuple[Layer, ...]:
        n_layers = min(self.n_layers, _MOST_LAYERS)
        layers = [self._usual_layer] * n_layers
        for changes in self.layers:
            given = {one.name: getattr(changes, one.name) for one in attrs.fields(Layer)}
            given = {name: value for name, value in given.items() if value is not None}
            for number in changes.layers(n_layers):
                layers[number] = attrs.evolve(layers[number], **given)
        return tuple(layers)

    @property
    def built_layers(self) -> tuple[Layer, ...]:
        """All layers, and that of blocks that predict further tokens, if there are any. Never empty, for validators,
        which may see a wrong ``n_layers``."""
        return (*self._each_layer, self._usual_layer) if self.n_predictors else self._each_layer or (self._usual_layer,)

    @functools.cached_property
    def mixers(self) -> tuple[MixerConfig, ...]:
        """What the mixers of all layers say before the build, the same ones once."""
        found: list[MixerConfig] = []
        found.extend(one for layer in self.built_layers if (one := layer.mixer_config) not in found)
        return tuple(found)

    @property
    def kv_heads(self) -> int:
        """Key and value heads, the default filled in."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    def has_mixer_with(self, key: str) -> bool:
        """Return whether some layer's mixer reads this key of the model."""
        return any(key in mixer.reads for mixer in self.mixers)

    @property
    def heads(self) -> list[Heads]:
        """Features of the heads of each of ``mixers``, as it says."""
        return [mixer.heads(self._own_head_size, self.rotary_fraction) for mixer in self.mixers]

    def rotary_size(self, layer: Layer) -> int:
        """Features a head that are rotated in a layer."""
        return layer.mixer_config.heads(self._own_head_size, layer.rotary_fraction).rotary

    @property
    def narrowest_head(self) -> int:
        """Features of a head, of its keys or its values, which have fewer, in the layers where that is least."""
        return min(min(heads.keys, heads.values) for heads in self.heads)

    @property
    def frequency_scaling(self) -> Llama3Scaling | YarnScaling | LongRope | None:
        """The way in which rotary frequencies are stretched, its attention factor filled in."""
        if self.long_rope is not None:
            return attrs.evolve(self.long_rope, attention_factor=self.long_rope.magnitude(self.max_seq_len))
        return self.rope_scaling or self.yarn

    @property
    def head_norm(self) -> ComponentRef:
        """What ``qk_norm`` puts on single heads."""
        return RMSNORM if self.norm == LAYERNORM else self.norm

    @property
    def rope_stretched(self) -> bool:
        """Same as ``LayerConfig.rope_stretched``, of layers that do not say."""
        return any(getattr(self, key) is not None for key in _SCALINGS)

    def logit_scale(self, layer: Layer) -> float:
        """What the logits of attention are multiplied by, beside ``1 / √head_dim``, by all that asks for it."""
        if self.yarn is None or not layer.rope_stretched:
            return self.attention_multiplier
        sharper = self.yarn.logit_scale or (0.1 * math.log(self.yarn.factor) + 1) ** 2
        return self.attention_multiplier * sharper

    @property
    def n_predictors(self) -> int:
        """Blocks after the ``n_layers``, which predict further tokens."""
        return 0 if self.multi_token is None else self.multi_token.depths

    @property
    def n_experts(self) -> int | None:
        """Same as ``ModelConfig.n_experts``: the layers' own word, or none in ours."""
        configs = [layer.feed_forward.config for layer in self._each_layer]
        counts = [0 if isinstance(one, MLPConfig) else getattr(one, "n_experts", None) for one in configs]
        return None if None in counts else max(count for count in counts if count is not None)

    def matrices(self) -> Mapping[str, tuple[int, int, ShardRole]]:
        """Same as ``ModelConfig.matrices``, for mixers that know theirs and our own feed-forward layer."""
        dim = self.dim
        kinds: dict[str, tuple[int, int, ShardRole]] = {}
        for key, mixer in self._mixers_by_key():
            own = mixer.matrices(self)
            if own is None:
                return {}
            kinds |= {f"{key}{name}" if name.startswith(".") else name: one for name, one in own.items()}
        layers = {"feed_forward": self.feed_forward}
        layers |= {
            f"layers[{i}].feed_forward": one.feed_forward for i, one in enumerate(self.layers) if one.feed_forward
        }
        for key, layer in layers.items():
            if isinstance(layer.config, MLPConfig):
                width = layer.config.width(dim)
                kinds |= {f"{key}.hidden_dim": (width, dim, "column"), key: (dim, width, "row")}
        return kinds if self.vocab_size is None else {**kinds, "vocab_size": (self.vocab_size, dim, "vocab")}

    @property
    def head_size(self) -> int:
        """Features a head as ``head_dim`` says, the default filled in; where no mixer reads that, those of the widest
        keys."""
        if self.has_mixer_with("head_dim"):
            return self._own_head_size
        return max(heads.keys for heads in self.heads)

    @property
    def _own_head_size(self) -> int:
        return self.dim // self.n_heads if self.head_dim is None else self.head_dim

    def _mixers_by_key(self) -> Iterator[tuple[str, MixerConfig]]:
        """Each of ``mixers``, with the first key that names it."""
        tables = {"mixer": self._usual_layer} | {
            f"layers[{number}].mixer": attrs.evolve(self._usual_layer, mixer=one.mixer)
            for number, one in enumerate(self.layers)
            if one.mixer is not None
        }
        for mixer in self.mixers:
            yield next(key for key, layer in tables.items() if layer.mixer_config == mixer), mixer

    @classmethod
    def expand(cls, table: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, str]]:
        """Shorthands as what they stand for, and which keys of that they were: ``num_experts`` and ``moe`` as
        ``feed_forward``, ``latent_attention`` as ``mixer``."""
        written: dict[str, str] = {}
        for keys, write_out in (({"num_experts", "moe"}, with_feed_forward), ({"latent_attention"}, with_latent_mixer)):
            if keys & table.keys():
                table, made = write_out(table)
                written |= made
        return table, written

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """What is wrong with this model in this job."""
        if job.train.seq_len > self.max_seq_len:
            yield "max_seq_len", f"{self.max_seq_len} is shorter than train.seq_len = {job.train.seq_len}"
        yield from self._too_large()
        if self.n_predictors >= job.train.seq_len:
            reach = f"no token is {self.n_predictors} ahead of another in train.seq_len = {job.train.seq_len}"
            yield "multi_token.depths", reach
        if self.n_predictors:
            yield from _weights_of_targets_ahead(job)
        tp = job.parallel.tp
        if self.n_heads % tp:
            yield "n_heads", f"{self.n_heads} heads cannot be shared out evenly to parallel.tp = {tp} ranks"
        elif self.kv_heads % tp and self.has_mixer_with("n_kv_heads"):
            yield (
                "n_kv_heads",
                f"{self.kv_heads} key-value heads cannot be shared out evenly to parallel.tp = {tp} ranks",
            )
        yield from idle_keys(self)
        yield from heads_that_grow_apart(self, job)
        if self.init_layers is not None and self.init_depth == "layer":
            yield "init_layers", 'has no effect beside init_depth = "layer"; remove one of the two'
        if self.attention_dropout:
            yield from self._check_dropped_weights(job)
        if self.attention in CUDA_KERNELS and job.run.device in ("cpu", "mps"):
            yield "attention", f'"{self.attention}" needs CUDA, and run.device is "{job.run.device}"'

    def _too_large(self) -> Iterator[tuple[str, str]]:
        """More parameters than can be: the fault of ``dim``, which all matrices have, or of the key of the largest."""
        sides = {key: sorted(one[:2]) for key, one in self.matrices().items()}
        sizes = {key: (1 if key == "vocab_size" else self.n_layers) * math.prod(two) for key, two in sides.items()}
        if (parameters := sum(sizes.values())) <= _MOST:
            return
        largest = max(sizes, key=lambda key: (sizes[key], key == "head_dim" and self.head_size > self.n_heads))
        key, side = ("dim", self.dim) if sides[largest][1] < 100 * self.dim else (largest, sides[largest][1])
        shape = f"{side} in {self.n_layers} layers makes about {parameters:.1e} parameters"
        gib = 4 * parameters / 2**30
        yield key, f"{shape}, {gib:,.0f} GiB in fp32, more than any cluster holds; lower one of them"

    def _check_dropped_weights(self, job: Job) -> Iterator[tuple[str, str]]:
        cp = job.parallel.cp
        if cp > 1 and job.run.device == "cuda":
            sentence = f"parallel.cp = {cp} on CUDA keeps no weights that could be dropped"
            yield "attention_dropout", f"{sentence}; set it to 0, or parallel.cp = 1"


def _weights_of_targets_ahead(job: Job) -> Iterator[tuple[str, str]]:
    weights = [getattr(one, "loss_weight", 1.0) for one in getattr(job.data.config, "sources", ())]
    if unequal := [weight for weight in weights if weight != 1]:
        sentence = f"targets of tokens ahead have no weights, and a source of data has loss_weight = {unequal[0]:g}"
        yield "multi_token", f"{sentence}; remove one of the two"
