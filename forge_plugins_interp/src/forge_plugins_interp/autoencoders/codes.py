"""How latents become sparse.

Shapes: ``…`` = rows in any dimensions, N of them; F = latents.
"""

from __future__ import annotations

from typing import Any

import torch


def top_k(pre: torch.Tensor, k: int) -> torch.Tensor:
    """The k largest of each row ``(…, F)``, where they are positive, and 0 elsewhere."""
    values, indices = pre.relu().topk(k, dim=-1)
    return torch.zeros_like(pre).scatter(-1, indices, values)


def batch_top_k(pre: torch.Tensor, k: int, valid: torch.Tensor | None = None) -> torch.Tensor:
    """The k · N largest of all rows together, where they are positive.

    Args:
        valid: ``(…)`` bool, the N rows that count; by default all.
    """
    kept = pre.relu() if valid is None else pre.relu().where(valid[..., None], 0.0)
    flat = kept.flatten()
    n_rows = len(flat) // pre.shape[-1]
    values, indices = flat.topk(min(k * n_rows, len(flat)))
    if valid is not None:  # how many rows count is known on the device alone
        values = values.where(torch.arange(len(values), device=pre.device) < k * valid.sum(), 0.0)
    return torch.zeros_like(flat).scatter(0, indices, values).view_as(pre)


def jump_relu(pre: torch.Tensor, threshold: torch.Tensor, bandwidth: float) -> torch.Tensor:
    """``x · H(x − θ)``, with a rectangle of the bandwidth for its derivative by θ (arXiv 2407.14435, equation 11)."""
    found: torch.Tensor = _JumpRelu.apply(pre, threshold, bandwidth)  # type: ignore[no-untyped-call]  # torch's
    return found


def step(pre: torch.Tensor, threshold: torch.Tensor, bandwidth: float) -> torch.Tensor:
    """``H(x − θ)``, likewise (equation 12)."""
    found: torch.Tensor = _Step.apply(pre, threshold, bandwidth)  # type: ignore[no-untyped-call]  # torch's
    return found


class _JumpRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pre: torch.Tensor, threshold: torch.Tensor, bandwidth: float) -> torch.Tensor:
        ctx.save_for_backward(pre, threshold)
        ctx.bandwidth = bandwidth
        return pre.where(pre > threshold, 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        pre, threshold = ctx.saved_tensors
        near = ((pre - threshold).abs() < ctx.bandwidth / 2).to(pre.dtype)
        of_threshold = -(threshold / ctx.bandwidth) * near * gradient
        return gradient * (pre > threshold), of_threshold.flatten(0, -2).sum(0), None


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pre: torch.Tensor, threshold: torch.Tensor, bandwidth: float) -> torch.Tensor:
        ctx.save_for_backward(pre, threshold)
        ctx.bandwidth = bandwidth
        return (pre > threshold).to(pre.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        pre, threshold = ctx.saved_tensors
        near = ((pre - threshold).abs() < ctx.bandwidth / 2).to(pre.dtype)
        return None, (-(1 / ctx.bandwidth) * near * gradient).flatten(0, -2).sum(0), None
