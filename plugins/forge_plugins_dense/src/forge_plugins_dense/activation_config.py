"""The choice of an activation. Nothing here imports torch."""

from __future__ import annotations

from typing import ClassVar

import attrs

from forge_core.api import ComponentRef
from forge_plugins_dense.own_component import own_component


@attrs.frozen(kw_only=True)
class ActivationConfig:
    """Base class of the configs of activations, with what a layer asks them. A config that is not derived from it
    counts as this class."""

    gated_by_default: ClassVar[bool] = False
    """A layer that does not say has a gate."""


@attrs.frozen(kw_only=True)
class GatedActivationConfig(ActivationConfig):
    """An activation of gates."""

    gated_by_default: ClassVar[bool] = True


OWN: dict[str, type[ActivationConfig]] = {
    "silu": GatedActivationConfig,
    **dict.fromkeys(("gelu", "gelu_tanh", "relu", "relu2"), ActivationConfig),
    "clamped_swiglu": GatedActivationConfig,
}
"""The activations of this package, with the classes of their configs."""


def as_activation(activation: ComponentRef | str) -> ComponentRef:
    """A choice of activation, which may be given as the name of one of this package.

    Raises:
        ValueError: it has none of this name.
    """
    return own_component("activation", activation, OWN)


SILU, CLAMPED_SWIGLU = map(as_activation, ("silu", "clamped_swiglu"))
