"""Parametrizations: how initial values, learning rates and multipliers follow from the size of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import attrs

if TYPE_CHECKING:
    import torch

    from forge_core.contracts.model import ParameterRole
    from forge_core.contracts.optimizer import UpdateSize


@attrs.frozen(kw_only=True)
class ParametrizationConfig:
    """The keys of a parametrization that compares a model with a base. Config classes may extend this one."""

    base: Mapping[str, Any]
    """Keys of ``[model]`` with their values in the base model, for which the rates of the job were chosen: ``{ dim = 64
    }``. Keys that are not named are as in the model."""


MODEL_KEYS = (
    "dim",
    "n_layers",
    "head_size",
    "output_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "init_layers",
)
"""The names of ``ModelConfig`` that a model's config needs for a parametrization."""


@attrs.frozen(kw_only=True)
class ModelSize:
    """Numbers of a model's config (``ModelConfig``)."""

    dim: int
    n_layers: int
    head_size: int


@attrs.frozen(kw_only=True)
class ModelFactors:
    """Changes of the model, by keys of its config (``ModelConfig``)."""

    output: float = 1.0
    """Factor on ``output_multiplier``."""
    residual: float = 1.0
    """Factor on ``residual_multiplier``."""
    attention: float = 1.0
    """Factor on ``attention_multiplier``."""
    init_layers: int | None = None
    """The value of ``init_layers``; ``None`` leaves it."""


@attrs.frozen(kw_only=True)
class SizedParameter:
    """A parameter, and the one of the base model that it grew from."""

    name: str
    role: ParameterRole
    shape: torch.Size
    """The whole parameter's: ``(out, in)`` of a matrix, ``(E, out, in)`` of a stack of experts."""
    base_shape: torch.Size
    """The base parameter's, of as many dimensions."""
    size: ModelSize
    base: ModelSize

    @property
    def is_in_block(self) -> bool:
        """Return whether it belongs to one of the repeated blocks."""
        return self.name.startswith("blocks.")


@attrs.frozen(kw_only=True)
class RateFactors:
    """Factors on what an optimizer's group has under these names."""

    lr: float = 1.0
    weight_decay: float = 1.0
    eps: float = 1.0


class Parametrization(ABC):
    """Base class. At the size of the base model, all factors are 1."""

    @abstractmethod
    def model(self, size: ModelSize, base: ModelSize) -> ModelFactors:
        """The factors of a model of this size."""

    @abstractmethod
    def initial_scale(self, parameter: SizedParameter) -> float:
        """The factor on the initial values of a parameter, after what the model's ``init_weights`` gives it."""

    @abstractmethod
    def rates(self, parameter: SizedParameter, update_size: UpdateSize | None) -> RateFactors:
        """The factors on the learning rate of a parameter, and what goes with it.

        Args:
            update_size: what the optimizer says of itself.

        Raises:
            ConfigError: there is no rule for this optimizer, or for the parameter's role.
        """


class ParametrizationFactory(Protocol):
    """The signature of the factory that a description names."""

    def __call__(self, config: Any, /) -> Parametrization:
        """Build the parametrization.

        Args:
            config: one with ``base`` is told about that model (``ParametrizationConfig``); without, the base is the
                model itself.
        """
