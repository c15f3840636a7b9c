"""Sparse decoders of Hugging Face: their configurations as ours, and back.

What a decoder has beside its sparse layers is translated by ``forge_plugins_dense.huggingface``, weights by
``huggingface_weights``.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import attrs

from forge_core.errors import ConfigError
from forge_plugins_dense import huggingface as dense
from forge_plugins_dense.activation_config import SILU
from forge_plugins_dense.config import TransformerConfig
from forge_plugins_dense.huggingface_layers import (
    used_windows_from_hf,
    used_windows_to_hf,
    windows_to_hf,
    without_windows,
)
from forge_plugins_dense.latent_config import latent_of
from forge_plugins_moe import huggingface_deepseek as deepseek
from forge_plugins_moe import huggingface_deepseek_v2 as deepseek_v2
from forge_plugins_moe import huggingface_glm4 as glm4
from forge_plugins_moe.router_config import SigmoidTopKConfig, SoftmaxTopKConfig
from forge_plugins_moe.sparse_config import expert_width, mlp_of, moe_of, sparse_layers

Table = dict[str, Any]


@attrs.frozen(kw_only=True, eq=False)
class Architecture:
    """What is called otherwise, or is otherwise, in one of them."""

    name: str
    model_type: str
    defaults: Mapping[str, Any]
    """What keys mean that may be absent."""
    supported: Mapping[str, Any]
    """Keys with the only value that we have an equal of."""
    n_experts: str
    """Key of the number of experts."""
    width: str
    """Key of the width of an expert."""
    layer: str = "mlp"
    """What files of weights call a sparse layer."""
    matrices: Mapping[str, str] = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    """What they call an expert's."""
    shared: str = ""
    """What files call the shared experts of a layer; empty where there are none."""
    has_selection_bias: bool = False
    """Whether the router's bias is in files."""
    biases: tuple[str, ...] = ("none",)
    """Values that ``attention_bias`` may have."""
    predicts_further: bool = False
    """Whether files may have a layer after the last one, which predicts further tokens."""
    partial_rotary: bool = False
    """Whether it may rotate a part of a head's features."""
    windows: Callable[[Mapping[str, Any]], Sequence[int]] | None = None
    """The window of each layer, 0 for none, given theirs; none where its attention has none."""
    read: Callable[[Mapping[str, Any], Table], None]
    """Put what is special into a table ``[model]``, given theirs."""
    write: Callable[[TransformerConfig, Table], None]
    """Put what is special into the content of a ``config.json``."""
    problems: Callable[[TransformerConfig], Iterator[str]]
    """What a model has, or has not, that is otherwise there."""


def config_from_hf(hf: Mapping[str, Any]) -> Table:
    """A Hugging Face ``config.json`` as the table ``[model]``.

    ``balance`` is ``router_aux_loss_coef`` times the experts a token over the number of sparse layers, which is what
    that means here: their loss is one for all layers, and with all experts a token in its mean. Hugging Face adds it
    only where a training script asks for ``output_router_logits``. A selection bias stays as it is, with ``bias_rate =
    0``.

    Raises:
        ConfigError: the architecture is another one, or uses something that we have not.
    """
    architecture = _named(hf)
    hf = ChainMap(cast("dict[str, Any]", hf), dict(architecture.defaults))  # which looks up what is asked for alone
    for key, supported in {"hidden_act": "silu", "mlp_bias": False, **architecture.supported}.items():
        if hf.get(key, supported) != supported:
            raise ConfigError(f"{architecture.name} with {key} = {hf[key]!r} is not supported; only {supported!r} is")
    windows = architecture.windows and architecture.windows(hf)
    table = dense.decoder_from_hf(hf, architecture.name, partial=architecture.partial_rotary, windows=windows)
    table["feed_forward"] = {
        "name": "moe",
        "n_experts": next(hf[key] for key in (architecture.n_experts, "num_local_experts") if key in hf),
        "hidden_dim": hf[architecture.width],
        "dense": table["feed_forward"],
    }
    architecture.read(hf, table)
    if table.get("attention_bias", "none") not in architecture.biases:
        raise ConfigError(f"{architecture.name} with attention_bias = true is not supported; only false is")
    return table


def hf_config(config: TransformerConfig, vocab_size: int) -> Table:
    """The content of ``config.json`` for this model, readable by transformers 4 and 5.

    Raises:
        ConfigError: none of these architectures is equal to this model.
    """
    dense.refuse_further_parts(config)
    architecture, moe = architecture_of(config), moe_of(config)
    table = dense.hf_config(_as_dense(config), vocab_size)
    table |= {
        **architecture.supported,
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        architecture.n_experts: moe.n_experts,
        "num_experts_per_tok": moe.router.config.top_k,
        architecture.width: expert_width(config),
    }
    architecture.write(config, table)
    return table


