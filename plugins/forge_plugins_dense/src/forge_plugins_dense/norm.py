"""Norms: what a block does to the hidden states that its layers read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from forge_core.contracts.builder import Builder
from forge_core.contracts.component_ref import ComponentRef
from forge_core.contracts.model import Initializer, ParameterRole
from forge_core.errors import ConfigError
from forge_plugins_dense.initial_values import ones, zeros
from forge_plugins_dense.norm_config import RMSNORM, NormConfig, as_norm


class Norm(Protocol):
    """An ``nn.Module`` that maps ``(…, D)`` to ``(…, D)``: what a position gets depends on it alone, so that ranks may
    have a part of the positions each.

    It may have the two methods below. Without ``init_weights`` it has no buffers, and each parameter begins with ones,
    one named ``bias`` with zeros; without ``parameter_roles``, ``bias`` has the role ``bias``, the others ``norm``.
    """

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``(…, D)`` in the dtype of ``hidden``; what is in between is best computed in fp32."""
        ...

    def init_weights(self, rng: Initializer, prefix: str) -> None:
        """Fill every parameter and buffer; ``prefix`` is the norm's qualified name with a final dot."""
        ...

    def parameter_roles(self) -> Mapping[str, ParameterRole]:
        """Same as ``FeedForward.parameter_roles``."""
        ...


class NormFactory(Protocol):
    """The signature of the factory that a description names."""

    def __call__(self, config: Any, /, *, dim: int, eps: float, build: Builder) -> nn.Module:
        """Build a norm.

        Args:
            dim: features of a position; of a head, if it is for queries or keys.
            eps: the model's ``norm_eps``.
        """
        ...


def rmsnorm(_: NormConfig, /, *, dim: int, eps: float) -> nn.Module:
    """The norm ``rmsnorm`` (Zhang and Sennrich 2019, arXiv 1910.07467). Like the next two, it computes in fp32 for
    inputs of any dtype, and casts once, after the multiplication by the weight."""
    return nn.RMSNorm(dim, eps=eps)


def layernorm(_: NormConfig, /, *, dim: int, eps: float) -> nn.Module:
    """The norm ``layernorm``."""
    return nn.LayerNorm(dim, eps=eps)


def zero_centered_rmsnorm(_: NormConfig, /, *, dim: int, eps: float) -> nn.Module:
    """The norm ``zero_centered_rmsnorm``."""
    return ZeroCenteredRMSNorm(dim, eps)


class ZeroCenteredRMSNorm(nn.Module):
    """RMSNorm that multiplies by ``1 + weight`` (Gemma), in fp32 for inputs of any dtype."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``(…, D)`` to ``(…, D)``."""
        return F.rms_norm(hidden.float(), self.weight.shape, 1 + self.weight.float(), self.eps).to(hidden.dtype)

    def init_weights(self, rng: Initializer, prefix: str) -> None:
        """Same as ``Norm.init_weights``."""
        rng.fill(f"{prefix}weight", self.weight, zeros)


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

    def init_weights(self, rng: Initializer, prefix: str) -> None:
        """Same as ``Norm.init_weights``."""
        rng.fill(f"{prefix}weight", self.weight, zeros if self.zero_centered else ones)


_OWN = {factory.__name__: factory for factory in (rmsnorm, layernorm, zero_centered_rmsnorm)}


def make_norm(norm: ComponentRef | str, dim: int, eps: float, build: Builder | None = None) -> nn.Module:
    """A norm over the last dimension, of ``dim`` features.

    Args:
        norm: the decoder's choice, or the name of a norm of this package.
        build: makes norms of any package; without it, only those of this one are made.

    Raises:
        ConfigError: it is of another package, and there is no ``build``.
    """
    use = as_norm(norm)
    if build is not None:
        module: nn.Module = build(use, dim=dim, eps=eps)
        return module
    if use.provider != RMSNORM.provider:
        raise ConfigError(f'norm = "{use.qualified_name}": this layer was made without the builder of its model')
    return _OWN[use.name](use.config, dim=dim, eps=eps)


def init_norm(norm: nn.Module, rng: Initializer, prefix: str) -> None:
    """Fill the norm, as it says itself or so that it only normalises; ``prefix`` is its qualified name with a final
    dot."""
    fill = getattr(norm, "init_weights", None)
    if fill is not None:
        fill(rng, prefix)
        return
    for name, parameter in norm.named_parameters():
        rng.fill(prefix + name, parameter, zeros if name == "bias" else ones)


def norm_roles(norm: nn.Module, prefix: str) -> dict[str, ParameterRole]:
    """Roles of the norm's parameters by qualified name."""
    own = getattr(norm, "parameter_roles", None)
    if own is not None:
        return {prefix + name: role for name, role in own().items()}
    return {prefix + name: "bias" if name == "bias" else "norm" for name, _ in norm.named_parameters()}
