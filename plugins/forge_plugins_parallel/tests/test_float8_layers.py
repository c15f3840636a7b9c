"""The products of one layer in each recipe: how exact they are, and that kernels round as it is emulated."""

from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from packaging.version import Version
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.prototype.moe_training import mxfp8_linear
from torchao.prototype.mx_formats.config import MXFP8Dim1CastKernelChoice

from forge_plugins_parallel.block_scaled import CAPABILITIES, BlockScaledLinear, _rounded, product_of
from forge_plugins_parallel.config import Float8Config
from forge_plugins_parallel.fp8 import Float8
from forge_plugins_plan.gpus import gpu_named
from forge_testing.several_ranks import on_ranks

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_is_as_exact_as_float8_is(recipe):
    """Rounding to m bits of mantissa is off by up to 2^-(m+1), and by 2^-(m+1) / √3 · (about 0.7) in the mean square,
    for each of two factors: 0.036 for a product of e4m3 (m = 3), 0.057 with one of e5m2 (m = 2)."""
    torch.manual_seed(0)
    linear, hidden, gradient = nn.Linear(256, 128, bias=False), torch.randn(64, 256), torch.randn(64, 128)
    exact = linear(hidden)
    expected = {"output": exact.detach(), "input": gradient @ linear.weight.detach(), "weight": gradient.T @ hidden}
    convert(linear, recipe)

    hidden.requires_grad_()
    output = linear(hidden)
    output.backward(gradient)

    found = {"output": output.detach(), "input": hidden.grad, "weight": linear.weight.grad}
    errors = {name: ((found[name] - expected[name]).norm() / expected[name].norm()).item() for name in found}
    coarse = 0.06 if recipe == "tensorwise" else 0.04
    assert 0.02 < errors["output"] < 0.04
    assert 0.02 < errors["input"] < coarse
    assert errors["weight"] < 1e-5 if recipe == "rowwise_with_gw_hp" else 0.02 < errors["weight"] < coarse


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_a_large_value_costs_its_own_block_its_exactness_and_no_other(recipe):
    torch.manual_seed(0)
    linear, hidden = nn.Linear(512, 256), torch.randn(384, 512)
    hidden[0, 0] = 1e6  # small values beside it are rounded to nothing
    selected = torch.zeros(256, 512)
    selected[:, 128:] = torch.randn(256, 384)  # nothing of its block counts
    linear.weight = nn.Parameter(selected)
    exact = linear(hidden).detach()
    convert(linear, recipe)

    found = linear(hidden).detach()

    assert (found - exact).norm() / exact.norm() < 0.04


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_rows_need_not_fill_a_block(recipe):
    torch.manual_seed(0)
    linear, hidden, gradient = nn.Linear(256, 128), torch.randn(2, 100, 256), torch.randn(2, 100, 128)
    convert(linear, recipe)
    filled = [torch.cat([one.flatten(0, 1), torch.zeros(56, one.shape[-1])]) for one in (hidden, gradient)]

    found = outputs_and_gradients(linear, hidden, gradient)

    expected = outputs_and_gradients(linear, *filled)
    for got, want in zip(found, expected, strict=True):
        assert torch.allclose(got.flatten(0, -2)[:200], want[:200], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_kernels_are_given_whole_tiles_of_rows(recipe):
    linear, seen = nn.Linear(256, 128), []
    convert(linear, recipe)
    linear.product = lambda rows, weight: seen.append(len(rows)) or rows @ weight.T

    for count in (1, 100, 128, 160):
        assert linear(torch.randn(count, 256)).shape == (count, 128)
    assert seen == [128, 128, 128, 256]


@pytest.mark.parametrize(
    ("features", "emulates", "kernel"),
    [
        ((256, 128), False, "TRITON"),
        ((160, 128), False, "TORCH"),
        ((256, 96), False, "TORCH"),
        ((256, 128), True, "TORCH"),
    ],
)
def test_torchao_casts_by_triton_what_its_kernel_takes(monkeypatch, features, emulates, kernel):
    """It refuses factors whose sizes are no multiples of 128."""
    given = []
    monkeypatch.setattr(mxfp8_linear.mx_mm, "apply", lambda *arguments: given.extend(arguments))
    product = product_of("mxfp8", None if emulates else (10, 0), is_planned=False)

    product(torch.randn(128, features[0]), torch.randn(*reversed(features)))

    (choice,) = (one for one in given if isinstance(one, MXFP8Dim1CastKernelChoice))
    assert choice.name == kernel


def convert(linear, recipe):
    Float8(Float8Config(recipe=recipe, emulate=True))._conversion(None, is_planned=False)(linear)


def outputs_and_gradients(linear, hidden, gradient):
    hidden = hidden.clone().requires_grad_()
    output = linear(hidden)
    return output.detach(), *torch.autograd.grad(output, [hidden, linear.weight], gradient)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gpu_rounds_as_it_is_emulated(recipe):
    capability = torch.cuda.get_device_capability()
    if capability < CAPABILITIES.get(recipe, (8, 9)):
        pytest.skip(f"this GPU has no products for {recipe}")
    found = []
    for own in (capability, None):
        torch.manual_seed(0)
        linear = nn.Linear(512, 256, device="cuda", dtype=torch.bfloat16)
        hidden, gradient = (torch.randn(384, n, device="cuda", dtype=torch.bfloat16) for n in (512, 256))
        config = Float8Config(recipe=recipe, emulate=own is None)
        Float8(config)._conversion(own, is_planned=False)(linear)
        found.append(outputs_and_gradients(linear, hidden, gradient))

    for got, want in zip(*found, strict=True):
        assert relative(got, want) < 1e-2


class Interpreted:
    """Triton's kernels for ``blockwise``, those of a GPU of capability 10, on the CPU."""

    def distances(self) -> list[float]:
        """From what is emulated: of the output and both gradients."""
        from torchao.prototype.blockwise_fp8_training import kernels
        from triton.runtime import Autotuner, interpreter

        interpreter._convert_float = by_torch
        for kernel in vars(kernels).values():
            if isinstance(kernel, Autotuner):
                kernel.configs = kernel.configs[:1]  # it would time them on a GPU
        torch.manual_seed(0)
        linear = BlockScaledLinear(256, 384, bias=False, dtype=torch.bfloat16)
        hidden, gradient = (torch.randn(100, n, dtype=torch.bfloat16) for n in (256, 384))
        found = []
        for capability in ((10, 0), None):
            linear.product = product_of("blockwise", capability, is_planned=False)
            found.append(outputs_and_gradients(linear, hidden, gradient))
        return [relative(got, want) for got, want in zip(*found, strict=True)]


def by_torch(values: np.ndarray, given: Any, wanted: Any, mode: object) -> np.ndarray:
    """A conversion to or from float8. Triton's own interpreter has 1.9375 become 1.0, as its carry has no effect."""
    dtypes = {
        "fp8e4nv": torch.float8_e4m3fn,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp32": torch.float32,
    }
    bits = {8: torch.uint8, 16: torch.uint16, 32: torch.uint32}
    raw = torch.from_numpy(values.view(f"uint{given.primitive_bitwidth}").copy())
    converted = raw.view(dtypes[str(given)]).to(dtypes[str(wanted)])
    return converted.view(bits[wanted.primitive_bitwidth]).numpy()


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.float() - want.float()).norm() / want.float().norm()).item()


