"""The transformer as ``LlamaForCausalLM`` and ``Qwen3ForCausalLM``: names of weights and configurations, both ways.

Weights are only renamed: Hugging Face has the same half-split rotary layout and the same matrices.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import attrs

from forge_core.errors import ConfigError
from forge_plugins_dense.activation_config import as_activation
from forge_plugins_dense.config import TransformerConfig
from forge_plugins_dense.feed_forward_config import MLPConfig
from forge_plugins_dense.huggingface_layers import (
    tables_of_windows,
    used_windows_from_hf,
    used_windows_to_hf,
    without_windows,
)
from forge_plugins_dense.latent_config import latent_of
from forge_plugins_dense.norm_config import RMSNORM
from forge_plugins_dense.rope_config import LongRope

T = TypeVar("T")

_OUTSIDE = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_INSIDE = {
    "attention_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
_MLP = ("feed_forward.gate", "feed_forward.up", "feed_forward.down")
_ATTENTION = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
_QK_NORM = {"q_norm": "q_norm", "k_norm": "k_norm"}
_LATENT = {
    "q": "q_proj",
    "kv_down": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "kv_up": "kv_b_proj",
    "o": "o_proj",
}
_LATENT_Q = {"q_down": "q_a_proj", "q_norm": "q_a_layernorm", "q": "q_b_proj"}
_DERIVED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
"""Old checkpoints hold the rotary frequencies, which follow from the configuration."""


def weight_names(config: TransformerConfig) -> dict[str, str]:
    """Our name of every weight of the model to Hugging Face's name; predictors of further tokens have no place there.

    Raises:
        ConfigError: no Hugging Face architecture is equal to this model.
    """
    _check_representable(config)
    return decoder_names(config)


def decoder_names(config: TransformerConfig) -> dict[str, str]:
    """Same as ``weight_names``, as if the feed-forward layers were dense and some architecture were equal to this
    model."""
    if (latent := latent_of(config)) is not None:
        attention = _LATENT | (_LATENT_Q if latent.q_rank else {})
    else:
        attention = _ATTENTION | (_QK_NORM if config.qk_norm else {})
    inside = _INSIDE | {f"attention.{ours}": f"self_attn.{theirs}" for ours, theirs in attention.items()}
    biased = biased_projections(config)
    names = {
        f"blocks.{layer}.{ours}.{parameter}": f"model.layers.{layer}.{theirs}.{parameter}"
        for layer in range(config.n_layers)
        for ours, theirs in inside.items()
        for parameter in (("weight", "bias") if ours in biased else ("weight",))
    }
    outside = {ours: theirs for ours, theirs in _OUTSIDE.items() if ours != "head.weight" or not config.tie_embeddings}
    return outside | names


def biased_projections(config: TransformerConfig) -> set[str]:
    """The linear layers of a block that have a bias."""
    attention = {"none": "", "qkv": "qkv", "all": "qkvo"}[config.attention_bias]
    has_bias = getattr(config.feed_forward.config, "bias", False)
    return {f"attention.{name}" for name in attention} | (set(_MLP) if has_bias else set())


def from_hf_state(state: Mapping[str, T], config: TransformerConfig) -> dict[str, T]:
    """Hugging Face weights under our names; the values are passed through.

    Raises:
        ConfigError: weights are missing or left over; or as ``weight_names``.
    """
    names = weight_names(config)
    spare = {name for name in state if is_derived(name)}
    if config.tie_embeddings:
        spare.add("lm_head.weight")
    check_complete(state.keys() - spare, names.values())
    return {ours: state[theirs] for ours, theirs in names.items()}


def to_hf_state(state: Mapping[str, T], config: TransformerConfig) -> dict[str, T]:
    """Our weights under Hugging Face's names; the values are passed through. A tied head is left out, as they do, and
    so are predictors of further tokens, which generation does without.

    Raises:
        ConfigError: weights are missing or left over; or as ``weight_names``.
    """
    names = weight_names(config)
    predictors = tuple(f"blocks.{config.n_layers + depth}." for depth in range(config.n_predictors))
    spare = {name for name in state if name.startswith(predictors)}
    if config.tie_embeddings:
        spare.add("head.weight")
    check_complete(state.keys() - spare, names)
    return {theirs: state[ours] for ours, theirs in names.items()}


def config_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    """A Hugging Face ``config.json`` as the table ``[model]``.

    Raises:
        ConfigError: the architecture is another one, or uses something that the transformer has not.
    """
    architecture = _architecture(hf)
    windows = None
    if architecture == "Qwen3ForCausalLM":
        first = hf.get("max_window_layers", 28)  # Qwen3Config's default
        windows = used_windows_from_hf(hf, lambda number: number >= first)
    return decoder_from_hf(hf, architecture, windows=windows)


def decoder_from_hf(
    hf: Mapping[str, Any], architecture: str, *, partial: bool = False, windows: Sequence[int] | None = None
) -> dict[str, Any]:
    """Same as ``config_from_hf``, of the parts of any architecture that are alike in the decoders of Hugging Face.

    Args:
        partial: as for ``rope_from_hf``.
        windows: that of each layer, 0 for none; by default, a ``config.json`` that asks for one is refused.

    Raises:
        ConfigError: it uses something that the transformer has not.
    """
    if windows is None:
        _refuse_windows(hf, architecture)
    table: dict[str, Any] = {
        "name": "transformer",
        "dim": hf["hidden_size"],
        "n_layers": hf["num_hidden_layers"],
        "n_heads": hf["num_attention_heads"],
        "n_kv_heads": hf.get("num_key_value_heads") or hf["num_attention_heads"],
        "vocab_size": hf["vocab_size"],
        "max_seq_len": hf["max_position_embeddings"],
        "norm_eps": hf.get("rms_norm_eps", 1e-6),
        "qk_norm": architecture == "Qwen3ForCausalLM",
        "tie_embeddings": hf.get("tie_word_embeddings", False),
        "init_std": hf.get("initializer_range", 0.02),
        "feed_forward": mlp_from_hf(hf, architecture),
    }
    if rate := hf.get("attention_dropout"):
        table["attention_dropout"] = rate
    if hf.get("attention_bias", False):
        table["attention_bias"] = "all"
    head_dim = hf.get("head_dim") or (128 if architecture == "Qwen3ForCausalLM" else None)  # Qwen3Config's default
    if head_dim is not None:
        table["head_dim"] = head_dim
    return table | rope_from_hf(hf, architecture, partial=partial) | (tables_of_windows(windows) if windows else {})


def mlp_from_hf(hf: Mapping[str, Any], architecture: str, key: str = "hidden_act") -> dict[str, Any]:
    """The table ``feed_forward`` of a gated layer.

    Args:
        key: which one names the activation.

    Raises:
        ConfigError: it is another one than ours.
    """
    found = hf.get(key) or "silu"
    if found not in ACTIVATIONS:
        raise ConfigError(f"{architecture} with {key} = {found!r} is not supported; {', '.join(ACTIVATIONS)} are")
    table: dict[str, Any] = {"name": "mlp", "hidden_dim": hf["intermediate_size"]}
    if ACTIVATIONS[found] != "silu":
        table |= {"activation": ACTIVATIONS[found], "gated": True}
    return table | ({"bias": True} if hf.get("mlp_bias", False) else {})


ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "relu2": "relu2",
    "relu": "relu",
}
"""Their names of activations, and ours; of several, the first is written."""


def rope_from_hf(hf: Mapping[str, Any], architecture: str, *, partial: bool = False) -> dict[str, Any]:
    """Keys of the table ``[model]`` about rotary positions.

    Args:
        partial: whether the architecture may rotate a part of a head's features.

    Raises:
        ConfigError: they are of a kind that the transformer has not.
    """
    rope = rope_table(hf)
    table: dict[str, Any] = {"rope_theta": float(rope.get("rope_theta", hf.get("rope_theta", 10_000.0)))}
    fraction = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0) if partial else 1.0)
    if fraction != 1 and not partial:
        raise ConfigError(f"{architecture} with partial_rotary_factor = {fraction} is not supported; only 1.0 is")
    if fraction != 1:
        table["rotary_fraction"] = float(fraction)
    kind = rope_kind(rope)
    if kind == "llama3":
        table["rope_scaling"] = {
            "factor": float(rope["factor"]),
            "low_freq_factor": float(rope["low_freq_factor"]),
            "high_freq_factor": float(rope["high_freq_factor"]),
            "original_max_seq_len": rope["original_max_position_embeddings"],
        }
    elif kind == "yarn":
        table["yarn"] = _yarn_from_hf(rope, hf)
        _refuse_scaled_part(float(fraction), table["yarn"]["logit_scale"], architecture)
    elif kind == "longrope":
        table["long_rope"] = _long_rope_from_hf(rope, hf)
    elif kind == "linear":
        table["rope_factor"] = float(rope["factor"])
    elif kind != "default":
        kinds = '"default", "linear", "llama3", "longrope" and "yarn"'
        raise ConfigError(f'{architecture} with rope_type = "{kind}" is not supported; {kinds} are')
    return table


def rope_table(hf: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_parameters``, which transformers 5 writes, or ``rope_scaling`` of earlier ones, which have ``rope_theta``
    beside it. A file for both has both.

    Raises:
        ConfigError: they do not say the same.
    """
    new, old = dict(hf.get("rope_parameters") or {}), dict(hf.get("rope_scaling") or {})
    if new and old:
        both = {**{key: hf[key] for key in ("rope_theta",) if key in hf}, **old, "rope_type": rope_kind(old)}
        both.pop("type", None)
        for key, value in both.items():
            other = rope_kind(new) if key == "rope_type" else new.get(key, value)
            if value != other:
                raise ConfigError(
                    f"rope_parameters has {key} = {other!r}, and {value!r} is beside it, as files of rope_scaling have "
                    "it; take one of the two tables out"
                )
    return new or old


