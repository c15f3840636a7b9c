"""Products of rows with their experts' weights, all experts in one operation and none of them padded.

Shapes: R = rows, E = experts, K and N = features in and out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import register_flop_formula

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Rows ``(R, K)`` and weights ``(E, N, K)`` to ``(R, N)``, each row with its expert's."""


def grouped_product(counts: torch.Tensor, like: torch.Tensor) -> Product:
    """How to multiply rows of which the first ``counts[0]`` are the first expert's, and so on.

    With ``grouped_mm`` the host does not wait for the counts. It needs fp32, bf16 or fp16, a CPU or CUDA, and features
    that fill a multiple of 16 bytes; otherwise experts take their turns, and the host waits.

    Args:
        counts: ``(E,)`` int64. Rows beyond their sum give what was in memory.
        like: a stack of weights ``(E, N, K)``; others have the dtype and the sizes, N and K maybe exchanged.
    """
    if not takes_grouped(like):
        return _loop(counts)
    ends = counts.cumsum(0, dtype=torch.int32)
    if like.dtype == torch.bfloat16 and like.device.type == "cuda":
        return lambda rows, weight: _product_in_bf16(rows, weight, ends)
    return lambda rows, weight: _product(rows, weight, ends)


def takes_grouped(weight: torch.Tensor) -> bool:
    """Return whether ``grouped_mm`` takes such weights, ``(…, N, K)``."""
    aligned = all(size * weight.element_size() % 16 == 0 for size in weight.shape[-2:])
    known = weight.device.type in ("cpu", "cuda", "meta")
    return known and aligned and weight.dtype in (torch.float32, torch.float16, torch.bfloat16)


def _product_in_bf16(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """By torch's operator and its backward, whose calls cost less than those of an operator of our own."""
    if len(rows) == 0:
        product: torch.Tensor = _product(rows, weight, ends)
        return product
    product = F.grouped_mm(rows.contiguous(), weight.transpose(-2, -1), offs=ends)
    return _WithContiguousGradient.apply(product)  # type: ignore[no-any-return, no-untyped-call]  # torch's


class _WithContiguousGradient(torch.autograd.Function):
    """The backward of torch's operator refuses a gradient that is expanded, as that of a sum is."""

    @staticmethod
    def forward(ctx: Any, product: torch.Tensor) -> torch.Tensor:
        return product.view_as(product)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.contiguous()


def _loop(counts: torch.Tensor) -> Product:
    sizes = [int(count) for count in counts.tolist()]

    def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rest = len(rows) - sum(sizes)
        parts = rows.split([*sizes, rest])[:-1]  # type: ignore[no-untyped-call]  # torch's
        products = [part @ one.T for part, one in zip(parts, weight, strict=True)]
        return torch.cat([*products, rows.new_zeros(rest, weight.shape[1])])

    return product


# torch 2.13 multiplies in fp32 and fp16 too, but says that it does not when it only works out shapes (torch.compile, a
# plan); hence an operator of our own around its.
@torch.library.custom_op("forge_moe::grouped_product", mutates_args=())
def _product(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    if len(rows) == 0:  # contiguous() leaves any strides, of which torch refuses some
        return rows.new_empty(0, weight.shape[1])
    return F.grouped_mm(rows.contiguous(), weight.transpose(-2, -1), offs=ends)


@_product.register_fake
def _(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1])


@torch.library.custom_op("forge_moe::grouped_outer_product", mutates_args=())
def grouped_outer_product(gradient: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """``(R, N)`` and ``(R, K)`` to ``(E, N, K)``, the sum over each expert's rows: the gradient of weights.

    Args:
        ends: ``(E,)`` int32, where each expert's rows end.
    """
    if len(rows) == 0:  # as in _product
        return rows.new_zeros(len(ends), gradient.shape[1], rows.shape[1])
    return F.grouped_mm(gradient.contiguous().t(), rows.contiguous(), offs=ends)


@grouped_outer_product.register_fake
def _(gradient: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(ends.shape[0], gradient.shape[1], rows.shape[1])


@register_flop_formula(torch.ops.forge_moe.grouped_product)
def _flops(rows: Sequence[int], weight: Sequence[int], *_: Any, **__: Any) -> int:
    """Of shapes: each row is multiplied by one expert's matrix."""
    return 2 * rows[0] * weight[-2] * weight[-1]


@register_flop_formula(torch.ops.forge_moe.grouped_outer_product)
def _outer_flops(gradient: Sequence[int], rows: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * gradient[0] * gradient[1] * rows[1]


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    rows, weight, ends = ctx.saved_tensors
    return _product(gradient, weight.transpose(-2, -1), ends), grouped_outer_product(gradient, rows, ends), None


_product.register_autograd(_backward, setup_context=_keep)
