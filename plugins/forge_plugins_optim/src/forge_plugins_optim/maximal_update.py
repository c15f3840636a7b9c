"""Parametrizations under which learning rates found with a small model hold for a large one."""

from __future__ import annotations

from math import sqrt

import attrs

from forge_core.contracts.optimizer import UpdateSize
from forge_core.contracts.parametrization import (
    ModelFactors,
    ModelSize,
    Parametrization,
    RateFactors,
    SizedParameter,
)
from forge_core.errors import ConfigError, nearest_hint
from forge_plugins_optim.parametrization_config import CompletePConfig, MupConfig, StandardConfig

_HIDDEN = ("matrix", "expert")
"""Roles of parameters with two dimensions that grow."""
_OUTER = ("embedding", "head", "norm", "bias")
"""Roles of those with one that grows."""


class Standard(Parametrization):
    """The model's own initial values, and one rate for all."""

    def __init__(self, config: StandardConfig, /) -> None: ...

    def model(self, size: ModelSize, base: ModelSize) -> ModelFactors:
        return ModelFactors()

    def initial_scale(self, parameter: SizedParameter) -> float:
        return 1.0

    def rates(self, parameter: SizedParameter, update_size: UpdateSize | None) -> RateFactors:
        return RateFactors()


class MaximalUpdate(Parametrization):
    """µP (Yang et al., 2022, https://arxiv.org/abs/2203.03466, table 8, with the head's factor as a multiplier).

    With ``a`` the width of a parameter's input over that in the base model, and ``m`` that of the residual stream::

                             matrices, experts    embedding, head, norms, biases
        initial values       1 / √a               1
        lr, ``element``      1 / a                1
        lr, ``orthogonal``   1 / √a               1
        lr, ``spectral``     1                    1
        lr, ``parameter``    1 / √a               1
        lr, ``gradient``     out's growth / a     m
        eps, ``element``     1 / m                1 / m

    Logits are multiplied by ``1 / m``, and those of attention by ``1 / √(growth of head_size)``, which makes them
    ``q · k / head_size``. The decay is divided by the factor on the rate, so that ``lr · weight_decay`` stays.
    """

    def __init__(self, config: MupConfig | CompletePConfig, /) -> None: ...

    def model(self, size: ModelSize, base: ModelSize) -> ModelFactors:
        return ModelFactors(output=base.dim / size.dim, attention=sqrt(base.head_size / size.head_size))

    def initial_scale(self, parameter: SizedParameter) -> float:
        _refuse_unknown(parameter)
        return 1 / sqrt(_growth(parameter, -1)) if parameter.role in _HIDDEN else 1.0

    def rates(self, parameter: SizedParameter, update_size: UpdateSize | None) -> RateFactors:
        _refuse_unknown(parameter)
        lr = self._rate(parameter, update_size)
        eps = parameter.base.dim / parameter.size.dim if update_size == "element" else 1.0
        return RateFactors(lr=lr, weight_decay=1 / lr, eps=eps)

    def _rate(self, parameter: SizedParameter, update_size: UpdateSize | None) -> float:
        is_hidden = parameter.role in _HIDDEN
        growth = _growth(parameter, -1)
        match update_size:
            case "element":
                return 1 / growth if is_hidden else 1.0
            case "orthogonal" | "parameter":
                return 1 / sqrt(growth) if is_hidden else 1.0
            case "spectral":
                return 1.0
            case "gradient":
                return _growth(parameter, -2) / growth if is_hidden else growth
        raise ConfigError(
            "parametrization: the optimizer does not say how large its updates are (update_size), so that no rule for "
            "its rates is known; choose another, or the parametrization 'standard'"
        )


class CompleteP(MaximalUpdate):
    """CompleteP (Dey et al., 2025, https://arxiv.org/abs/2505.01618, table 1, α = 1): µP, and depth.

    With ``d`` the number of layers over that of the base model, what each layer adds to the residual stream is
    multiplied by ``1 / d``; within blocks, ``eps`` is divided by ``d``, and rates of ``gradient`` are multiplied by it.
    Initial values depend on the layers of the base model.
    """

    def model(self, size: ModelSize, base: ModelSize) -> ModelFactors:
        return attrs.evolve(
            super().model(size, base), residual=base.n_layers / size.n_layers, init_layers=base.n_layers
        )

    def rates(self, parameter: SizedParameter, update_size: UpdateSize | None) -> RateFactors:
        factors = super().rates(parameter, update_size)
        if not parameter.is_in_block:
            return factors
        depth = parameter.size.n_layers / parameter.base.n_layers
        if update_size == "gradient":
            return attrs.evolve(factors, lr=factors.lr * depth, weight_decay=factors.weight_decay / depth)
        return attrs.evolve(factors, eps=factors.eps / depth) if update_size == "element" else factors


def _growth(parameter: SizedParameter, dim: int) -> float:
    return parameter.shape[dim] / parameter.base_shape[dim]


def _refuse_unknown(parameter: SizedParameter) -> None:
    known = (*_HIDDEN, *_OUTER)
    if parameter.role not in known:
        raise ConfigError(
            f"parametrization: {parameter.name} has the role {parameter.role!r}, for which there is no rule; known are "
            f"{', '.join(known)}{nearest_hint(parameter.role, known)}"
        )
