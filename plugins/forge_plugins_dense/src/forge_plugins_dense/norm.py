"""The norms a block can have."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from forge_core.contracts.model import Initializer, ParameterRole
from forge_plugins_dense.config import NormName
from forge_plugins_dense.initial_values import ones, zeros


class ZeroCenteredRMSNorm(nn.Module):
    """RMSNorm that multiplies by ``1 + weight`` (Gemma), in fp32 for inputs of any dtype."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``(…, D)`` to ``(…, D)``."""
        return F.rms_norm(hidden.float(), self.weight.shape, 1 + self.weight.float(), self.eps).to(hidden.dtype)


class NormOverHeads(nn.Module):
    """RMSNorm over the features of all heads of a position (OLMo 2), which may be on several ranks; its role in a
    parallel plan is ``column``.

    Args:
        dim: features of all heads.
        zero_centered: whether to multiply by ``1 + weight``, as ``ZeroCenteredRMSNorm`` does.
    """

    def __init__(self, dim: int, eps: float, *, zero_centered: bool) -> None:
        super().__init__()
        self.out_features = dim
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps, self.zero_centered = eps, zero_centered

    def forward(self, hidden: torch.Tensor, *, mean_square: torch.Tensor | None = None) -> torch.Tensor:
        """``(…, features)`` to the same, of all heads or of this rank's.

        Args:
            mean_square: ``(…, 1)`` fp32, over the features of all ranks; ``None``: they are all here.
        """
        if mean_square is None:
            if self.zero_centered:
                return F.rms_norm(hidden.float(), self.weight.shape, 1 + self.weight.float(), self.eps).to(hidden.dtype)
            return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
        weight = self.weight.float() + self.zero_centered
        return (hidden.float() * torch.rsqrt(mean_square + self.eps) * weight).to(hidden.dtype)


def make_norm(name: NormName, dim: int, eps: float) -> nn.Module:
    """A norm over the last dimension. All compute in fp32 for inputs of any dtype, and cast once, after the
    multiplication by the weight."""
    if name == "zero_centered_rmsnorm":
        return ZeroCenteredRMSNorm(dim, eps)
    return nn.RMSNorm(dim, eps=eps) if name == "rmsnorm" else nn.LayerNorm(dim, eps=eps)


def init_norm(norm: nn.Module, rng: Initializer, prefix: str) -> None:
    """Fill the norm so that it only normalises; ``prefix`` is its qualified name with a final dot."""
    for name, parameter in norm.named_parameters():
        is_zero = name == "bias" or isinstance(norm, ZeroCenteredRMSNorm) or getattr(norm, "zero_centered", False)
        rng.fill(prefix + name, parameter, zeros if is_zero else ones)


def norm_roles(norm: nn.Module, prefix: str) -> dict[str, ParameterRole]:
    """Roles of the norm's parameters by qualified name."""
    return {prefix + name: "bias" if name == "bias" else "norm" for name, _ in norm.named_parameters()}