def architecture_of(config: TransformerConfig) -> Architecture:
    """The one that is equal to this model.

    Raises:
        ConfigError: none is; the message says what is in the way.
    """
    moe = moe_of(config)
    if isinstance(moe.router.config, SigmoidTopKConfig):
        architecture = GLM4_MOE if latent_of(config) is None else DEEPSEEK_V3
    elif isinstance(moe.router.config, SoftmaxTopKConfig):
        architecture = _with_softmax(config)
    else:
        raise ConfigError(
            f"the router {moe.router.name!r} has no Hugging Face form; softmax_topk and sigmoid_topk have"
        )
    problems = [*architecture.problems(config), *_problems(config, architecture)]
    if problems:
        raise ConfigError(f"this model has no Hugging Face form like {architecture.name}: {'; '.join(problems)}")
    return architecture


def _with_softmax(config: TransformerConfig) -> Architecture:
    """The nearest of those whose router is ``softmax_topk``."""
    if latent_of(config) is not None:
        return DEEPSEEK_V2
    if config.qk_norm:
        return OLMOE if config.qk_norm_over == "all" else QWEN3_MOE
    return QWEN2_MOE if moe_of(config).shared_experts else MIXTRAL


def _named(hf: Mapping[str, Any]) -> Architecture:
    by_type = {one.model_type: one.name for one in ARCHITECTURES}
    found = (hf.get("architectures") or [by_type.get(hf.get("model_type", ""), hf.get("model_type"))])[0]
    for one in ARCHITECTURES:
        if one.name == found:
            return one
    raise ConfigError(f"the architecture {found} is not supported; {', '.join(one.name for one in ARCHITECTURES)} are")


def _as_dense(config: TransformerConfig) -> TransformerConfig:
    """The model with dense layers only, and what its sparse layers are found with left out."""
    apart: Table = {"attention_bias": "none", "rotary_fraction": 1.0, "qk_norm_over": "head"}
    if (latent := latent_of(config)) is not None:
        apart |= {"mixer": None, "head_dim": latent.rotary_dim}
    if config.rotary_fraction != 1:  # whole heads would take more factors
        apart["long_rope"] = None
    return attrs.evolve(without_windows(config), feed_forward=moe_of(config).dense, **apart)


def _problems(config: TransformerConfig, architecture: Architecture) -> Iterator[str]:
    moe = moe_of(config)
    if config.attention_bias not in architecture.biases:
        yield f"attention_bias must be {' or '.join(architecture.biases)}"
    if config.rotary_fraction != 1 and not architecture.partial_rotary:
        yield "rotary_fraction must be 1"
    if config.windows and architecture.windows is None:
        yield "there must be no window"
    if (moe.activation or mlp_of(config).activation) != SILU or not moe.expert.is_gated:
        yield "the activation must be silu, with a gate"
    if moe.bias or getattr(moe.router.config, "gate_bias", False):
        yield f"there must be no {'bias' if moe.bias else 'gate_bias'}"
    if mlp_of(config).bias:
        yield "dense layers must have no bias"
    if moe.capacity_factor is not None:
        yield "there must be no capacity_factor"


def softmax_router(config: TransformerConfig) -> SoftmaxTopKConfig:
    """Of a model whose architecture was chosen by it."""
    router = moe_of(config).router.config
    assert isinstance(router, SoftmaxTopKConfig), "the architecture was chosen by it"
    return router


def is_normalized(router: SoftmaxTopKConfig) -> bool:
    """Return whether the weights of a token sum to 1."""
    return router.order == "topk_softmax" or router.normalize


def _softmax_problems(config: TransformerConfig) -> Iterator[str]:
    if moe_of(config).shared_experts:
        yield "there must be no shared_experts"
    yield from _router_problems(config)


def _router_problems(config: TransformerConfig) -> Iterator[str]:
    router = softmax_router(config)
    if router.route_scale != 1:
        yield "route_scale must be 1"
    if router.n_groups != 1:
        yield "there must be no n_groups"
    if router.bias_rate is not None:
        yield "there must be no bias_rate"


def all_sparse_problems(config: TransformerConfig) -> Iterator[str]:
    """What keeps a model from having a softmax router in each layer, and nothing else."""
    yield from _softmax_problems(config)
    if len(sparse_layers(config)) < config.n_layers:
        yield "all layers must be sparse"


