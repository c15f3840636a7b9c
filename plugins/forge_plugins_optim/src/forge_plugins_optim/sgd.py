"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from forge_core.contracts.optimizer import NamedParameter
from forge_plugins_optim.config import SGDConfig
from forge_plugins_optim.element_wise import ElementWise, Tensors, shrink
from forge_plugins_optim.parameter_groups import parameter_groups


class SGD(ElementWise):
    """``momentum ← μ · momentum + gradient``, and a step of ``lr`` against it, or against ``gradient + μ · momentum``
    (Nesterov), as ``torch.optim.SGD`` without dampening."""

    def __init__(self, config: SGDConfig, /, *, parameters: Sequence[NamedParameter]) -> None:
        """
        Raises:
            ConfigError: a parameter group takes no parameter.
        """
        self.slots = ("momentum",) if config.momentum else ()  # type: ignore[misc]  # the same for all of a run
        keys = {"momentum": config.momentum, "nesterov": config.nesterov, "decoupled": config.decoupled_weight_decay}
        super().__init__(parameter_groups(parameters, config), keys)

    def update(self, group: dict[str, Any], parameters: Tensors, gradients: Tensors, *state: Tensors) -> None:
        lr, decay, momentum = group["lr"], group["weight_decay"], group["momentum"]
        steps: Sequence[torch.Tensor] = gradients
        if group["decoupled"]:
            shrink(parameters, lr * decay)
        elif decay:
            steps = torch._foreach_add(gradients, parameters, alpha=decay)
        for momenta in state:
            torch._foreach_copy_(momenta, torch._foreach_add(steps, momenta, alpha=momentum))
            steps = torch._foreach_add(steps, momenta, alpha=momentum) if group["nesterov"] else momenta
        torch._foreach_add_(parameters, steps, alpha=-lr)
