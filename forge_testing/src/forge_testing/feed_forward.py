"""Conformance of feed-forward layers (contract: ``forge_core.contracts.feed_forward``)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar

import pytest
import torch

from forge_core.contracts.model import PARAMETER_ROLES, SHARD_ROLES
from forge_core.train.build import cast_parameters
from forge_core.train.initialisation import SeededInitializer
from forge_testing.component_case import ComponentCase
from forge_testing.module_state import (
    assert_forward_is_pure,
    assert_gradients_everywhere,
    assert_initialised,
    build_on_meta,
    materialise,
    snapshot,
)

_PREFIX = "blocks.0.feed_forward."


class FeedForwardConformance(ComponentCase):
    """Subclass it, name the component, and pytest runs every check below on it."""

    kind = "feed_forward"
    dim: ClassVar[int] = 16
    layer: ClassVar[int] = 0
    n_layers: ClassVar[int] = 2
    independent_positions: ClassVar[bool] = True
    """Whether a position's output depends on that position alone. Not so where experts have a capacity."""

    further_roles: ClassVar[Collection[str]] = ()
    """Roles of parameters and modules that the package brings, beside those of ``forge_core.contracts.model``."""

    def build_layer(self, seed: int = 0, std: float = 0.1, residual_std: float = 0.1) -> Any:
        """Build on meta, materialise and initialise, as the engine does."""
        layer = self._uninitialised()
        layer.init_weights(SeededInitializer(seed), _PREFIX, residual_std, std)
        return layer

    def test_init_weights_fills_everything(self) -> None:
        layer = self._uninitialised()
        rng = SeededInitializer(0)
        layer.init_weights(rng, _PREFIX, 0.01, 0.02)

        assert_initialised(layer, rng, _PREFIX)

    def test_same_seed_same_weights(self) -> None:
        torch.manual_seed(1)
        first = snapshot(self.build_layer())
        torch.manual_seed(2)
        second = snapshot(self.build_layer())

        for name in first:
            assert torch.equal(first[name], second[name]), (
                f"{name} differs between two layers of one seed; init_weights must use the generator that it is given"
            )

    def test_residual_std_scales_the_output(self) -> None:
        hidden = _hidden(2, 8, self.dim)

        usual = _run(self.build_layer(residual_std=0.1), hidden).abs().max().item()
        small = _run(self.build_layer(residual_std=1e-6), hidden).abs().max().item()

        assert small < 1e-3 * usual, (
            f"with residual_std 100,000 times smaller the output is {small:.3g} instead of {usual:.3g}; the projection "
            "that writes into the residual stream must be initialised with residual_std"
        )

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    @pytest.mark.parametrize(("batch", "positions"), [(1, 1), (2, 7)])
    def test_keeps_shape_and_dtype(self, batch: int, positions: int, dtype: torch.dtype) -> None:
        hidden = _hidden(batch, positions, self.dim).to(dtype)

        output = _run(cast_parameters(self.build_layer(), dtype), hidden)

        assert output.shape == hidden.shape, (
            f"the output must have the shape of the hidden states {tuple(hidden.shape)}, got {tuple(output.shape)}"
        )
        assert output.dtype == dtype, f"the output must keep the dtype of the hidden states {dtype}, got {output.dtype}"
        assert torch.isfinite(output).all(), "the output has values that are not finite"

    def test_positions_are_independent(self) -> None:
        if not self.independent_positions:
            pytest.skip("the layer says that positions matter to each other")
        layer = self.build_layer().eval()
        hidden = _hidden(2, 8, self.dim)
        other = hidden.clone()
        other[0, 3] += 1

        difference = (_run(layer, other) - _run(layer, hidden)).abs().amax(dim=-1)

        moved = [tuple(place) for place in (difference > 1e-5).nonzero().tolist()]
        assert moved == [(0, 3)], f"changing the hidden state at (0, 3) changes the output at {moved}"

    def test_invalid_positions_do_not_matter(self) -> None:
        layer = self.build_layer().eval()
        hidden = _hidden(2, 8, self.dim)
        valid = torch.ones(2, 8, dtype=torch.bool)
        valid[1, 5:] = False
        other = torch.where(valid[..., None], hidden, 100.0)

        first, second = _run(layer, hidden, valid)[valid], _run(layer, other, valid)[valid]

        assert torch.allclose(first, second, rtol=1e-4, atol=1e-5), (
            "what stands at positions that are not valid changes the output at valid ones"
        )

    def test_gradients_reach_every_parameter(self) -> None:
        layer = self.build_layer().train()
        hidden = _hidden(4, 16, self.dim).requires_grad_()

        torch.autograd.backward(_run(layer, hidden).square().sum())

        assert hidden.grad is not None, "no gradient reaches the hidden states"
        assert_gradients_everywhere(layer)

    def test_forward_changes_only_accumulators(self) -> None:
        layer = self.build_layer().train()
        before = snapshot(layer)

        torch.autograd.backward(_run(layer, _hidden(2, 8, self.dim).requires_grad_()).sum())

        assert_forward_is_pure(before, layer)

    def test_parameter_roles_cover_every_parameter(self) -> None:
        layer = self._uninitialised()
        roles, actual = layer.parameter_roles(), {name for name, _ in layer.named_parameters()}

        forgotten, unknown = sorted(actual - set(roles)), sorted(set(roles) - actual)
        assert not forgotten, f"parameter_roles leaves out {', '.join(forgotten)}"
        assert not unknown, f"parameter_roles names {', '.join(unknown)}, which the layer does not have"
        for name, role in roles.items():
            assert role in (*PARAMETER_ROLES, *self.further_roles), f"{name} has the unknown role {role!r}"

    def test_parallel_plan_names_modules(self) -> None:
        layer = self._uninitialised()
        modules = {name for name, _ in layer.named_modules()}

        for name, role in layer.parallel_plan().items():
            assert name in modules, f"parallel_plan names {name!r}, which is not a module of the layer"
            known = (*SHARD_ROLES, *self.further_roles)
            assert role in known, f"parallel_plan gives {name!r} the unknown role {role!r}"

    def test_active_parameters_is_a_part_of_all(self) -> None:
        layer = self._uninitialised()
        total, active = sum(p.numel() for p in layer.parameters()), layer.active_parameters()

        assert isinstance(active, int), f"active_parameters must be an int, got {type(active).__name__}"
        assert 0 < active <= total, f"active_parameters is {active}, and the layer has {total}"

    def _uninitialised(self) -> Any:  # a FeedForward is an nn.Module with more, which a Protocol cannot say
        layer = build_on_meta(lambda: self.make(dim=self.dim, layer=self.layer, n_layers=self.n_layers))
        materialise(layer)
        return layer


def _run(layer: Any, hidden: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
    """With what else it needs to know of tokens."""
    place = torch.arange(hidden.shape[0] * hidden.shape[1]).view(hidden.shape[:2])
    facts = {"token_ids": place % 11, "sequence": place // hidden.shape[1] * hidden.shape[1]}
    facts["noise"] = place * 7919
    output: torch.Tensor = layer(hidden, valid, **{name: facts[name] for name in getattr(layer, "needs", ())})
    return output


def _hidden(batch: int, positions: int, dim: int) -> torch.Tensor:
    return torch.randn(batch, positions, dim, generator=torch.Generator().manual_seed(0))