def read_softmax_router(hf: Mapping[str, Any], table: Table, n_sparse: int | None = None) -> None:
    """Put the router into a table ``[model]`` with a ``feed_forward``.

    Args:
        n_sparse: number of sparse layers; by default all are.
    """
    top_k = hf["num_experts_per_tok"]
    balance = hf["router_aux_loss_coef"] * top_k / (n_sparse or hf["num_hidden_layers"])
    router = {"name": "softmax_topk", "top_k": top_k, "balance": balance}
    if "norm_topk_prob" in hf:
        router |= {"order": "softmax_topk", "normalize": hf["norm_topk_prob"]}
    table["feed_forward"]["router"] = router


def write_softmax_router(config: TransformerConfig, table: Table) -> None:
    """The coefficient of its balance loss, into the content of a ``config.json``."""
    router = softmax_router(config)
    table["router_aux_loss_coef"] = router.balance * len(sparse_layers(config)) / router.top_k


def _mixtral_windows(hf: Mapping[str, Any]) -> list[int]:
    """In all layers; one as long as the longest sequence makes no difference."""
    hf.get("use_sliding_window")  # transformers goes by sliding_window alone
    window = hf.get("sliding_window") or 0
    return [window if window < hf["max_position_embeddings"] else 0] * hf["num_hidden_layers"]


def _read_mixtral(hf: Mapping[str, Any], table: Table) -> None:
    # in a file as any, norm_topk_prob would count
    named = ("num_experts_per_tok", "router_aux_loss_coef", "num_hidden_layers")
    read_softmax_router({key: hf[key] for key in named}, table)


def _write_mixtral(config: TransformerConfig, table: Table) -> None:
    write_softmax_router(config, table)
    table["sliding_window"] = windows_to_hf(config)["sliding_window"]
    del table["use_sliding_window"]


def _problem_of_windows(config: TransformerConfig) -> Iterator[str]:
    if len(config.windows) > 1:
        yield "all layers must have the same window"


def _mixtral_problems(config: TransformerConfig) -> Iterator[str]:
    yield from all_sparse_problems(config)
    yield from _problem_of_windows(config)
    if not is_normalized(softmax_router(config)):
        yield "without qk_norm, the weights of a token must sum to 1"


MIXTRAL = Architecture(
    name="MixtralForCausalLM",
    model_type="mixtral",
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "router_aux_loss_coef": 0.001},
    supported={"router_jitter_noise": 0.0},
    n_experts="num_local_experts",
    width="intermediate_size",
    layer="block_sparse_moe",
    matrices={"gate": "w1", "up": "w3", "down": "w2"},
    windows=_mixtral_windows,
    read=_read_mixtral,
    write=_write_mixtral,
    problems=_mixtral_problems,
)


def _qwen3_windows(hf: Mapping[str, Any]) -> list[int]:
    """In all layers or in none.

    Raises:
        ConfigError: in some, as early versions of transformers read such a file and later ones do not.
    """
    windows, first = used_windows_from_hf(hf, lambda _: True), hf.get("max_window_layers") or 0
    if hf.get("use_sliding_window", False) and hf["sliding_window"] and (first or 0 in windows):
        what = f"max_window_layers = {first}" if first else "layer_types of 'full_attention'"
        raise ConfigError(
            f"Qwen3MoeForCausalLM with {what} is not supported beside use_sliding_window, which is for all layers"
        )
    return windows


def _read_qwen3(hf: Mapping[str, Any], table: Table) -> None:
    table["qk_norm"] = True
    _read_sparse_layers(hf, table)


def _read_sparse_layers(hf: Mapping[str, Any], table: Table) -> None:
    step, dense_layers = hf["decoder_sparse_step"], hf.get("mlp_only_layers") or []
    layers = range(hf["num_hidden_layers"])
    sparse = [layer for layer in layers if layer not in dense_layers and (layer + 1) % step == 0]
    read_softmax_router(hf, table, len(sparse))
    if dense_layers:
        table["feed_forward"]["layers"] = sparse
    elif step > 1:
        table["feed_forward"]["every"] = step


def _write_qwen3(config: TransformerConfig, table: Table) -> None:
    _write_qwen(config, table)
    if config.windows:
        table |= used_windows_to_hf(config)


def _write_qwen(config: TransformerConfig, table: Table) -> None:
    write_softmax_router(config, table)
    table["norm_topk_prob"] = is_normalized(softmax_router(config))
    table["attention_bias"] = config.attention_bias == "all"
    table["decoder_sparse_step"] = 1
    table["mlp_only_layers"] = sorted({*range(config.n_layers)}.difference(sparse_layers(config)))


