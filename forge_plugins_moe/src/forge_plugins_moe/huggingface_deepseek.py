"""What is special in the configuration of DeepSeek-V3 (arXiv 2412.19437): its attention, its router, shared experts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from forge_core.errors import ConfigError
from forge_plugins_dense.config import TransformerConfig
from forge_plugins_dense.latent_config import latent_of
from forge_plugins_moe.router_config import SigmoidTopKConfig, TopKConfig
from forge_plugins_moe.sparse_config import expert_width, moe_of, sparse_layers

LATENT_EPS = 1e-6
"""What Hugging Face's norms of latents add, with any ``rms_norm_eps``."""
DEFAULTS = {
    "rms_norm_eps": LATENT_EPS,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "n_shared_experts": 1,
}
SUPPORTED = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_interleave": True}


def read(hf: Mapping[str, Any], table: dict[str, Any]) -> None:
    """Same as ``Architecture.read``. Multi-token prediction, which generation does without, is left out.

    Raises:
        ConfigError: it uses something that we have not.
    """
    hf.get("num_nextn_predict_layers")  # of the predictors, which are left out
    read_attention(hf, table)
    read_experts(hf, table)


def read_attention(hf: Mapping[str, Any], table: dict[str, Any]) -> None:
    """Latent attention, as DeepSeek-V2 has it too.

    Raises:
        ConfigError: it uses something that we have not.
    """
    hf.get("ep_size")  # of those who trained it
    if table["norm_eps"] != LATENT_EPS:
        raise ConfigError(
            f"rms_norm_eps = {table['norm_eps']} is not supported, as Hugging Face has {LATENT_EPS} in the norms of "
            "latents in any case, and here all norms have the same"
        )
    for key in ("n_kv_heads", "head_dim"):
        table.pop(key, None)
    width = hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"]
    if hf.get("qk_head_dim", width) != width:
        raise ConfigError(f"qk_head_dim = {hf['qk_head_dim']} is not qk_nope_head_dim + qk_rope_head_dim = {width}")
    table["mixer"] = {
        "name": "latent",
        "kv_rank": hf["kv_lora_rank"],
        "plain_dim": hf["qk_nope_head_dim"],
        "rotary_dim": hf["qk_rope_head_dim"],
        "value_dim": hf["v_head_dim"],
    }
    if hf.get("q_lora_rank") is not None:
        table["mixer"]["q_rank"] = hf["q_lora_rank"]
    if "yarn" in table:
        table["yarn"]["logit_scale"] = _logit_scale(hf, table["yarn"])


def read_experts(hf: Mapping[str, Any], table: dict[str, Any]) -> None:
    """The router, shared experts and dense layers, as GLM 4.5 has them too."""
    router = {
        "name": "sigmoid_topk",
        "top_k": hf["num_experts_per_tok"],
        "normalize": hf["norm_topk_prob"],
        "route_scale": hf["routed_scaling_factor"],
        "bias_rate": 0.0,
    }
    if hf["topk_group"] < hf["n_group"]:
        router |= {"n_groups": hf["n_group"], "groups_per_token": hf["topk_group"]}
    read_balance(hf, router)
    read_layers(hf, table, router)


def read_balance(hf: Mapping[str, Any], router: dict[str, Any]) -> None:
    """The balance loss that DeepSeek's own code has, of each sequence or of a batch; Hugging Face's has none."""
    coefficient, by_sequence = hf.get("aux_loss_alpha") or 0.0, hf.get("seq_aux", True)
    router["balance"] = float(coefficient)
    if coefficient:
        router["balance_scope"] = "sequence" if by_sequence else "global_batch"


def read_layers(hf: Mapping[str, Any], table: dict[str, Any], router: Mapping[str, Any]) -> None:
    """Shared experts and dense layers."""
    table["feed_forward"] |= {
        "router": router,
        "shared_experts": hf["n_shared_experts"],
        "first_dense": hf["first_k_dense_replace"],
    }


def write(config: TransformerConfig, table: dict[str, Any]) -> None:
    """Same as ``Architecture.write``."""
    write_experts(config, table)
    write_attention(config, table)
    table["num_nextn_predict_layers"] = 0