@pytest.mark.nightly
def test_kernels_of_triton_round_as_it_is_emulated(monkeypatch):
    if find_spec("triton") is None or not Version("3.7") <= Version(version("triton")) < Version("3.9"):
        pytest.skip("Triton is not installed, or is that of torch 2.11 or 2.15, which does not interpret these kernels")
    monkeypatch.setenv("TRITON_INTERPRET", "1")

    assert max(on_ranks(Interpreted, "distances", 2)[0]) < 5e-3


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_factors_may_lie_in_memory_as_they_like(recipe):
    torch.manual_seed(0)
    linear, hidden = nn.Linear(256, 128), torch.randn(128, 512)[:, ::2]
    linear.weight = nn.Parameter(torch.randn(256, 128).T)
    convert(linear, recipe)

    assert not hidden.is_contiguous()
    assert torch.equal(linear(hidden), linear(hidden.contiguous()))


def test_blocks_are_scaled_by_their_largest_value():
    """By the definition, block by block, in float64."""
    torch.manual_seed(0)
    matrix = torch.randn(256, 384) * torch.logspace(-6, 6, 384)
    for rows, columns in ((1, 128), (128, 1), (128, 128)):
        expected = torch.empty_like(matrix)
        for top in range(0, 256, rows):
            for left in range(0, 384, columns):
                block = matrix[top : top + rows, left : left + columns].double()
                scale = 448 / block.abs().max()
                rounded = (block * scale).float().to(torch.float8_e4m3fn).double() / scale
                expected[top : top + rows, left : left + columns] = rounded.float()
        assert torch.allclose(_rounded(matrix, rows, columns), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_a_plan_counts_products_in_float8(recipe):
    """It has no such GPU, nor torchao's kernels."""
    with FakeTensorMode(), CountedProducts() as products:
        linear = nn.Linear(256, 128, dtype=torch.bfloat16)
        Float8(Float8Config(recipe=recipe))._conversion(gpu_named("b200").capability, is_planned=True)(linear)
        hidden = torch.empty(2, 100, 256, dtype=torch.bfloat16, requires_grad=True)
        output = linear(hidden)
        output.sum().backward()

    assert products.names == ["_scaled_mm"] * 3
    assert output.shape == (2, 100, 128)


class CountedProducts(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names += [name for name in ("_scaled_mm", "mm", "addmm") if func is getattr(torch.ops.aten, name).default]
        return func(*args, **(kwargs or {}))
