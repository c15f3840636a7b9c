"""Conformance of norms (contract: ``forge_plugins_dense.norm``)."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import nn

from forge_core.contracts.model import PARAMETER_ROLES
from forge_core.train.build import cast_parameters
from forge_core.train.initialisation import SeededInitializer
from forge_plugins_dense.norm import init_norm, norm_roles
from forge_testing.component_case import ComponentCase
from forge_testing.module_state import (
    assert_forward_is_pure,
    assert_gradients_everywhere,
    assert_initialised,
    build_on_meta,
    materialise,
    snapshot,
)

_PREFIX = "blocks.0.attention_norm."


class NormConformance(ComponentCase):
    """Subclass it, name the component, and pytest runs every check below on it."""

    kind = "norm"
    dim: ClassVar[int] = 16

    def build_norm(self) -> nn.Module:
        """Build on meta, materialise and initialise, as the engine does."""
        norm = self._uninitialised()
        init_norm(norm, SeededInitializer(0), _PREFIX)
        return norm

    def test_init_weights_fills_everything(self) -> None:
        norm, rng = self._uninitialised(), SeededInitializer(0)
        init_norm(norm, rng, _PREFIX)

        assert_initialised(norm, rng, _PREFIX)

    def test_parameter_roles_cover_every_parameter(self) -> None:
        norm = self._uninitialised()
        roles, actual = norm_roles(norm, ""), {name for name, _ in norm.named_parameters()}

        assert roles.keys() == actual, f"parameter_roles names {sorted(roles)}, and the norm has {sorted(actual)}"
        unknown = set(roles.values()) - set(PARAMETER_ROLES)
        assert not unknown, f"parameter_roles has roles that are not known: {sorted(unknown)}"

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    @pytest.mark.parametrize("shape", [(1, 1), (2, 7), (2, 7, 3)], ids=["one", "positions", "heads"])
    def test_keeps_shape_and_dtype(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        hidden = _hidden(*shape, self.dim).to(dtype)

        normed = cast_parameters(self.build_norm(), dtype)(hidden)

        assert normed.shape == hidden.shape, (
            f"the output must have the shape of the hidden states {tuple(hidden.shape)}, got {tuple(normed.shape)}"
        )
        assert normed.dtype == dtype, f"the output must keep the dtype of the hidden states {dtype}, got {normed.dtype}"
        assert torch.isfinite(normed).all(), "the output has values that are not finite"

    @pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
    def test_positions_are_independent(self, training: bool) -> None:
        norm, hidden = self.build_norm().train(training), _hidden(2, 8, self.dim)
        other = hidden.clone()
        other[0, 3] += 1 + torch.arange(self.dim)

        difference = (norm(other) - norm(hidden)).abs().amax(dim=-1)

        moved = [tuple(place) for place in (difference > 1e-5).nonzero().tolist()]
        assert moved == [(0, 3)], f"changing the hidden state at (0, 3) changes the output at {moved}"

    def test_gradients_are_finite_and_reach_every_parameter(self) -> None:
        """Also those of a position whose hidden state is all zeros."""
        norm, hidden = self.build_norm().train(), _hidden(4, 16, self.dim)
        hidden[0, 0] = 0
        hidden.requires_grad_()

        torch.autograd.backward((norm(hidden) - _hidden(4, 16, self.dim).flip(0)).square().sum())

        assert hidden.grad is not None, "no gradient reaches the hidden states"
        assert torch.isfinite(hidden.grad).all(), "the gradient of the hidden states has values that are not finite"
        assert_gradients_everywhere(norm)

    def test_forward_changes_only_accumulators(self) -> None:
        norm = self.build_norm().train()
        before = snapshot(norm)

        torch.autograd.backward(norm(_hidden(2, 8, self.dim).requires_grad_()).sum())

        assert_forward_is_pure(before, norm)

    def _uninitialised(self) -> nn.Module:
        norm = build_on_meta(lambda: self.make(dim=self.dim, eps=1e-5))
        materialise(norm)
        return norm


def _hidden(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))
