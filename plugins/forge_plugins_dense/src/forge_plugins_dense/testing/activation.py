"""Conformance of activations (contract: ``forge_plugins_dense.activation``)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from forge_plugins_dense.activation import Activation
from forge_testing.component_case import ComponentCase

_STEP = 1e-3


class ActivationConformance(ComponentCase):
    """Subclass it, name the component, and pytest runs every check below on it."""

    kind = "activation"

    def build_activation(self) -> Activation:
        """Build it on meta, as layers are built."""
        with torch.device("meta"):
            activation: Activation = self.make()
        return activation

    def test_has_no_parameters_and_buffers(self) -> None:
        made = self.build_activation()
        own = [*made.state_dict(), *dict(made.named_buffers())] if isinstance(made, nn.Module) else []

        assert not own, f"an activation has no parameters and buffers, and this one has {own}"

    def test_makes_no_tensor_before_it_is_called(self) -> None:
        """One that is made with the layer stays on meta."""
        try:
            found = self.build_activation()(_features())
        except (RuntimeError, NotImplementedError) as error:
            raise AssertionError(f"built on meta, it cannot be called: {error}") from error

        assert torch.equal(found, self.make()(_features())), "built on meta, it is another function"

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    @pytest.mark.parametrize("shape", [(0, 3), (7, 3), (2, 7, 3)], ids=["none", "rows", "positions"])
    def test_keeps_shape_dtype_and_input(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        features = _features(*shape).to(dtype)
        before = features.clone()

        found = self.build_activation()(features)

        assert found.shape == features.shape, f"the output must have the shape {shape}, got {tuple(found.shape)}"
        assert found.dtype == dtype, f"the output must keep the dtype {dtype}, got {found.dtype}"
        assert torch.equal(before, features), "the input is changed in place"
        assert torch.isfinite(found).all(), "the output has values that are not finite"

    def test_works_out_shapes_on_meta(self) -> None:
        """As ``forge plan`` has it do."""
        try:
            found = self.build_activation()(torch.empty(7, 3, device="meta"))
        except (RuntimeError, NotImplementedError) as error:
            raise AssertionError(f"on meta it cannot be called: {error}") from error

        assert found.is_meta, f"the output must stay on meta, got {found.device}"

    def test_each_number_is_by_itself(self) -> None:
        activation, features = self.build_activation(), _features(4, 8)

        alone = torch.stack([activation(one.view(1, 1)) for one in features.flatten()]).view_as(features)

        moved = ((activation(features) - alone).abs() > 1e-6).nonzero().tolist()
        assert not moved, f"beside others, a number becomes something else at {moved[:3]}"

    def test_gradient_is_that_of_finite_differences(self) -> None:
        """In float64, of numbers from -4 to 4; at 0, and far from it, it is finite."""
        activation = self.build_activation()
        features = torch.linspace(-4, 4, 100, dtype=torch.float64)

        found = _gradient(activation, features)
        expected = (activation(features + _STEP) - activation(features - _STEP)) / (2 * _STEP)

        wrong = features[(found - expected).abs() > 1e-3 * (1 + expected.abs())].tolist()
        assert not wrong, f"the gradient is not that of the function at {[round(one, 3) for one in wrong[:3]]}"
        assert torch.isfinite(_gradient(activation, torch.tensor([-100.0, 0.0, 100.0]))).all(), (
            "the gradient at -100, 0 or 100 is not finite"
        )

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own modules, at their import
    def test_compiles_to_the_same_without_a_break(self) -> None:
        activation, features = self.build_activation(), _features(4, 8)
        compiled = torch.compile(activation, fullgraph=True, backend="aot_eager")

        try:
            found = compiled(features)
        except torch._dynamo.exc.Unsupported as error:
            raise AssertionError(f"torch.compile breaks the graph: {error}") from error

        torch.testing.assert_close(found, activation(features), msg=lambda how: f"compiled, it is another: {how}")
        torch.testing.assert_close(_gradient(compiled, features), _gradient(activation, features))


def _features(*shape: int) -> torch.Tensor:
    return torch.randn(shape or (5, 8), generator=torch.Generator().manual_seed(0))


def _gradient(activation: Activation, features: torch.Tensor) -> torch.Tensor:
    given = features.clone().requires_grad_()
    (found,) = torch.autograd.grad(activation(given).sum(), given)
    return found
