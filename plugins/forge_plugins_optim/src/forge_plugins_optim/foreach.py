"""Optimizers that step all parameters of a group at once, by torch's foreach operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from forge_core.ops.local_tensor import local_tensor

Tensors = list[torch.Tensor]
_IN_CACHE = 2**16
"""Elements. Four such tensors in fp32 take 1 MiB."""


class ForeachOptimizer(torch.optim.Optimizer):
    """An optimizer says by ``update`` how the parameters of a group change, given what this rank holds of them.

    Where ``left_out`` is 1, gradients are zero, ``decay`` keeps a state as it is, and ``shrink`` and ``move`` leave
    parameters as they are: an update that is made of these changes nothing.
    """

    leaves_out = True
    left_out: torch.Tensor | None = None

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

    def parts(self, held: Tensors) -> tuple[Tensors, Tensors]:
        """This rank's parts of parameters, and of their gradients, which are zero in a step that is left out."""
        gradients = [local_tensor(parameter.grad) for parameter in held if parameter.grad is not None]
        if self.left_out is not None:
            for gradient in gradients:
                gradient.masked_fill_(self.left_out.bool(), 0)
        return [local_tensor(parameter) for parameter in held], gradients

    def pieces(self, held: Tensors, *slots: str) -> Iterator[list[Tensors]]:
        """Parameters, their gradients, and states, for an update that treats each element by itself.

        On a CPU they come in pieces that stay in its cache from the first operation to the last; elsewhere all at once.
        """
        lists = [*self.parts(held), *(self.slot(held, name) for name in slots)]
        if lists[0][0].device.type != "cpu":
            yield lists
            return
        for of_one in zip(*lists, strict=True):
            is_flat = all(tensor.is_contiguous() for tensor in of_one)
            cut = [tensor.view(-1).split(_IN_CACHE) if is_flat else (tensor,) for tensor in of_one]
            for piece in zip(*cut, strict=True):
                yield [[tensor] for tensor in piece]

    def decay(self, state: Tensors, factor: float) -> None:
        """Multiply a state by ``factor`` in place."""
        torch._foreach_mul_(state, self._unless_left_out(factor, state[0]))

    def shrink(self, parameters: Tensors, part: float) -> None:
        """Multiply by ``1 − part`` in place: decoupled weight decay."""
        if part:
            torch._foreach_mul_(parameters, self._unless_left_out(1 - part, parameters[0]))

    def move(self, parameters: Tensors, steps: Tensors | tuple[torch.Tensor, ...], lr: float) -> None:
        """Subtract ``lr · steps`` in place."""
        if self.left_out is not None:
            steps = torch._foreach_mul(steps, 1 - self.left_out)
        torch._foreach_add_(parameters, steps, alpha=-lr)

    def _unless_left_out(self, factor: float, like: torch.Tensor) -> Any:
        """The factor, as a tensor where a number would be rounded to the dtype of what it multiplies first, as a CPU
        does."""
        if self.left_out is None and (like.dtype == torch.float32 or like.device.type != "cpu"):
            return factor
        given = torch.full((), factor, device=like.device)
        return given if self.left_out is None else torch.where(self.left_out.bool(), 1.0, given)
