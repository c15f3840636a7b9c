"""Products of rows with their experts' weights."""

import pytest
import torch

from forge_plugins_moe import grouped
from forge_plugins_moe.grouped import grouped_product


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_experts_without_rows_take_a_gradient_of_any_strides(dtype):
    """A rank that no token was sent to; its dispatcher may be anybody's."""
    rows = torch.zeros(0, 8, dtype=dtype, requires_grad=True)
    weight = torch.ones(4, 16, 8, dtype=dtype, requires_grad=True)
    product = grouped_product(torch.zeros(4, dtype=torch.int64), weight)(rows, weight)

    product.backward(torch.zeros(1, dtype=dtype).as_strided((0, 16), (0, 0)))

    assert product.shape == (0, 16)
    assert rows.grad.shape == rows.shape
    torch.testing.assert_close(weight.grad, torch.zeros_like(weight), rtol=0, atol=0)


@pytest.mark.parametrize("counts", [[0, 1, 7, 0, 24], [0, 0, 0, 0, 0]])
def test_torchs_own_backward_takes_an_expanded_gradient(counts):
    """As CUDA multiplies in bf16, tried on the CPU: ``benchmarks/gpu.py`` compares it there."""
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(shape, generator=generator).bfloat16() for shape in ((sum(counts), 64), (5, 128, 64)))
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    gradients = []
    for product in (grouped._product_in_bf16, grouped._product):
        given = rows.clone().requires_grad_(), weight.clone().requires_grad_()
        output = product(*given, ends)
        gradients.append((output, *torch.autograd.grad(output.sum(), given)))

    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
