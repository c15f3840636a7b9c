"""The dense feed-forward layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from forge_core.contracts.model import Initializer, ParameterRole, ShardRole
from forge_plugins_dense.config import MLPConfig
from forge_plugins_dense.initial_values import normal


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv 2002.05202) or a plain two-matrix MLP, without biases."""

    def __init__(self, config: MLPConfig, *, dim: int, **_: object) -> None:
        super().__init__()
        hidden_dim = config.width(dim)
        self.gate = nn.Linear(dim, hidden_dim, bias=False) if config.activation == "silu" else None
        self.up = nn.Linear(dim, hidden_dim, bias=False)
        self.down = nn.Linear(hidden_dim, dim, bias=False)
        self.activation = config.activation

    def forward(self, hidden: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        """``(B, S, D)`` to ``(B, S, D)``; padding is computed along, which changes nothing elsewhere."""
        if self.gate is not None:
            return self.down(F.silu(self.gate(hidden)) * self.up(hidden))
        activation = F.gelu if self.activation == "gelu" else F.relu
        return self.down(activation(self.up(hidden)))

    def init_weights(self, rng: Initializer, prefix: str, residual_std: float, std: float) -> None:
        if self.gate is not None:
            rng.fill(f"{prefix}gate.weight", self.gate.weight, normal(std))
        rng.fill(f"{prefix}up.weight", self.up.weight, normal(std))
        rng.fill(f"{prefix}down.weight", self.down.weight, normal(residual_std))

    def parallel_plan(self) -> dict[str, ShardRole]:
        plan: dict[str, ShardRole] = {"up": "column", "down": "row"}
        return plan if self.gate is None else {"gate": "column", **plan}

    def parameter_roles(self) -> dict[str, ParameterRole]:
        return {name: "matrix" for name, _ in self.named_parameters()}

    def active_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())
