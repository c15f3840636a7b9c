"""The router ``softmax_topk``: the experts with the highest probability."""

from __future__ import annotations

import torch

from forge_plugins_moe.router_config import SoftmaxTopKConfig
from forge_plugins_moe.routers.scores import normalized
from forge_plugins_moe.routers.topk import TopKRouter


class SoftmaxTopK(TopKRouter):
    """``p = softmax(ℓ)`` over all experts, and the K largest (Switch, Mixtral, OLMoE, Qwen3-MoE, DeepSeek-V2).

    Raises:
        ConfigError: what the config asks for cannot be with so many experts.
    """

    def __init__(self, config: SoftmaxTopKConfig, /, *, dim: int, n_experts: int, **_: object) -> None:
        super().__init__(config, "softmax", dim=dim, n_experts=n_experts)
        self.order, self.normalize = config.order, config.normalize

    def _weigh(self, scores: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        if self.order == "topk_softmax":
            return self.config.route_scale * logits.softmax(-1)
        return self.config.route_scale * (normalized(scores) if self.normalize else scores)