def _qwen3_problems(config: TransformerConfig) -> Iterator[str]:
    yield from _softmax_problems(config)
    yield from _problem_of_windows(config)


QWEN3_MOE = Architecture(
    name="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    defaults={
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "router_aux_loss_coef": 0.001,
        "sliding_window": 4096,
    },
    supported={},
    n_experts="num_experts",
    width="moe_intermediate_size",
    biases=("none", "all"),
    windows=_qwen3_windows,
    read=_read_qwen3,
    write=_write_qwen3,
    problems=_qwen3_problems,
)


def _qwen2_windows(hf: Mapping[str, Any]) -> list[int]:
    """In every second layer below ``max_window_layers``, where ``layer_types`` does not say."""
    last = hf["max_window_layers"]
    return used_windows_from_hf(hf, lambda number: number % 2 == 0 and number < last)


def _read_qwen2(hf: Mapping[str, Any], table: Table) -> None:
    table["attention_bias"] = "qkv" if hf["qkv_bias"] else "none"
    _read_sparse_layers(hf, table)
    shared = {"shared_experts": 1, "shared_gate": True, "shared_hidden_dim": hf["shared_expert_intermediate_size"]}
    table["feed_forward"] |= shared


def _write_qwen2(config: TransformerConfig, table: Table) -> None:
    moe = moe_of(config)
    _write_qwen(config, table)
    table |= used_windows_to_hf(config) | {"max_window_layers": config.n_layers}
    table["qkv_bias"] = config.attention_bias == "qkv"
    width = moe.shared_hidden_dim or expert_width(config)
    table["shared_expert_intermediate_size"] = moe.shared_experts * width


def _qwen2_problems(config: TransformerConfig) -> Iterator[str]:
    yield from _router_problems(config)
    if not moe_of(config).shared_gate:
        yield "there must be a shared_gate"


QWEN2_MOE = Architecture(
    name="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    defaults={**QWEN3_MOE.defaults, "qkv_bias": True, "max_window_layers": 28},
    supported={},
    n_experts="num_experts",
    width="moe_intermediate_size",
    shared="shared_expert",
    biases=("qkv", "none"),
    windows=_qwen2_windows,
    read=_read_qwen2,
    write=_write_qwen2,
    problems=_qwen2_problems,
)


def _read_olmoe(hf: Mapping[str, Any], table: Table) -> None:
    table |= {"qk_norm": True, "qk_norm_over": "all"}
    read_softmax_router(hf, table)


def _write_olmoe(config: TransformerConfig, table: Table) -> None:
    write_softmax_router(config, table)
    table["attention_bias"] = config.attention_bias == "all"
    table["norm_topk_prob"] = is_normalized(softmax_router(config))


def _olmoe_problems(config: TransformerConfig) -> Iterator[str]:
    yield from all_sparse_problems(config)
    if config.head_size * config.n_heads != config.dim:
        yield "all heads together must be as wide as dim"


OLMOE = Architecture(
    name="OlmoeForCausalLM",
    model_type="olmoe",
    defaults={"rms_norm_eps": 1e-5, "norm_topk_prob": False, "router_aux_loss_coef": 0.01},
    supported={"clip_qkv": None},
    n_experts="num_experts",
    width="intermediate_size",
    biases=("none", "all"),
    read=_read_olmoe,
    write=_write_olmoe,
    problems=_olmoe_problems,
)
DEEPSEEK_V2 = Architecture(
    name="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    defaults=deepseek_v2.DEFAULTS,
    supported=deepseek_v2.SUPPORTED,
    n_experts="n_routed_experts",
    width="moe_intermediate_size",
    shared="shared_experts",
    read=deepseek_v2.read,
    write=deepseek_v2.write,
    problems=deepseek_v2.problems,
)
DEEPSEEK_V3 = Architecture(
    name="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    defaults=deepseek.DEFAULTS,
    supported=deepseek.SUPPORTED,
    n_experts="n_routed_experts",
    width="moe_intermediate_size",
    shared="shared_experts",
    has_selection_bias=True,
    predicts_further=True,
    read=deepseek.read,
    write=deepseek.write,
    problems=deepseek.problems,
)
GLM4_MOE = Architecture(
    name="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    defaults=glm4.DEFAULTS,
    supported={},
    n_experts="n_routed_experts",
    width="moe_intermediate_size",
    shared="shared_experts",
    has_selection_bias=True,
    predicts_further=True,
    biases=("none", "qkv"),
    partial_rotary=True,
    read=glm4.read,
    write=glm4.write,
    problems=glm4.problems,
)
ARCHITECTURES = (DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE, MIXTRAL, OLMOE, QWEN2_MOE, QWEN3_MOE)
