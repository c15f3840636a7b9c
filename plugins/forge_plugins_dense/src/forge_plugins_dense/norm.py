"""The norms a block can have."""

from __future__ import annotations

from torch import nn

from forge_core.contracts.model import Initializer, ParameterRole
from forge_plugins_dense.config import NormName
from forge_plugins_dense.initial_values import ones, zeros


def make_norm(name: NormName, dim: int, eps: float) -> nn.Module:
    """A norm over the last dimension. PyTorch computes both in fp32 whatever the input's dtype, and casts once, after
    the multiplication by the weight."""
    return nn.RMSNorm(dim, eps=eps) if name == "rmsnorm" else nn.LayerNorm(dim, eps=eps)


def init_norm(norm: nn.Module, rng: Initializer, prefix: str) -> None:
    """Fill the norm so that it only normalises; ``prefix`` is its qualified name with a final dot."""
    for name, parameter in norm.named_parameters():
        rng.fill(prefix + name, parameter, zeros if name == "bias" else ones)


def norm_roles(norm: nn.Module, prefix: str) -> dict[str, ParameterRole]:
    """Roles of the norm's parameters by qualified name."""
    return {prefix + name: "bias" if name == "bias" else "norm" for name, _ in norm.named_parameters()}
