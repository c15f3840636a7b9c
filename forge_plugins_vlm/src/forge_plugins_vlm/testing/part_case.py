"""What the conformance classes of encoders and connectors share."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar

import torch

from forge_core.contracts.model import PARAMETER_ROLES
from forge_core.train.initialisation import SeededInitializer
from forge_testing.component_case import ComponentCase
from forge_testing.module_state import assert_initialised, build_on_meta, materialise, snapshot


class PartConformance(ComponentCase):
    """Checks of a module that fills itself by ``init_weights(rng, prefix)`` and names the roles of its parameters."""

    prefix: ClassVar[str] = "vision."
    further_roles: ClassVar[Collection[str]] = ()
    """Roles of parameters that the package brings, beside those of ``forge_core.contracts.model``."""

    def given(self) -> dict[str, Any]:
        """Keywords that the factory is given."""
        return {}

    def build_part(self, seed: int = 0) -> Any:  # an nn.Module with more, which a Protocol cannot say
        """Build on meta, materialise and initialise, as the engine does."""
        part = self._uninitialised()
        part.init_weights(SeededInitializer(seed), self.prefix)
        return part

    def test_init_weights_fills_everything(self) -> None:
        part = self._uninitialised()
        rng = SeededInitializer(0)
        part.init_weights(rng, self.prefix)

        assert_initialised(part, rng, self.prefix)

    def test_same_seed_same_weights(self) -> None:
        torch.manual_seed(1)
        first = snapshot(self.build_part())
        torch.manual_seed(2)
        second = snapshot(self.build_part())

        for name in first:
            assert torch.equal(first[name], second[name]), (
                f"{name} differs between two modules of one seed; init_weights must use the generator that it is given"
            )

    def test_parameter_roles_cover_every_parameter(self) -> None:
        part = self._uninitialised()
        roles, actual = part.parameter_roles(), {name for name, _ in part.named_parameters()}

        forgotten, unknown = sorted(actual - set(roles)), sorted(set(roles) - actual)
        assert not forgotten, f"parameter_roles leaves out {', '.join(forgotten)}"
        assert not unknown, f"parameter_roles names {', '.join(unknown)}, which the module does not have"
        for name, role in roles.items():
            assert role in (*PARAMETER_ROLES, *self.further_roles), f"{name} has the unknown role {role!r}"

    def _uninitialised(self) -> Any:
        part = build_on_meta(lambda: self.make(**self.given()))
        materialise(part)
        return part
