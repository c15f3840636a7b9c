"""The norms a block can have."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from forge_core.contracts.model import Initializer, ParameterRole
from forge_plugins_dense.config import NormName
from forge_plugins_dense.initial_values import ones, zeros


class ZeroCenteredRMSNorm(nn.Module):
    """RMSNorm that multiplies by ``1 + weight`` (Gemma), in fp32 whatever the input's dtype."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``(…, D)`` to ``(…, D)``."""
        return F.rms_norm(hidden.float(), self.weight.shape, 1 + self.weight.float(), self.eps).to(hidden.dtype)


def make_norm(name: NormName, dim: int, eps: float) -> nn.Module:
    """A norm over the last dimension. All compute in fp32 whatever the input's dtype, and cast once, after the
    multiplication by the weight."""
    if name == "zero_centered_rmsnorm":
        return ZeroCenteredRMSNorm(dim, eps)
    return nn.RMSNorm(dim, eps=eps) if name == "rmsnorm" else nn.LayerNorm(dim, eps=eps)


def init_norm(norm: nn.Module, rng: Initializer, prefix: str) -> None:
    """Fill the norm so that it only normalises; ``prefix`` is its qualified name with a final dot."""
    for name, parameter in norm.named_parameters():
        is_zero = name == "bias" or isinstance(norm, ZeroCenteredRMSNorm)
        rng.fill(prefix + name, parameter, zeros if is_zero else ones)


def norm_roles(norm: nn.Module, prefix: str) -> dict[str, ParameterRole]:
    """Roles of the norm's parameters by qualified name."""
    return {prefix + name: "bias" if name == "bias" else "norm" for name, _ in norm.named_parameters()}