def rope_kind(rope: Mapping[str, Any]) -> str:
    """How frequencies are stretched, by either of the keys for it."""
    return str(rope.get("rope_type", rope.get("type", "default")))


def _refuse_windows(hf: Mapping[str, Any], architecture: str) -> None:
    """``sliding_window`` and ``max_window_layers`` say nothing without ``use_sliding_window``; ``layer_types`` says the
    same once more."""
    if hf.get("use_sliding_window", False):
        raise ConfigError(f"{architecture} with use_sliding_window = True is not supported; only False is")
    for kind in hf.get("layer_types") or ():
        if kind != "full_attention":
            raise ConfigError(f"{architecture} with layer_types of {kind!r} is not supported; only 'full_attention' is")
    if "use_sliding_window" in hf:
        hf.get("sliding_window"), hf.get("max_window_layers")


def _yarn_from_hf(rope: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
    """There, cosines and sines are multiplied by ``attention_factor``, and logits so by its square."""
    original = rope.get("original_max_position_embeddings") or hf["max_position_embeddings"]
    factor = float(rope.get("factor") or hf["max_position_embeddings"] / original)
    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
        attention_factor = _mscale(factor, mscale) / _mscale(factor, all_dim) if mscale and all_dim else _mscale(factor)
    return {
        "factor": factor,
        "original_max_seq_len": original,
        "beta_slow": float(rope.get("beta_slow") or 1),
        "beta_fast": float(rope.get("beta_fast") or 32),
        **({} if rope.get("truncate", True) else {"truncate": False}),
        "logit_scale": attention_factor**2,
    }


def _refuse_scaled_part(fraction: float, logit_scale: float, where: str) -> None:
    """There, the features that are not rotated are not multiplied.

    Raises:
        ConfigError: there are such features, and a factor.
    """
    if fraction < 1 and not math.isclose(logit_scale, 1.0):
        raise ConfigError(
            f"{where} with yarn and partial_rotary_factor = {fraction} has another attention than ours, unless "
            "attention_factor = 1"
        )


def _long_rope_from_hf(rope: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
    """The attention factor is written out, as ours does not follow ``max_position_embeddings`` any further."""
    longest = hf["max_position_embeddings"]
    original = hf.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings") or longest
    scaling = LongRope(
        short_factor=tuple(map(float, rope["short_factor"])),
        long_factor=tuple(map(float, rope["long_factor"])),
        original_max_seq_len=original,
        attention_factor=rope.get("attention_factor"),
    )
    magnitude = scaling.magnitude(rope["factor"] * original if rope.get("factor") else longest)
    table = attrs.asdict(attrs.evolve(scaling, attention_factor=magnitude))
    return {key: list(value) if isinstance(value, tuple) else value for key, value in table.items()}


def _mscale(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def hf_config(config: TransformerConfig, vocab_size: int) -> dict[str, Any]:
    """The content of ``config.json`` for this model, readable by transformers 4 and 5.

    Raises:
        ConfigError: no Hugging Face architecture is equal to this model.
    """
    feed_forward = _check_representable(config)
    rope = rope_to_hf(config)
    return {
        "architectures": ["Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if config.qk_norm else "llama",
        "hidden_size": config.dim,
        "intermediate_size": feed_forward.width(config.dim),
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "vocab_size": vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope if rope["rope_type"] != "default" else None,
        "rope_parameters": rope | {"rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_std,
        "use_sliding_window": False,
        "hidden_act": activation_to_hf(feed_forward),
        "attention_bias": config.attention_bias == "all",
        "attention_dropout": config.attention_dropout,
        "mlp_bias": feed_forward.bias,
        **(used_windows_to_hf(config) if config.windows else {}),
    }


def activation_to_hf(feed_forward: MLPConfig) -> str:
    """Their name of an activation.

    Raises:
        ConfigError: they have none.
    """
    for theirs, ours in ACTIVATIONS.items():
        if as_activation(ours) == feed_forward.activation:
            return theirs
    raise ConfigError(f'activation = "{feed_forward.activation.name}" has no Hugging Face form in a dense layer')


def rope_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """Their table of how rotary frequencies are stretched, without ``rope_theta``."""
    rope: dict[str, Any] = {"rope_type": "default"}
    if config.rope_factor != 1:
        rope = {"rope_type": "linear", "factor": config.rope_factor}
    if config.yarn is not None:
        layers = [config.layer(number) for number in range(config.n_layers)]
        stretched = next((layer for layer in layers if layer.rope_stretched), layers[0])
        for layer in layers:
            sharper = config.logit_scale(layer) / config.attention_multiplier
            _refuse_scaled_part(layer.rotary_fraction, sharper, "the Hugging Face form")
        rope = {
            "rope_type": "yarn",
            "factor": config.yarn.factor,
            "original_max_position_embeddings": config.yarn.original_max_seq_len,
            "beta_slow": config.yarn.beta_slow,
            "beta_fast": config.yarn.beta_fast,
            **({} if config.yarn.truncate else {"truncate": False}),
            "attention_factor": math.sqrt(config.logit_scale(stretched)),
        }
    if config.long_rope is not None:
        rope = {
            "rope_type": "longrope",
            "short_factor": [*config.long_rope.short_factor],
            "long_factor": [*config.long_rope.long_factor],
            "original_max_position_embeddings": config.long_rope.original_max_seq_len,
            "attention_factor": config.long_rope.magnitude(config.max_seq_len),
        }
    if config.rope_scaling is not None:
        rope = {
            "rope_type": "llama3",
            "factor": config.rope_scaling.factor,
            "low_freq_factor": config.rope_scaling.low_freq_factor,
            "high_freq_factor": config.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": config.rope_scaling.original_max_seq_len,
        }
    return rope


def _architecture(hf: Mapping[str, Any]) -> str:
    known = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    found = (hf.get("architectures") or [known.get(hf.get("model_type", ""), hf.get("model_type"))])[0]
    if found not in known.values():
        raise ConfigError(f"the architecture {found} is not supported; {' and '.join(known.values())} are")
    return str(found)


def refuse_further_parts(config: TransformerConfig) -> None:
    """
    Raises:
        ConfigError: the config is that of another model, or of one with more than a decoder, which would be lost.
    """
    if type(config) is not TransformerConfig:
        raise ConfigError("the architecture is a decoder alone, and this model is none, or has further parts")


def _check_representable(config: TransformerConfig) -> MLPConfig:
    refuse_further_parts(config)
    if config.qk_norm:  # Qwen3, which has windows
        config = without_windows(config)
    feed_forward = config.feed_forward.config
    if not isinstance(feed_forward, MLPConfig) or not feed_forward.is_gated:
        raise ConfigError("only a transformer whose feed_forward is a gated mlp has a Hugging Face form like Llama's")
    if config.qk_norm and feed_forward.bias:
        raise ConfigError("Qwen3ForCausalLM has no biases in its mlp, and this model has some")
    if config.norm != RMSNORM:
        raise ConfigError(f'only norm = "rmsnorm" has a Hugging Face form, and this model has "{config.norm.name}"')
    refuse_multipliers(config)
    for key in _LIKE_LLAMA:
        if getattr(config, key) != getattr(attrs.fields(TransformerConfig), key).default:
            raise ConfigError(f"{key} = {getattr(config, key)} has no Hugging Face form like Llama's")
    if config.mixer is not None:
        raise ConfigError(f'mixer = "{config.mixer.name}" has no Hugging Face form like Llama\'s')
    if config.attention_bias == "qkv":
        raise ConfigError('attention_bias = "qkv" has no Hugging Face form like Llama\'s')
    if config.qk_norm_over != "head":
        raise ConfigError(f'qk_norm_over = "{config.qk_norm_over}" has no Hugging Face form in a dense model')
    return feed_forward


_LIKE_LLAMA = (
    *(
        "norm_placement",
        "window",
        "attention_sinks",
        "attention_softcap",
        "output_softcap",
        "rotary_fraction",
        "learned_positions",
    ),
    *("parallel_residual", "embed_multiplier", "layers"),
)
"""Keys that must have their defaults."""


def refuse_multipliers(config: TransformerConfig) -> None:
    """
    Raises:
        ConfigError: the model multiplies what the architectures of Hugging Face here do not.
    """
    for key in ("output_multiplier", "residual_multiplier", "attention_multiplier"):
        if getattr(config, key) != 1:
            raise ConfigError(
                f"{key} = {getattr(config, key):g} has no Hugging Face form; multiply weights by it first"
            )


def is_derived(name: str) -> bool:
    """Return whether a weight of this name follows from the configuration; old checkpoints have some."""
    return _DERIVED.search(name) is not None


def check_complete(found: Iterable[str], expected: Iterable[str]) -> None:
    """
    Raises:
        ConfigError: names of weights are missing, or left over.
    """
    found, expected = set(found), set(expected)
    wrong = [
        f"{what}: {', '.join(sorted(names)[:5])}{' …' if len(names) > 5 else ''}"
        for what, names in (("missing", expected - found), ("unexpected", found - expected))
        if names
    ]
    if wrong:
        raise ConfigError(f"these are not the weights of this model; {'; '.join(wrong)}")
