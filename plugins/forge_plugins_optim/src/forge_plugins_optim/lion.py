"""Lion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from forge_core.contracts.optimizer import NamedParameter, UpdateSize
from forge_plugins_optim.config import LionConfig
from forge_plugins_optim.foreach import ForeachOptimizer, Tensors
from forge_plugins_optim.parameter_groups import parameter_groups


class Lion(ForeachOptimizer):
    """Algorithm 2 of Chen et al. (2023, https://arxiv.org/abs/2302.06675).

    Each element moves by exactly ``lr``, against the sign of ``β₁ · momentum + (1 − β₁) · gradient``.
    """

    update_size: UpdateSize = "element"

    def __init__(self, config: LionConfig, /, *, parameters: Sequence[NamedParameter]) -> None:
        """
        Raises:
            ConfigError: a parameter group takes no parameter.
        """
        super().__init__(parameter_groups(parameters, config), {"betas": config.betas})
        self.round_as(config.rounding, parameters)
        if config.compile:
            self.compile(_new_values, ["momentum"], 5)

    def update(self, group: dict[str, Any], held: Tensors) -> None:
        of_update, of_momentum = group["betas"]
        self.count(held)
        if self.compiled:
            kept = 1 - group["lr"] * group["weight_decay"]
            numbers = [group["lr"], kept, 1 - of_update, of_momentum, 1 - of_momentum]
            self.step_compiled(held, ["momentum"], numbers)
            return
        for parameters, gradients, momenta in self.pieces(held, "momentum"):
            self.shrink(parameters, group["lr"] * group["weight_decay"])
            updates = torch._foreach_lerp(momenta, gradients, 1 - of_update)
            torch._foreach_sign_(updates)
            self.move(parameters, updates, group["lr"])
            self.decay(momenta, of_momentum)
            torch._foreach_add_(momenta, gradients, alpha=1 - of_momentum)


def _new_values(
    weight: torch.Tensor, gradient: torch.Tensor, momentum: torch.Tensor, *numbers: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    lr, kept, of_gradient, decay, new = numbers
    update = (momentum + of_gradient * (gradient - momentum)).sign()
    return kept * weight - lr * update, decay * momentum + new * gradient
