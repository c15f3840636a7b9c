"""The parametrization of a run, applied: the model's multipliers, initial values, and the rates of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import nn

from forge_core.config.builder import ComponentBuilder
from forge_core.config.sections import Job
from forge_core.contracts.component_ref import ComponentRef
from forge_core.contracts.model import ParameterRole
from forge_core.contracts.parametrization import ModelSize, Parametrization, RateFactors, SizedParameter
from forge_core.errors import ConfigError
from forge_core.job import base_model
from forge_core.train.parameter_groups import members_of, split_groups


def with_multipliers(job: Job, build: ComponentBuilder) -> ComponentRef:
    """The model of a job, with the multipliers that its parametrization gives it."""
    if job.parametrization is None:
        return job.model
    parametrization: Parametrization = build(job.parametrization)
    factors = parametrization.model(_size(job.model), _size(base_model(job, build.resolve)))
    config: Any = job.model.config
    changes = {
        "output_multiplier": config.output_multiplier * factors.output,
        "residual_multiplier": config.residual_multiplier * factors.residual,
        "attention_multiplier": config.attention_multiplier * factors.attention,
        "init_layers": config.init_layers if factors.init_layers is None else factors.init_layers,
    }
    return attrs.evolve(job.model, config=attrs.evolve(config, **changes))


class SizedParameters:
    """The parameters of a model beside those of its base model, for a parametrization.

    Args:
        model: the whole model, on meta.

    Raises:
        ConfigError: a parameter has no counterpart in the base model.
    """

    def __init__(
        self, job: Job, build: ComponentBuilder, roles: Mapping[str, ParameterRole], model: nn.Module, vocab_size: int
    ) -> None:
        assert job.parametrization is not None, "without one there is nothing to apply"
        self._parametrization: Parametrization = build(job.parametrization)
        use = base_model(job, build.resolve)
        with torch.device("meta"):
            base_shapes = {name: one.shape for name, one in build(use, vocab_size=vocab_size).named_parameters()}
        like = {_in_any_block(name): shape for name, shape in base_shapes.items()}
        self._parameters = {}
        for name, parameter in model.named_parameters():
            base_shape = base_shapes.get(name, like.get(_in_any_block(name)))
            if base_shape is None or len(base_shape) != parameter.ndim:
                raise ConfigError(f"parametrization.base: the base model has nothing like {name} of this model")
            self._parameters[name] = SizedParameter(
                name=name,
                role=roles[name],
                shape=parameter.shape,
                base_shape=base_shape,
                size=_size(job.model),
                base=_size(use),
            )

    def initial_scales(self) -> dict[str, float]:
        """The factor on each parameter's initial values."""
        return {name: self._parametrization.initial_scale(one) for name, one in self._parameters.items()}

    def scale_rates(self, optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> None:
        """Split the groups of an optimizer, and scale what they have.

        Args:
            names: of this rank's parameters.

        Raises:
            ConfigError: there is no rule for this optimizer or a parameter.
        """
        factors: dict[nn.Parameter, RateFactors] = {}
        for member in members_of(optimizer):
            update_size = getattr(member, "update_size", None)
            for group in member.param_groups:
                for parameter in group["params"]:
                    sized = self._parameters[names[parameter]]
                    factors[parameter] = self._parametrization.rates(sized, update_size)
        split_groups(optimizer, factors.__getitem__)
        for group in optimizer.param_groups:
            for key, factor in attrs.asdict(factors[group["params"][0]]).items() if group["params"] else ():
                if key in group and factor != 1:
                    group[key] *= factor


def _size(use: ComponentRef) -> ModelSize:
    config: Any = use.config
    return ModelSize(dim=config.dim, n_layers=config.n_layers, head_size=config.head_size)


def _in_any_block(name: str) -> str:
    """The name without the number of its block: ``blocks.*.attention.q.weight``."""
    first, _, rest = name.partition(".")
    return f"{first}.*.{rest.partition('.')[2]}" if first == "blocks" else name
