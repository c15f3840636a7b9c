"""The keys of parametrizations. Nothing here may import torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from forge_core.config.describe import literal
from forge_core.contracts.parametrization import ParametrizationConfig


@attrs.frozen(kw_only=True)
class StandardConfig:
    """The model's own initial values and one rate for all parameters: no keys."""


def _names(*keys: str) -> Callable[[object, attrs.Attribute[Any], Mapping[str, Any]], None]:
    def validate(_: object, __: attrs.Attribute[Any], base: Mapping[str, Any]) -> None:
        for key in keys:
            if key not in base:
                raise ValueError(f"must have {key}, that of the model whose rates the job has; got {literal(base)}")

    return validate


@attrs.frozen(kw_only=True)
class MupConfig(ParametrizationConfig):
    """µP: rates that were found with a narrow model, for a wide one (Yang et al., 2022,
    https://arxiv.org/abs/2203.03466)."""

    base: Mapping[str, Any] = attrs.field(validator=_names("dim"))
    """The base model, by the keys of ``[model]`` that differ: ``{ dim = 64 }``. The width must be among them, as it is
    where rates were found."""


@attrs.frozen(kw_only=True)
class CompletePConfig(ParametrizationConfig):
    """CompleteP: the same for models that are also deeper (Dey et al., 2025, https://arxiv.org/abs/2505.01618)."""

    base: Mapping[str, Any] = attrs.field(validator=_names("dim", "n_layers"))
    """The base model, by the keys of ``[model]`` that differ: ``{ dim = 64, n_layers = 4 }``. Width and depth must be
    among them, as they are where rates were found."""
