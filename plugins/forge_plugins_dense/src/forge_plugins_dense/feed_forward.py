"""The dense feed-forward layer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import attrs
import torch
import torch.nn.functional as F
from torch import nn

from forge_core.contracts.model import Initializer, ParameterRole, ShardRole
from forge_core.contracts.observation import Site
from forge_plugins_dense.feed_forward_config import MLPConfig
from forge_plugins_dense.initial_values import normal, zeros


@attrs.frozen
class Clamp:
    """SwiGLU as gpt-oss has it."""

    limit: float
    slope: float

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """``(u + 1) · g · σ(slope · g)`` of the clamped ``gate`` and ``up``, all of one shape."""
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(self.slope * gate))


class MLP(nn.Module):
    """A gated layer such as SwiGLU (Shazeer 2020, arXiv 2002.05202), or a plain two-matrix MLP."""

    def __init__(self, config: MLPConfig, *, dim: int, **_: object) -> None:
        super().__init__()
        hidden_dim = config.width(dim)
        self.gate = nn.Linear(dim, hidden_dim, bias=config.bias) if config.is_gated else None
        self.up = nn.Linear(dim, hidden_dim, bias=config.bias)
        self.down = nn.Linear(hidden_dim, dim, bias=config.bias)
        self.activation = config.activation
        is_clamped = config.activation == "clamped_swiglu"
        self.clamp = Clamp(config.activation_limit, config.activation_slope) if is_clamped else None

    def forward(self, hidden: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        """``(B, S, D)`` to ``(B, S, D)``; padding is computed along, which changes nothing elsewhere."""
        output: torch.Tensor = self.down(self.raised(hidden))
        return output

    def raised(self, hidden: torch.Tensor) -> torch.Tensor:
        """``(B, S, D)`` to ``(B, S, H)``, what the last product is given."""
        if self.gate is not None and self.clamp is not None:
            return self.clamp(self.gate(hidden), self.up(hidden))
        activate = _ACTIVATIONS[self.activation]
        if self.gate is not None:
            raised: torch.Tensor = activate(self.gate(hidden)) * self.up(hidden)
            return raised
        return activate(self.up(hidden))

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


def _relu2(x: torch.Tensor) -> torch.Tensor:
    """So et al. 2021 (arXiv 2109.08668)."""
    return F.relu(x).square()


_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": _relu2,
}
