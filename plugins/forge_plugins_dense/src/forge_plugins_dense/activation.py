"""Activations: the function between the products of a feed-forward layer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import attrs
import torch
import torch.nn.functional as F
from torch import nn

from forge_core.contracts.builder import Builder
from forge_core.errors import PluginError
from forge_plugins_dense.activation_config import ActivationConfig
from forge_plugins_dense.feed_forward_config import MLPConfig


class Activation(Protocol):
    """A function of single numbers, or an ``nn.Module`` that is one: what a feature becomes depends on it alone, so
    that ranks may have a part of the features each.

    It has no parameters and buffers, makes no tensor before it is called, and leaves its input as it is.
    """

    def __call__(self, features: torch.Tensor, /) -> torch.Tensor:
        """``(…, F)`` to ``(…, F)``, in the same dtype."""
        ...


class ActivationFactory(Protocol):
    """The signature of the factory that a description names. It is called once for each layer."""

    def __call__(self, config: Any, /) -> Activation:
        """Build an activation."""
        ...


@attrs.frozen
class Clamp:
    """SwiGLU as gpt-oss has it."""

    limit: float
    slope: float

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """``(u + 1) · g · σ(slope · g)`` of the clamped ``gate`` and ``up``, all of one shape."""
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(self.slope * gate))


def _relu2(features: torch.Tensor) -> torch.Tensor:
    """So et al. 2021 (arXiv 2109.08668)."""
    return F.relu(features).square()


FUNCTIONS: Mapping[str, Activation] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": _relu2,
}
"""Those of this package that are functions of one number."""


def _gives(name: str) -> Callable[[ActivationConfig], Activation]:
    return lambda _: FUNCTIONS[name]


silu, gelu, gelu_tanh, relu, relu2 = map(_gives, FUNCTIONS)


def clamped_swiglu(_: ActivationConfig, /, *, activation_limit: float = 7.0, activation_slope: float = 1.702) -> Clamp:
    """The activation ``clamped_swiglu``, which alone is given what ``gate`` and ``up`` give, and keys of the layer."""
    return Clamp(activation_limit, activation_slope)


def make_activation(layer: MLPConfig, build: Builder) -> Activation | Clamp:
    """The activation of a layer.

    Raises:
        PluginError: it has parameters or buffers, which no layer fills or shares out.
    """
    activation = layer.activation
    limits = {"activation_limit": layer.activation_limit, "activation_slope": layer.activation_slope}
    made: Activation | Clamp = build(activation, **limits)
    own = [name for name, _ in (*made.named_parameters(), *made.named_buffers())] if isinstance(made, nn.Module) else []
    if own:
        raise PluginError(
            f"the activation {activation.qualified_name} has {own[0]!r}; activations have no parameters and "
            f"buffers, and feed-forward layers may. This is a bug in {activation.provider}."
        )
    return made


def activated(activate: Activation | Clamp, raised: torch.Tensor, gated: torch.Tensor | None) -> torch.Tensor:
    """The input of the last product, of the shape of each.

    Args:
        raised: the output of ``up``.
        gated: that of ``gate``; ``None``: there is none.
    """
    if isinstance(activate, Clamp):
        assert gated is not None, "its config is refused without a gate"
        return activate(gated, raised)
    return activate(raised) if gated is None else activate(gated) * raised
