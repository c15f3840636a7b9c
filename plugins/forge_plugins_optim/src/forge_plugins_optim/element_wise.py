"""Optimizers that treat each element by itself, a group of parameters at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from forge_core.ops.local_tensor import local_tensor

Tensors = list[torch.Tensor]


class ElementWise(torch.optim.Optimizer):
    """Steps all parameters of a group at once, by torch's foreach operations on what this rank holds of them."""

    slots: ClassVar[tuple[str, ...]] = ()
    """Names of its state: tensors of the parameter's shape, dtype and layout, zero before the first step."""

    def update(self, group: dict[str, Any], parameters: Tensors, gradients: Tensors, *state: Tensors) -> None:
        """Change parameters and state in place.

        Args:
            group: the hyper-parameters.
            parameters: this rank's parts; ``gradients`` and every one of ``state`` belong to them, in order.
            state: one list for each of ``slots``.
        """
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # as torch's
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            held = [parameter for parameter in group["params"] if parameter.grad is not None]
            if held:
                gradients = [local_tensor(parameter.grad) for parameter in held]
                state = [[local_tensor(self._state_of(one, slot)) for one in held] for slot in self.slots]
                self.update(group, [local_tensor(parameter) for parameter in held], gradients, *state)
        return loss

    def _state_of(self, parameter: torch.Tensor, slot: str) -> torch.Tensor:
        state = self.state[parameter]
        if slot not in state:
            state[slot] = torch.zeros_like(parameter)
        tensor: torch.Tensor = state[slot]
        return tensor


def shrink(parameters: Tensors, part: float) -> None:
    """Multiply by ``1 − part`` in place: decoupled weight decay.

    The factor is a tensor, as on a CPU a number would be rounded to the parameters' dtype first.
    """
    if part:
        torch._foreach_mul_(parameters, torch.full((), 1 - part, device=parameters[0].device))
