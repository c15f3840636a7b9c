"""RMSNorm as torch computes it on CUDA: one kernel, which keeps its input and a number a row.

On a CPU, where plans are made, torch computes it by several operations, and keeps copies of the input in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

_on_cpu = F.rms_norm


@contextmanager
def fused_norms() -> Iterator[None]:
    """While it lasts, ``rms_norm`` has the shapes and the memory of the kernel, and no values."""
    F.rms_norm = _rms_norm  # type: ignore[assignment]  # it calls its first argument `input`
    try:
        yield
    finally:
        F.rms_norm = _on_cpu


def _rms_norm(
    hidden: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    if isinstance(hidden, DTensor) or (weight is not None and weight.dtype != hidden.dtype):  # as on CUDA
        return _on_cpu(hidden, list(shape), weight, eps)
    return _FusedNorm.apply(hidden, len(shape), weight)  # type: ignore[no-any-return, no-untyped-call]  # torch's


class _FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, n_dims: int, weight: torch.Tensor | None) -> torch.Tensor:
        of_rows = hidden.new_empty((*hidden.shape[:-n_dims], *[1] * n_dims), dtype=torch.float32)
        ctx.save_for_backward(hidden, weight, of_rows)
        return hidden.clone()  # reads and writes what the kernel does

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor | None]:
        hidden, weight, _ = ctx.saved_tensors
        return torch.add(gradient, hidden), None, None if weight is None else torch.empty_like(weight)
