"""A feed-forward layer with auxiliary losses."""

from __future__ import annotations

import torch

from forge_core.ops.auxiliary_loss import attach_auxiliary_loss
from forge_plugins_dense.config import MLPConfig
from forge_plugins_dense.feed_forward import MLP


class SizedMLP(MLP):
    """Layers 0 and 3 pay for the size of what they give back, layer 1 for that of what it reads, as a router would."""

    def __init__(self, config: MLPConfig, *, layer: int, **rest: int) -> None:
        super().__init__(config, **rest)
        self.layer = layer

    def forward(self, hidden: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        out = super().forward(hidden, valid)
        if self.layer == 1:
            size = 0.1 * hidden.float().square().mean(-1).sigmoid().sum()
            return attach_auxiliary_loss(out, size, "read_1", place="read")
        if self.layer in (0, 3):
            return attach_auxiliary_loss(out, 0.1 * out.float().square().sum(), f"size_{self.layer}", place="stream")
        return out
