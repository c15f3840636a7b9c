"""Schedule-free AdamW."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from forge_core.contracts.optimizer import NamedParameter, UpdateSize
from forge_core.ops.local_tensor import local_tensor
from forge_plugins_optim.config import ScheduleFreeAdamWConfig
from forge_plugins_optim.foreach import ForeachOptimizer, Tensors
from forge_plugins_optim.parameter_groups import parameter_groups

_COUNTS = ("step", "lr_max", "weight_sum")
"""Scalars of each parameter, which a phase may freeze for a while: its steps, the highest learning rate of them, and
the sum of their weights in the average."""


@attrs.frozen
class _Factors:
    """Factors of one update, a 0-d tensor for each parameter."""

    correction: Tensors
    """``1 − β₂ᵏ``"""
    share: Tensors
    """``c``, the weight of this step in the average."""
    stride: Tensors
    """The factor on the direction by which the parameter moves beside the average."""

    def of(self, some: slice) -> _Factors:
        """Those of some parameters."""
        return _Factors(self.correction[some], self.share[some], self.stride[some])


class ScheduleFreeAdamW(ForeachOptimizer):
    """Algorithm 1 of Defazio et al. (2024, https://arxiv.org/abs/2405.15682), with the weights of the average that
    their implementation has: ``kʳ · lr_maxᵖ`` for step k.

    The parameter is y, at which gradients are taken; ``z`` is in the state. The average x, which is evaluated, is
    ``z + (y − z) / β₁`` and needs no memory. In step k, with ``c`` the weight of the step over that of all steps::

        direction = gradient / (√(v / (1 − β₂ᵏ)) + ε) + weight_decay · y
        y ← y + c · (z − y) + lr · (β₁ · (1 − c) − 1) · direction
        z ← z − lr · direction
    """

    update_size: UpdateSize = "element"

    def __init__(self, config: ScheduleFreeAdamWConfig, /, *, parameters: Sequence[NamedParameter]) -> None:
        """
        Raises:
            ConfigError: a parameter group takes no parameter.
        """
        keys = ("betas", "eps", "r", "weight_lr_power")
        super().__init__(parameter_groups(parameters, config), {key: getattr(config, key) for key in keys})
        self.round_as(config.rounding, parameters)
        if config.compile:
            self.compile(_new_values, ["z", "exp_avg_sq"], 8)
        self._names = {one.parameter: one.name for one in parameters}

    @torch.no_grad()
    def evaluation_weights(self) -> Mapping[str, torch.Tensor]:
        """The averages x; a parameter that has never been updated is its own."""
        weights = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                average = weights[self._names[parameter]] = torch.zeros_like(parameter, dtype=torch.float32)
                local_tensor(average).copy_(self.exact(parameter))
                if state := self.state.get(parameter):
                    local_tensor(average).lerp_(local_tensor(state["z"]).float(), 1 - 1 / group["betas"][0])
        return weights

    def update(self, group: dict[str, Any], held: Tensors) -> None:
        for parameter in held:
            if "z" not in self.state[parameter]:
                self._begin(parameter)
        factors = self._advance(group, held)
        if self.compiled:
            beta, of_parameters = group["betas"][1], (factors.correction, factors.share, factors.stride)
            numbers = [group["lr"], group["weight_decay"], group["eps"], beta, 1 - beta, *of_parameters]
            self.step_compiled(held, ["z", "exp_avg_sq"], numbers)
            return
        for part, of_part in self._parts_of(held, factors):
            for parameters, gradients, fast, squares in self.pieces(part, "z", "exp_avg_sq"):
                self.decay(squares, group["betas"][1])
                torch._foreach_addcmul_(squares, gradients, gradients, value=1 - group["betas"][1])
                roots = torch._foreach_div(squares, of_part.correction)
                torch._foreach_sqrt_(roots)
                torch._foreach_add_(roots, group["eps"])
                torch._foreach_div_(gradients, roots)
                if group["weight_decay"]:
                    torch._foreach_add_(gradients, parameters, alpha=group["weight_decay"])
                torch._foreach_lerp_(parameters, fast, [one.to(parameters[0].dtype) for one in of_part.share])
                self.move(fast, gradients, group["lr"])
                torch._foreach_mul_(gradients, of_part.stride)
                torch._foreach_add_(parameters, gradients)

    def _begin(self, parameter: torch.Tensor) -> None:
        self.slot([parameter], "z")[0].copy_(self.exact(parameter))
        wide = torch.float32 if parameter.device.type == "mps" else torch.float64  # fp32 stops counting at 2²⁴
        for name in _COUNTS:
            self.state[parameter][name] = torch.zeros((), dtype=wide, device=parameter.device)

    def _advance(self, group: dict[str, Any], held: Tensors) -> _Factors:
        """Count this step, unless it is left out."""
        lr, (beta, beta_of_squares) = group["lr"], group["betas"]
        counts = [self.state[parameter][name] for name in _COUNTS for parameter in held]
        before = torch.stack(counts).view(len(_COUNTS), -1)
        steps, highest = before[0] + 1, before[1].clamp(min=lr)
        weights = steps ** group["r"] * highest ** group["weight_lr_power"]
        sums = before[2] + weights
        share = weights / sums.clamp(min=torch.finfo(sums.dtype).tiny)  # 0 while the learning rate is 0
        stride = lr * (beta * (1 - share) - 1)
        after = torch.stack((steps, highest, sums))
        if self.left_out is not None:
            left_out = self.left_out.bool()
            after = torch.where(left_out, before, after)
            share, stride = (one.masked_fill(left_out, 0) for one in (share, stride))
        torch._foreach_copy_(counts, after.view(-1).unbind())
        correction = 1 - beta_of_squares**steps
        return _Factors(*([*one.float().unbind()] for one in (correction, share, stride)))

    def _parts_of(self, held: Tensors, factors: _Factors) -> Iterator[tuple[Tensors, _Factors]]:
        """As ``pieces`` has them."""
        start = 0
        for bucket in self.buckets(held):
            yield bucket, factors.of(slice(start, start + len(bucket)))
            start += len(bucket)


def _new_values(
    weight: torch.Tensor, gradient: torch.Tensor, fast: torch.Tensor, squares: torch.Tensor, *numbers: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    lr, weight_decay, eps, decay, new, correction, share, stride = numbers
    squares = decay * squares + new * gradient * gradient
    direction = gradient / ((squares / correction).sqrt() + eps) + weight_decay * weight
    return weight + share * (fast - weight) + stride * direction, fast - lr * direction, squares
