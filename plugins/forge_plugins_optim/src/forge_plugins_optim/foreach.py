"""Optimizers that step all parameters of a group at once, by torch's foreach operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from forge_core.ops.local_tensor import local_tensor

Tensors = list[torch.Tensor]


class ForeachOptimizer(torch.optim.Optimizer):
    """An optimizer says by ``update`` how the parameters of a group change, given what this rank holds of them."""

    def update(self, group: dict[str, Any], held: Tensors) -> None:
        """Change parameters and state in place.

        Args:
            group: the hyper-parameters.
            held: the group's parameters that have a gradient.
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
                self.update(group, held)
        return loss

    def slot(self, held: Tensors, name: str) -> Tensors:
        """This rank's parts of a state of the parameters' shape, dtype and layout; zero before the first step."""
        for parameter in held:
            if name not in self.state[parameter]:
                self.state[parameter][name] = torch.zeros_like(parameter)
        return [local_tensor(self.state[parameter][name]) for parameter in held]


def parts(held: Tensors) -> tuple[Tensors, Tensors]:
    """This rank's parts of parameters, and of their gradients."""
    gradients = [local_tensor(parameter.grad) for parameter in held if parameter.grad is not None]
    return [local_tensor(parameter) for parameter in held], gradients


def shrink(parameters: Tensors, part: float) -> None:
    """Multiply by ``1 − part`` in place: decoupled weight decay.

    The factor is a tensor, as on a CPU a number would be rounded to the parameters' dtype first.
    """
    if part:
        torch._foreach_mul_(parameters, torch.full((), 1 - part, device=parameters[0].device))
