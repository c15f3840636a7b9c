"""Products of rows with their experts' weights, all experts in one operation, of factors rounded to float8.

Both factors are rounded to e4m3, each row of the left one and each column of the right one with a scale of its own, a
power of two, so that scaling rounds nothing: torchao's recipe ``rowwise_with_gw_hp``, but that here the right factor of
backward is scaled by columns too. The output and the gradient of rows are such products. The gradient of weights is
not, and is computed in the dtype of the rows: it sums over rows, of which kernels for float8 want a multiple of 16 for
each expert, and at least one, so that rows would have to be copied to make room.

Shapes: R = rows, E = experts, K and N = features in and out, multiples of ``FLOAT8_MULTIPLE``.
"""

from __future__ import annotations

from typing import Any

import torch

from forge_plugins_moe.grouped import Product, grouped_outer_product, grouped_product

_E4M3 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_E4M3).max
_NO_LESS = 1e-12
"""What the largest element of a row is taken for at least, as by torchao: rows of zeros have no scale."""


def float8_product(counts: torch.Tensor, like: torch.Tensor) -> Product:
    """Same as ``grouped_product``, for bf16 on GPUs with compute capability 9.0."""
    return lambda rows, weight: _multiplied(rows, weight, counts, False)


def emulated_float8_product(counts: torch.Tensor, like: torch.Tensor) -> Product:
    """Same as ``grouped_product``, of factors that are rounded to float8 and multiplied in their own dtype, bf16 or
    fp32."""
    return lambda rows, weight: _multiplied(rows, weight, counts, True)


def _multiplied(rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor, emulate: bool) -> torch.Tensor:
    product: torch.Tensor = _Float8Product.apply(rows, weight, counts, emulate)  # type: ignore[no-untyped-call]  # torch's
    return product


class _Float8Product(torch.autograd.Function):
    """Made of plain operations around one kernel, so that torch.compile fuses what rounds."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor, emulate: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weight, counts)
        ctx.emulate = emulate
        return _product(rows, weight, counts, emulate, fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        rows, weight, counts = ctx.saved_tensors
        (gradient,) = gradients
        of_rows = of_weight = None
        if ctx.needs_input_grad[0]:
            of_rows = _product(gradient, weight.transpose(-2, -1), counts, ctx.emulate, fast=False)
        if ctx.needs_input_grad[1]:
            of_weight = grouped_outer_product(gradient, rows, _ends(counts))
        return of_rows, of_weight, None, None


def _product(
    rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor, emulate: bool, *, fast: bool
) -> torch.Tensor:
    """Rows ``(R, K)`` and weights ``(E, N, K)`` to ``(R, N)``.

    Args:
        fast: let the GPU keep fewer bits of sums, as torchao does in forward and not in backward.
    """
    left, of_rows = _rounded(rows)
    right, of_columns = _rounded(weight)
    if emulate:
        return grouped_product(counts, weight)(_times(left, of_rows, rows.dtype), _times(right, of_columns, rows.dtype))
    # not the public scaled_grouped_mm, whose operator cannot work out shapes (torch 2.13), as torch.compile must
    return torch._scaled_grouped_mm(
        left.contiguous(),
        right.contiguous().transpose(-2, -1),
        of_rows.contiguous(),
        of_columns.contiguous(),
        offs=_ends(counts),
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )


def _rounded(factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``(…, K)`` in float8, and the scales ``(…)`` fp32 by which that has to be multiplied."""
    largest = factor.abs().amax(-1, keepdim=True).float().clamp(min=_NO_LESS)
    scale = torch.exp2(torch.floor(torch.log2(_LARGEST / largest)))
    # in the factor's own dtype, which has every such scale, instead of a copy in fp32
    return (factor * scale.to(factor.dtype)).to(_E4M3), scale.reciprocal().squeeze(-1)


def _times(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return values.to(dtype) * scale.unsqueeze(-1).to(dtype)


def _ends(counts: torch.Tensor) -> torch.Tensor:
    return counts.cumsum(0, dtype=torch.int32)
