"""Conformance of parametrizations (contract: ``forge_core.contracts.parametrization``)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar, get_args

import attrs
import torch

from forge_core.contracts.optimizer import UpdateSize
from forge_core.contracts.parametrization import ModelFactors, ModelSize, RateFactors, SizedParameter
from forge_core.errors import ConfigError
from forge_testing.component_case import ComponentCase

_BASE = ModelSize(dim=64, n_layers=2, head_size=16)
_SHAPES = {
    "embed.weight": ("embedding", (257, 64), (0, 1)),
    "blocks.0.norm.weight": ("norm", (64,), (1,)),
    "blocks.0.attention.q.weight": ("matrix", (64, 64), (1, 1)),
    "blocks.0.attention.q.bias": ("bias", (64,), (1,)),
    "blocks.0.experts.up": ("expert", (4, 128, 64), (0, 1, 1)),
    "norm.weight": ("norm", (64,), (1,)),
    "head.weight": ("head", (257, 64), (0, 1)),
}
"""Parameters of a decoder: role, shape in the base model, and which dimensions grow."""


class ParametrizationConformance(ComponentCase):
    """Subclass it, name the component, and pytest runs every check below on it."""

    kind = "parametrization"
    config: ClassVar[dict[str, Any]] = {}
    growths: ClassVar[tuple[tuple[int, int], ...]] = ((1, 1), (2, 1), (8, 1), (1, 4), (4, 4))
    """How many times as wide and as deep as the base model."""

    def test_changes_nothing_at_the_size_of_the_base(self) -> None:
        one = self.make()

        factors = one.model(_BASE, _BASE)
        assert factors in (ModelFactors(), ModelFactors(init_layers=_BASE.n_layers)), (
            f"a model of the base's size is changed: {factors}; rates found there would not hold"
        )
        for parameter in self._parameters(1, 1):
            scale = one.initial_scale(parameter)
            assert scale == 1, f"{parameter.name} begins {scale} times as large in a model of the base's size"
            for update_size, rates in self._rates(one, parameter):
                assert rates == RateFactors(), (
                    f"{parameter.name} has {rates} in a model of the base's size, with updates of {update_size!r}"
                )

    def test_every_factor_is_positive_and_finite(self) -> None:
        one = self.make()

        for width, depth in self.growths:
            what = f"{width} times as wide and {depth} times as deep"
            factors = one.model(self._size(width, depth), _BASE)
            for key in ("output", "residual", "attention"):
                self._check(getattr(factors, key), f"{key} of a model {what}")
            for parameter in self._parameters(width, depth):
                self._check(one.initial_scale(parameter), f"the initial scale of {parameter.name}, {what}")
                for _, rates in self._rates(one, parameter):
                    for key, factor in attrs.asdict(rates).items():
                        self._check(factor, f"{key} of {parameter.name}, {what}")

    def test_has_a_rule_for_updates_of_elements(self) -> None:
        one = self.make()

        for parameter in self._parameters(2, 2):
            try:
                one.rates(parameter, "element")
            except ConfigError as error:
                raise AssertionError(f"{parameter.name} has no rule for AdamW and its like: {error}") from error

    def test_depends_on_what_it_is_given_only(self) -> None:
        first, second = self.make(), self.make()

        for width, depth in (*self.growths, *reversed(self.growths)):
            for parameter in self._parameters(width, depth):
                again = [(one.initial_scale(parameter), [*self._rates(one, parameter)]) for one in (first, second)]
                assert again[0] == again[1], (
                    f"{parameter.name} is given {again[0]} by one and {again[1]} by another of the same configuration; "
                    "nothing of a parametrization is saved"
                )

    def _check(self, factor: float, what: str) -> None:
        assert isinstance(factor, (int, float)), f"{what} must be a float, got {type(factor).__name__}"
        assert math.isfinite(factor), f"{what} is {factor}"
        assert factor > 0, f"{what} is {factor}, and must be above 0"

    def _rates(self, one: Any, parameter: SizedParameter) -> Iterator[tuple[UpdateSize, RateFactors]]:
        for update_size in get_args(UpdateSize):
            try:
                yield update_size, one.rates(parameter, update_size)
            except ConfigError:
                continue  # it has no rule for these

    def _size(self, width: int, depth: int) -> ModelSize:
        return ModelSize(dim=_BASE.dim * width, n_layers=_BASE.n_layers * depth, head_size=_BASE.head_size * width)

    def _parameters(self, width: int, depth: int) -> Iterator[SizedParameter]:
        for name, (role, shape, grows) in _SHAPES.items():
            grown = [n * width if is_growing else n for n, is_growing in zip(shape, grows, strict=True)]
            yield SizedParameter(
                name=name,
                role=role,
                shape=torch.Size(grown),
                base_shape=torch.Size(shape),
                size=self._size(width, depth),
                base=_BASE,
            )
