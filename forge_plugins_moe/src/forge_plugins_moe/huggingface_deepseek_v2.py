"""What is special in the configuration of DeepSeek-V2 (arXiv 2405.04434): V3's attention, and a softmax router that may
be limited to the groups with the best experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from forge_core.errors import ConfigError
from forge_plugins_dense.config import TransformerConfig
from forge_plugins_moe.huggingface_deepseek import (
    LATENT_EPS,
    problems_of_attention,
    problems_of_layers,
    read_attention,
    read_balance,
    read_layers,
    write_attention,
    write_balance,
    write_layers,
)
from forge_plugins_moe.router_config import SoftmaxTopKConfig
from forge_plugins_moe.sparse_config import moe_of

DEFAULTS = {
    "rms_norm_eps": LATENT_EPS,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0,
    "n_shared_experts": 2,
}
SUPPORTED = {"moe_layer_freq": 1, "scoring_func": "softmax", "norm_topk_prob": False}
_METHODS = ("greedy", "group_limited_greedy")


def read(hf: Mapping[str, Any], table: dict[str, Any]) -> None:
    """Same as ``Architecture.read``.

    Raises:
        ConfigError: it uses something that we have not.
    """
    read_attention(hf, table)
    method, groups, kept = hf["topk_method"], hf["n_group"], hf["topk_group"]
    if method not in _METHODS:
        raise ConfigError(f"topk_method = {method!r} is not supported; {' and '.join(_METHODS)} are")
    router = {
        "name": "softmax_topk",
        "order": "softmax_topk",
        "top_k": hf["num_experts_per_tok"],
        "route_scale": hf["routed_scaling_factor"],
    }
    if method == "group_limited_greedy" and kept < groups:
        router |= {"n_groups": groups, "groups_per_token": kept, "group_score": "max"}
    read_balance(hf, router)
    read_layers(hf, table, router)


def write(config: TransformerConfig, table: dict[str, Any]) -> None:
    """Same as ``Architecture.write``."""
    router = _router(config)
    write_attention(config, table)
    write_layers(config, table)
    table |= {
        "topk_method": _METHODS[router.n_groups > 1],
        "n_group": router.n_groups,
        "topk_group": router.groups_per_token or 1,
        "routed_scaling_factor": router.route_scale,
    }
    write_balance(router, table)


def problems(config: TransformerConfig) -> Iterator[str]:
    """Same as ``Architecture.problems``."""
    router = _router(config)
    yield from problems_of_attention(config)
    if router.order != "softmax_topk" or router.normalize:
        yield "the weights of a token must be those of the softmax over all experts"
    if router.n_groups > 1 and router.group_score != "max":
        yield "group_score must be max"
    if router.bias_rate is not None:
        yield "there must be no bias_rate"
    yield from problems_of_layers(config)


def _router(config: TransformerConfig) -> SoftmaxTopKConfig:
    router = moe_of(config).router.config
    assert isinstance(router, SoftmaxTopKConfig), "the architecture was chosen by it"
    return router
