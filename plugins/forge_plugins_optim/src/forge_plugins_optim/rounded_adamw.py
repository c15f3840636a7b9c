"""AdamW for parameters that are kept in bf16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from forge_core.contracts.optimizer import NamedParameter, UpdateSize
from forge_core.ops.local_tensor import local_tensor
from forge_plugins_optim.adamw_step import adamw_step
from forge_plugins_optim.config import AdamWConfig
from forge_plugins_optim.foreach import ForeachOptimizer, Tensors
from forge_plugins_optim.parameter_groups import parameter_groups
from forge_plugins_optim.state_layout import offset_in
from forge_plugins_optim.stochastic_rounding import noise, rounded, seed_of

_MOMENTS = ("exp_avg", "exp_avg_sq")
"""As torch's AdamW calls them: a resumed run may go on with either."""


class RoundedAdamW(ForeachOptimizer):
    """AdamW that computes in fp32, and rounds bf16 parameters and moments up or down by chance.

    To the nearest, an update of less than 2⁻⁹ of a parameter would be lost in every step. Chance follows from the
    parameter's name, the count of its steps and the place of the element in the whole parameter: a resumed run goes on
    bit for bit, and copies on other ranks stay copies. fp32 parameters have fp32 moments, and nothing is rounded.
    """

    update_size: UpdateSize = "element"

    def __init__(self, config: AdamWConfig, /, *, parameters: Sequence[NamedParameter]) -> None:
        """
        Raises:
            ConfigError: a parameter group takes no parameter.
        """
        super().__init__(parameter_groups(parameters, config), {"betas": config.betas, "eps": config.eps})
        self._seeds = {one.parameter: seed_of(one.name) for one in parameters}

    def update(self, group: dict[str, Any], held: Tensors) -> None:
        is_taken = torch.ones((), device=held[0].device) if self.left_out is None else 1 - self.left_out
        for parameter, part, gradient in zip(held, *self.parts(held), strict=True):
            state = self.state[parameter]
            if "step" not in state:
                state["step"] = torch.zeros((), device=parameter.device)
                state.update({slot: torch.zeros_like(parameter) for slot in _MOMENTS})
            kept = [part, *(local_tensor(state[slot]) for slot in _MOMENTS)]
            values = [one.float() for one in kept]
            adamw_step(values[0], gradient.float(), values[1:], state["step"], group, is_taken)
            if part.dtype == torch.bfloat16:
                bits = noise(_positions(parameter), self._seeds[parameter], state["step"])
                for index, (one, value) in enumerate(zip(kept, values, strict=True)):
                    one.copy_(rounded(value, bits >> (16 * index)))


def _positions(parameter: torch.Tensor) -> torch.Tensor:
    """Of this rank's elements in the whole parameter, counted row by row."""
    local = local_tensor(parameter)
    positions = torch.zeros(local.shape, dtype=torch.int64, device=local.device)
    stride = 1
    for dim in reversed(range(local.ndim)):
        first = offset_in(parameter, dim)
        along = torch.arange(first, first + local.shape[dim], device=local.device) * stride
        positions += along.view(-1, *[1] * (local.ndim - 1 - dim))
        stride *= parameter.shape[dim]
    return positions
