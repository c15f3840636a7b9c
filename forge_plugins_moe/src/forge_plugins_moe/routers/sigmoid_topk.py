"""The router ``sigmoid_topk``: the experts with the highest score, each scored by itself."""

from __future__ import annotations

import torch

from forge_plugins_moe.router_config import SigmoidTopKConfig
from forge_plugins_moe.routers.scores import normalized
from forge_plugins_moe.routers.topk import TopKRouter


class SigmoidTopK(TopKRouter):
    """``s = sigmoid(ℓ)``, the K largest of ``s + b`` in the best groups, weighted by ``s / Σ s · scale`` (DeepSeek-V3,
    Liu et al. 2024, arXiv 2412.19437, section 2.1.2).

    Raises:
        ConfigError: what the config asks for cannot be with so many experts.
    """

    def __init__(self, config: SigmoidTopKConfig, /, *, dim: int, n_experts: int, **_: object) -> None:
        super().__init__(config, config.score_function, dim=dim, n_experts=n_experts)
        self.normalize = config.normalize

    def _weigh(self, scores: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return self.config.route_scale * (normalized(scores) if self.normalize else scores)
