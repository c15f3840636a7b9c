"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from forge_core.contracts.optimizer import NamedParameter, UpdateSize
from forge_plugins_optim.config import SGDConfig
from forge_plugins_optim.foreach import ForeachOptimizer, Tensors
from forge_plugins_optim.parameter_groups import parameter_groups


class SGD(ForeachOptimizer):
    """``momentum ← μ · momentum + gradient``, and a step of ``lr`` against it, or against ``gradient + μ · momentum``
    (Nesterov), as ``torch.optim.SGD`` without dampening."""

    update_size: UpdateSize = "gradient"

    def __init__(self, config: SGDConfig, /, *, parameters: Sequence[NamedParameter]) -> None:
        """
        Raises:
            ConfigError: a parameter group takes no parameter.
        """
        keys = {"momentum": config.momentum, "nesterov": config.nesterov, "decoupled": config.decoupled_weight_decay}
        super().__init__(parameter_groups(parameters, config), keys)
        self.round_as(config.rounding, parameters)
        if config.compile:
            self.compile(_new_values(config), ["momentum"] if config.momentum else [], 4)

    def update(self, group: dict[str, Any], held: Tensors) -> None:
        slots = ("momentum",) if group["momentum"] else ()
        for parameter in held if not slots else ():  # of a run that had momentum before it was resumed
            self.state.get(parameter, {}).pop("momentum", None)
        self.count(held)
        if self.compiled:
            lr, decay = group["lr"], group["weight_decay"]
            added, kept = (0.0, 1 - lr * decay) if group["decoupled"] else (decay, 1.0)
            self.step_compiled(held, slots, [lr, kept, added, group["momentum"]])
            return
        for parameters, gradients, *state in self.pieces(held, *slots):
            self._update_piece(group, parameters, gradients, *state)

    def _update_piece(self, group: dict[str, Any], parameters: Tensors, gradients: Tensors, *state: Tensors) -> None:
        lr, decay, momentum = group["lr"], group["weight_decay"], group["momentum"]
        steps: tuple[torch.Tensor, ...] | Tensors = gradients
        if group["decoupled"]:
            self.shrink(parameters, lr * decay)
        elif decay:
            steps = torch._foreach_add(gradients, self._kept(parameters), alpha=decay)
        for momenta in state:
            self.decay(momenta, momentum)
            torch._foreach_add_(momenta, steps)
            steps = torch._foreach_add(steps, momenta, alpha=momentum) if group["nesterov"] else momenta
        self.move(parameters, steps, lr)

    def _kept(self, parameters: Tensors) -> Tensors | tuple[torch.Tensor, ...]:
        """The parameters; zeros in a step that is left out."""
        return parameters if self.left_out is None else torch._foreach_mul(parameters, 1 - self.left_out)


def _new_values(config: SGDConfig) -> Callable[..., tuple[torch.Tensor, ...]]:
    def new_values(weight: torch.Tensor, gradient: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
        *momenta, lr, kept, added, momentum = others
        step = gradient if config.decoupled_weight_decay else gradient + added * weight
        if not momenta:
            return (kept * weight - lr * step,)
        (running,) = momenta
        running = momentum * running + step
        step = step + momentum * running if config.nesterov else running
        return kept * weight - lr * step, running

    return new_values
