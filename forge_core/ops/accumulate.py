"""Sums that a module makes over a step while it is used: counts of tokens, sums of probabilities.

Forward may run more often than a step has microbatches (activation checkpointing computes it again), and without being
trained (evaluation); backward runs exactly once for each forward that counts. So it is backward that adds.
"""

from __future__ import annotations

from typing import Any

import torch


def accumulate(activation: torch.Tensor, buffer: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return ``activation`` unchanged; in backward, once, add ``value`` to ``buffer``.

    Nothing is added where no gradient passes ``activation``: in evaluation, in a frozen part of a model.

    Args:
        activation: any tensor on the way to the loss; what is returned must be used in its place.
        buffer: a non-persistent buffer that the module names in ``accumulators`` (``StepModule``).
        value: of the buffer's shape; the gradient does not pass it.
    """
    if not (activation.requires_grad and torch.is_grad_enabled()):
        return activation
    same: torch.Tensor = _Accumulate.apply(activation, buffer, value.detach())  # type: ignore[no-untyped-call]  # torch's
    return same


def unchanged(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view, for an ``autograd.Function`` whose forward is the identity: a view costs nothing. In a compiled
    graph it is a copy: of a view that leaves its graph the compiler makes another one, whose gradient goes past the
    function. So it is of a scalar, such as a loss, which FSDP warns of if a model returns it as a view."""
    return tensor.clone() if torch.compiler.is_compiling() or tensor.ndim == 0 else tensor.view_as(tensor)


class _Accumulate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: torch.Tensor, buffer: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(buffer, value)
        return unchanged(activation)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        buffer, value = ctx.saved_tensors
        (gradient,) = gradients
        if torch.compiler.is_compiling():
            # what is added depends on the gradient, or else a compiler could leave it out or do it in forward
            return _add(gradient, buffer, value), None, None
        buffer.data.add_(value)
        return gradient, None, None


# An operator, so that torch.compile keeps it as it is. It does not declare that it changes the buffer: a graph would
# copy the buffer back at its end, over what the backward of another microbatch has added meanwhile. For the same reason
# the change is hidden from autograd's counts of versions: several microbatches have saved the buffer, for its place.
# Nor can a CUDA graph hold it, which would replay it on the buffer and the value that it was recorded with.
@torch.library.custom_op("forge::accumulate", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _add(gradient: torch.Tensor, buffer: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    buffer.data.add_(value)
    return gradient.clone()


@_add.register_fake
def _(gradient: torch.Tensor, buffer: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(gradient)
