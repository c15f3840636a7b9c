"""Linear layers whose factors are scaled in blocks, each with a scale of its own, before they are rounded to float8."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from forge_core.errors import ConfigError
from forge_plugins_parallel.config import FLOAT8_BLOCKS

CAPABILITIES = {"blockwise": (9, 0), "mxfp8": (10, 0)}
"""The compute capability from which on a GPU has the product."""
ROWS = 128
"""Rows come in multiples of this: a block of ``blockwise``, and what torchao's kernels for ``mxfp8`` take at a time."""
_LARGEST = torch.finfo(torch.float8_e4m3fn).max

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Of ``(rows, in)`` and a weight ``(out, in)``, both contiguous, to ``(rows, out)``; ``rows`` is a multiple of
``ROWS``."""


class BlockScaledLinear(nn.Linear):
    """A linear layer that multiplies with ``product``. Rows that it lacks are filled up with zeros."""

    product: Product

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (torch's name)
        rows = input.flatten(0, -2).contiguous()
        lacking = -len(rows) % ROWS
        filled = F.pad(rows, (0, 0, 0, lacking)) if lacking else rows  # it copies them in any case
        output = self.product(filled, self.weight.contiguous())[: len(rows)].view(*input.shape[:-1], -1)
        return output if self.bias is None else output + self.bias.to(output.dtype)


def product_of(recipe: str, capability: tuple[int, int] | None, *, is_planned: bool) -> Product:
    """The product of a recipe.

    ``blockwise`` is that of DeepSeek-V3 (https://arxiv.org/abs/2412.19437, section 3.3): inputs and gradients in blocks
    of 128 along the dimension that is summed over, weights in squares, all in e4m3. ``mxfp8`` is the microscaling
    format of the Open Compute Project, with scales that are powers of two (https://arxiv.org/abs/2506.08027).

    Args:
        capability: of the GPU; ``None`` rounds to float8 and multiplies in the dtype of the factors.
        is_planned: there is no such GPU here. Nothing is computed; operations are what a plan counts.

    Raises:
        ConfigError: torchao has no such product.
    """
    if is_planned and capability is not None:
        return _planned
    try:
        return _mxfp8(emulate=capability is None) if recipe == "mxfp8" else _blockwise(capability)
    except ImportError as error:
        sentence = f"parallel.passes.fp8.recipe: this torchao has no {recipe} for training, torchao 0.18 has ({error})"
        raise ConfigError(sentence) from None


def _mxfp8(*, emulate: bool) -> Product:
    from torchao.prototype.moe_training.mxfp8_linear import mx_mm  # type: ignore[import-untyped]  # it has no types
    from torchao.prototype.mx_formats import config as mx  # type: ignore[import-untyped]
    from torchao.quantization.quantize_.common.kernel_preference import (  # type: ignore[import-untyped]
        KernelPreference,
    )

    kernels = KernelPreference.EMULATED if emulate else KernelPreference.AUTO
    along = mx.MXFP8Dim0CastKernelChoice.TORCH if emulate else mx.MXFP8Dim0CastKernelChoice.TRITON
    by_torch, by_triton = mx.MXFP8Dim1CastKernelChoice.TORCH, mx.MXFP8Dim1CastKernelChoice.TRITON
    dtypes, scales = (torch.float8_e4m3fn,) * 3, mx.ScaleCalculationMode.RCEIL

    def product(rows: torch.Tensor, weight: torch.Tensor) -> Any:
        fills_tiles = all(features % 128 == 0 for features in weight.shape)  # torchao's kernel knows no others
        across = by_triton if fills_tiles and not emulate else by_torch
        return mx_mm.apply(rows, weight, *dtypes, FLOAT8_BLOCKS["mxfp8"], kernels, along, across, scales, False)

    return product


def _blockwise(capability: tuple[int, int] | None) -> Product:
    if capability is None:
        return _EmulatedBlockwise.apply
    from torchao.prototype.blockwise_fp8_training.linear import (  # type: ignore[import-untyped]  # it has no types
        fp8_blockwise_mm,
    )

    by_triton = capability[0] > 9  # cuBLAS has such scales for capability 9 alone

    def product(rows: torch.Tensor, weight: torch.Tensor) -> Any:
        return fp8_blockwise_mm.apply(rows, weight, FLOAT8_BLOCKS["blockwise"], rows.dtype, by_triton)

    return product


class _EmulatedBlockwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        return _rounded(rows, 1, 128) @ _rounded(weight, 128, 128).T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, weight = ctx.saved_tensors
        of_rows = _rounded(gradient, 1, 128) @ _rounded(weight, 128, 128)
        return of_rows, _rounded(gradient, 128, 1).T @ _rounded(rows, 128, 1)


def _rounded(matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """What float8 keeps of it, if the largest value of each block of ``rows`` × ``columns`` is the largest of e4m3."""
    blocks: torch.Tensor = matrix.float().unflatten(1, (-1, columns)).unflatten(0, (-1, rows))  # type: ignore[no-untyped-call]  # torch's
    scale = _LARGEST / blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-12)
    rounded = (blocks * scale).to(torch.float8_e4m3fn).float() / scale
    return rounded.view(matrix.shape).to(matrix.dtype)


class _Planned(torch.autograd.Function):
    """Three products in float8 without scales."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        return _in_float8(rows, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, weight = ctx.saved_tensors
        return _in_float8(gradient, weight.T), _in_float8(gradient.T, rows.T)


def _planned(rows: torch.Tensor, weight: torch.Tensor) -> Any:
    return _Planned.apply(rows, weight)  # type: ignore[no-untyped-call]  # torch's


def _in_float8(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``left @ right.T``, both copied to float8 row by row, as the kernels want them."""
    copies = [one.contiguous().to(torch.float8_e4m3fn) for one in (left, right)]
    one = torch.ones((), device=left.device)
    return torch._scaled_mm(copies[0], copies[1].T, one, one, out_dtype=left.dtype)


@functools.cache  # one class for all layers of a kind, so that blocks still share one compiled graph
def class_with(own: Any, base: type[nn.Linear]) -> Any:
    """``own``, which is ``nn.Linear`` or has something mixed into it, with ``base`` in place of ``nn.Linear``."""
    if own is nn.Linear:
        return base
    bases = tuple(base if one is nn.Linear else one for one in own.__bases__)
    return type(f"{base.__name__}{own.__name__}", bases, {"__module__": __name__})