def write_attention(config: TransformerConfig, table: dict[str, Any]) -> None:
    """The reverse of ``read_attention``."""
    latent = latent_of(config)
    assert latent is not None, "the architecture has been checked"
    table |= {
        "num_key_value_heads": config.n_heads,
        "head_dim": latent.rotary_dim,
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.plain_dim,
        "qk_rope_head_dim": latent.rotary_dim,
        "v_head_dim": latent.value_dim,
    }
    if config.yarn is not None:
        sharper = math.log(config.yarn.factor)
        scale = config.logit_scale(config.layer(0))
        mscale = (math.sqrt(scale) - 1) / (0.1 * sharper) if sharper else 0.0
        for rope in (table["rope_parameters"], table["rope_scaling"]):
            rope |= {"mscale": mscale, "mscale_all_dim": mscale, "attention_factor": 1.0}


def write_experts(config: TransformerConfig, table: dict[str, Any]) -> None:
    """The reverse of ``read_experts``."""
    router = _router(config)
    table |= {
        "n_group": router.n_groups,
        "topk_group": router.groups_per_token or 1,
        "norm_topk_prob": router.normalize,
        "routed_scaling_factor": router.route_scale,
    }
    write_balance(router, table)
    write_layers(config, table)


def write_balance(router: TopKConfig, table: dict[str, Any]) -> None:
    """The reverse of ``read_balance``."""
    if router.balance:
        table |= {"aux_loss_alpha": router.balance, "seq_aux": router.balance_scope == "sequence"}


def write_layers(config: TransformerConfig, table: dict[str, Any]) -> None:
    """The reverse of ``read_layers``."""
    table |= {
        "n_shared_experts": moe_of(config).shared_experts,
        "first_k_dense_replace": config.n_layers - len(sparse_layers(config)),
    }


def problems(config: TransformerConfig) -> Iterator[str]:
    """Same as ``Architecture.problems``."""
    yield from problems_of_attention(config)
    yield from problems_of_experts(config)


def problems_of_attention(config: TransformerConfig) -> Iterator[str]:
    """What DeepSeek-V2 does not have either."""
    if config.norm_eps != LATENT_EPS:
        yield f"norm_eps must be {LATENT_EPS}"
    scale = config.logit_scale(config.layer(0))
    if scale < 1:
        yield "yarn.logit_scale must not be below 1"
    if config.yarn is not None and config.yarn.factor == 1 and scale > 1:  # there, it follows from the factor
        yield "yarn.logit_scale must be 1 where yarn.factor is"


def problems_of_experts(config: TransformerConfig) -> Iterator[str]:
    """What GLM 4.5 does not have either."""
    router = _router(config)
    if router.score_function != "sigmoid":
        yield "score_function must be sigmoid"
    if router.n_groups > 1 and router.group_score != "top2_sum":
        yield "group_score must be top2_sum"
    yield from problems_of_layers(config)


def problems_of_layers(config: TransformerConfig) -> Iterator[str]:
    """What none of them has."""
    moe = moe_of(config)
    if moe.shared_experts == 0:
        yield "there must be shared_experts"
    if moe.shared_gate:
        yield "there must be no shared_gate"
    if moe.shared_hidden_dim not in (None, expert_width(config)):
        yield "shared experts must be as wide as routed ones"
    layers = sparse_layers(config)
    if layers != [*range(config.n_layers - len(layers), config.n_layers)]:
        yield "dense layers must come first"


def _router(config: TransformerConfig) -> SigmoidTopKConfig:
    router = moe_of(config).router.config
    assert isinstance(router, SigmoidTopKConfig), "the architecture was chosen by it"
    return router


def _logit_scale(hf: Mapping[str, Any], yarn: Mapping[str, Any]) -> float:
    """There, logits are multiplied by the square of a scale, and cosines and sines by another, which must be 1."""
    if not math.isclose(yarn["logit_scale"], 1.0):
        raise ConfigError("yarn is supported with equal mscale and mscale_all_dim, or attention_factor = 1, only")
    rope = hf.get("rope_parameters") or hf["rope_scaling"]
    all_dim = rope.get("mscale_all_dim") or 0.0
    return (0.1 * all_dim * math.log(yarn["factor"]) + 1) ** 2 if yarn["factor"] > 1 else 1.0
