"""Auxiliary losses (load balance, z-loss), attached to the graph where they arise.

They need no path to the place where the task loss is computed, so they work under pipelining and activation
checkpointing, and they are reported apart from the task loss.
"""

from __future__ import annotations

from typing import Any

import torch


class AuxiliaryLedger:
    """What the engine owns: the factor by which all losses of a step are multiplied, and the sums so far."""

    def __init__(self) -> None:
        self._scale: torch.Tensor | None = None
        self._sums: dict[str, torch.Tensor] = {}

    def start_step(self, scale: torch.Tensor) -> None:
        """Forget the last step. ``scale`` is a scalar on the device: 1 / valid tokens of the step, over all ranks."""
        self._scale = scale
        self._sums.clear()

    def scale_for(self, activation: torch.Tensor) -> torch.Tensor:
        if self._scale is None:
            return torch.ones((), device=activation.device)
        return self._scale

    def add(self, name: str, value: torch.Tensor) -> None:
        """Backward runs once for each forward that counts, also where activations are computed twice."""
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def means(self) -> dict[str, torch.Tensor]:
        """This rank's part of each auxiliary loss a valid token, detached device scalars."""
        return {name: value * self.scale_for(value) for name, value in self._sums.items()}


LEDGER = AuxiliaryLedger()
"""One a process, as autograd is."""


def attach_auxiliary_loss(activation: torch.Tensor, value: torch.Tensor, name: str) -> torch.Tensor:
    """Return ``activation`` unchanged; in backward, also minimise ``value``.

    Args:
        activation: any tensor on the way to the task loss.
        value: scalar fp32, already multiplied by its coefficient, **summed** over the tokens it covers, as a loss'
            total is: the engine divides both by the step's number of valid tokens, so that the gradient does not depend
            on how the step is cut into microbatches and ranks.
        name: under which the mean is reported, such as ``"load_balance"``.
    """
    if not (activation.requires_grad and value.requires_grad and torch.is_grad_enabled()):
        return activation
    attached: torch.Tensor = _Attach.apply(activation, value, name)  # type: ignore[no-untyped-call]  # torch's
    return attached


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: torch.Tensor, value: torch.Tensor, name: str) -> torch.Tensor:
        ctx.save_for_backward(value)
        ctx.name = name
        return activation.view_as(activation)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (value,) = ctx.saved_tensors
        LEDGER.add(ctx.name, value.detach())
        return gradients[0], LEDGER.scale_for(value).to(value.dtype), None
