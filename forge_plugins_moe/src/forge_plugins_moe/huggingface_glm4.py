"""What is special in the configuration of GLM 4.5: heads of their own, partly rotated, beside DeepSeek-V3's experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from forge_plugins_dense.config import TransformerConfig
from forge_plugins_dense.huggingface import rope_to_hf
from forge_plugins_moe.huggingface_deepseek import problems_of_experts, read_experts, write_experts

DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "use_qk_norm": False,
    "partial_rotary_factor": 0.5,
}


def read(hf: Mapping[str, Any], table: dict[str, Any]) -> None:
    """Same as ``Architecture.read``. Multi-token prediction is left out."""
    for key in ("num_nextn_predict_layers", "num_mtp_layers"):
        hf.get(key)
    table["qk_norm"] = hf["use_qk_norm"]
    if hf.get("attention_bias", False):
        table["attention_bias"] = "qkv"
    read_experts(hf, table)


def write(config: TransformerConfig, table: dict[str, Any]) -> None:
    """Same as ``Architecture.write``.

    Raises:
        ConfigError: it stretches frequencies of a part of a head in another way.
    """
    write_experts(config, table)
    rope = rope_to_hf(config) | {"partial_rotary_factor": config.rotary_fraction}
    table |= {
        "use_qk_norm": config.qk_norm,
        "attention_bias": config.attention_bias == "qkv",
        "partial_rotary_factor": config.rotary_fraction,
        "num_nextn_predict_layers": 0,
        "rope_scaling": rope if rope["rope_type"] != "default" else None,
        "rope_parameters": rope | {"rope_theta": config.rope_theta},
    }


def problems(config: TransformerConfig) -> Iterator[str]:
    """Same as ``Architecture.problems``."""
    if config.qk_norm_over != "head":
        yield "qk_norm_over must be head"
    yield from problems_of_experts(config)
