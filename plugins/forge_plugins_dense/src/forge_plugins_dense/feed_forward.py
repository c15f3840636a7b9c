"""The dense feed-forward layer."""

from __future__ import annotations

import torch
from torch import nn

from forge_core.contracts.builder import Builder
from forge_core.contracts.model import Initializer, ParameterRole, ShardRole
from forge_core.contracts.observation import Site
from forge_plugins_dense.activation import activated, make_activation
from forge_plugins_dense.feed_forward_config import MLPConfig
from forge_plugins_dense.initial_values import normal, zeros


class MLP(nn.Module):
    """A gated layer such as SwiGLU (Shazeer 2020, arXiv 2002.05202), or a plain two-matrix MLP."""

    def __init__(self, config: MLPConfig, *, dim: int, build: Builder, **_: object) -> None:
        super().__init__()
        hidden_dim = config.width(dim)
        self.gate = nn.Linear(dim, hidden_dim, bias=config.bias) if config.is_gated else None
        self.up = nn.Linear(dim, hidden_dim, bias=config.bias)
        self.down = nn.Linear(hidden_dim, dim, bias=config.bias)
        self.activate = make_activation(config, build)

    def forward(self, hidden: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        """``(B, S, D)`` to ``(B, S, D)``; padding is computed along, which changes nothing elsewhere."""
        output: torch.Tensor = self.down(self.raised(hidden))
        return output

    def raised(self, hidden: torch.Tensor) -> torch.Tensor:
        """``(B, S, D)`` to ``(B, S, H)``, what the last product is given."""
        gated = None if self.gate is None else self.gate(hidden)
        return activated(self.activate, self.up(hidden), gated)

    def init_weights(self, rng: Initializer, prefix: str, residual_std: float, std: float) -> None:
        for name, matrix in (("gate", self.gate), ("up", self.up), ("down", self.down)):
            if matrix is None:
                continue
            rng.fill(f"{prefix}{name}.weight", matrix.weight, normal(residual_std if name == "down" else std))
            if matrix.bias is not None:
                rng.fill(f"{prefix}{name}.bias", matrix.bias, zeros)

    def parallel_plan(self) -> dict[str, ShardRole]:
        plan: dict[str, ShardRole] = {"up": "column", "down": "row"}
        return plan if self.gate is None else {"gate": "column", **plan}

    def parameter_roles(self) -> dict[str, ParameterRole]:
        return {name: "bias" if name.endswith("bias") else "matrix" for name, _ in self.named_parameters()}

    def sites(self) -> dict[str, Site]:
        """Same as ``ObservableModule.sites``."""
        dims = ("sample", "position", "neuron")
        return {
            "mlp_pre": Site(module="up" if self.gate is None else "gate", dims=dims),
            "mlp_post": Site(module="down", where="input", dims=dims),
        }

    def active_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters() if parameter.ndim == 2)
