"""The kit of activations has a sentence for each way to break their contract."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from forge_plugins_dense.testing.activation import ActivationConformance
from forge_testing.plugin_file import cases_in


class Stops(torch.autograd.Function):
    @staticmethod
    def forward(ctx, features):
        return features.square()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def with_a_constant():
    two = torch.tensor(2.0)
    return lambda x: x * two


def breaks(x):
    torch._dynamo.graph_break()
    return x * 1.0


def compiled_otherwise(x):
    return x * (2 if torch.compiler.is_compiling() else 1)


KEEPS = "test_keeps_shape_dtype_and_input"
HERE = {"shape": (7, 3), "dtype": torch.bfloat16}
GRADIENT = "test_gradient_is_that_of_finite_differences"
COMPILES = "test_compiles_to_the_same_without_a_break"
FAULTS = [
    (nn.PReLU, "test_has_no_parameters_and_buffers", {}, r"and this one has \['weight'\]"),
    (with_a_constant, "test_makes_no_tensor_before_it_is_called", {}, "built on meta, it cannot be called"),
    (lambda: nn.GLU(), KEEPS, HERE | {"shape": (7, 4)}, r"shape \(7, 4\), got \(7, 2\)"),
    (lambda: torch.Tensor.float, KEEPS, HERE, "keep the dtype torch.bfloat16, got torch.float32"),
    (lambda: torch.relu_, KEEPS, HERE, "the input is changed in place"),
    (lambda: torch.log, KEEPS, HERE, "values that are not finite"),
    (lambda: lambda x: torch.zeros(x.shape), "test_works_out_shapes_on_meta", {}, "must stay on meta, got cpu"),
    (lambda: lambda x: x * float(x.max()), "test_works_out_shapes_on_meta", {}, "on meta it cannot be called"),
    (lambda: nn.Softmax(-1), "test_each_number_is_by_itself", {}, r"becomes something else at \[\[0, 0\]"),
    (lambda: lambda x: x + torch.arange(x.shape[-1]), "test_each_number_is_by_itself", {}, r"else at \[\[0, 1\]"),
    (lambda: Stops.apply, GRADIENT, {}, r"not that of the function at \[-4.0, "),
    (lambda: lambda x: x.square().sqrt(), GRADIENT, {}, "-100, 0 or 100 is not finite"),
    (lambda: breaks, COMPILES, {}, "torch.compile breaks the graph"),
    (lambda: compiled_otherwise, COMPILES, {}, "compiled, it is another"),
]


@pytest.mark.parametrize(("factory", "check", "given", "sentence"), FAULTS)
def test_a_fault_is_told(factory, check, given, sentence):
    class Case(ActivationConformance):
        def make(self):
            return factory()

    with pytest.raises(AssertionError, match=sentence):
        getattr(Case(), check)(**given)


def test_every_check_has_a_fault():
    checks = {name for name in dir(ActivationConformance) if name.startswith("test_")}
    assert {check for _, check, _, _ in FAULTS} == checks


SWISH = """
import torch
from forge_core.api import component

@component("activation")
def swish(*, beta: float = 1.0):
    \"\"\"x · σ(βx).

    Args:
        beta: How steep it is.
    \"\"\"
    return lambda features: features * torch.sigmoid(beta * features)
"""


def test_pytest_of_a_plugin_file_runs_it(tmp_path):
    file = tmp_path / "swish.py"
    file.write_text(SWISH)

    (case,) = cases_in(file)

    assert case.kit is ActivationConformance
    case.conformance(__name__)().test_each_number_is_by_itself()
