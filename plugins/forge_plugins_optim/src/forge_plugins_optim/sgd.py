"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from forge_core.contracts.optimizer import NamedParameter
from forge_plugins_optim.config import SGDConfig
from forge_plugins_optim.foreach import ForeachOptimizer, Tensors, parts, shrink
from forge_plugins_optim.parameter_groups import parameter_groups


class SGD(ForeachOptimizer):
    """``momentum ← μ · momentum + gradient``, and a step of ``lr`` against it, or against ``gradient + μ · momentum``
    (Nesterov), as ``torch.optim.SGD`` without dampening."""

    def __init__(self, config: SGDConfig, /, *, parameters: Sequence[NamedParameter]) -> None:
        """
        Raises:
            ConfigError: a parameter group takes no parameter.
        """
        keys = {"momentum": config.momentum, "nesterov": config.nesterov, "decoupled": config.decoupled_weight_decay}
        super().__init__(parameter_groups(parameters, config), keys)

    def update(self, group: dict[str, Any], held: Tensors) -> None:
        parameters, gradients = parts(held)
        lr, decay, momentum = group["lr"], group["weight_decay"], group["momentum"]
        steps: tuple[torch.Tensor, ...] | Tensors = gradients
        if group["decoupled"]:
            shrink(parameters, lr * decay)
        elif decay:
            steps = torch._foreach_add(gradients, parameters, alpha=decay)
        if momentum:
            momenta = self.slot(held, "momentum")
            torch._foreach_copy_(momenta, torch._foreach_add(steps, momenta, alpha=momentum))
            steps = torch._foreach_add(steps, momenta, alpha=momentum) if group["nesterov"] else momenta
        torch._foreach_add_(parameters, steps, alpha=-lr)
