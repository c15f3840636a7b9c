"""AdamW for parameters that are kept in bf16."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import Any

import torch
from torch.optim.adamw import adamw as step_of_torch

from forge_core.contracts.optimizer import NamedParameter, UpdateSize
from forge_core.ops.local_tensor import local_tensor
from forge_plugins_optim.config import AdamWConfig
from forge_plugins_optim.foreach import ForeachOptimizer, Tensors
from forge_plugins_optim.parameter_groups import parameter_groups
from forge_plugins_optim.stochastic_rounding import seed_of

MOMENTS = ("exp_avg", "exp_avg_sq")
"""As torch's AdamW calls them: a resumed run may go on with either."""
FUSED_DEVICES = ("cpu", "cuda", "mps")
"""Where torch has AdamW in one kernel."""


class RoundedAdamW(ForeachOptimizer):
    """AdamW that computes in fp32, by torch's kernel, what it keeps in bf16.

    With ``rounding = "split"`` a parameter's tail is kept, so that nothing is rounded: after any number of steps it is
    what torch's AdamW makes of fp32 parameters, bit for bit, given the same gradients and ``moments = "fp32"``.
    Otherwise it is rounded up or down by chance, as moments in bf16 are: to the nearest, an update of less than 2⁻⁹ of
    a value would be lost in every step.

    fp32 parameters have fp32 moments, and nothing is rounded.
    """

    update_size: UpdateSize = "element"

    def __init__(self, config: AdamWConfig, /, *, parameters: Sequence[NamedParameter]) -> None:
        """
        Raises:
            ConfigError: a parameter group takes no parameter.
        """
        super().__init__(parameter_groups(parameters, config), {"betas": config.betas, "eps": config.eps})
        self.splits = config.keeps == "split"
        self._moments = torch.float32 if self.splits and config.moments != "bf16" else torch.bfloat16
        if config.compile:
            self.compile(_new_values, MOMENTS, 8)
        self.seeds = {one.parameter: seed_of(one.name) for one in parameters}

    def update(self, group: dict[str, Any], held: Tensors) -> None:
        for parameter in held:
            if "step" not in self.state[parameter]:
                self.state[parameter]["step"] = torch.zeros((), device=parameter.device)
        if self.compiled:
            self._step_compiled(group, held)
            return
        for bucket in self.buckets(held):
            weights = [self.exact(parameter) for parameter in bucket]
            kept = [[self.slot([one], name, self._dtype(one))[0] for one in bucket] for name in MOMENTS]
            moments = [[one.float() for one in own] for own in kept]
            self._step(group, bucket, weights, moments)
            for index, parameter in enumerate(bucket):
                own = [(before[index], after[index]) for before, after in zip(kept, moments, strict=True)]
                self._keep(parameter, weights[index], own)

    def _step_compiled(self, group: dict[str, Any], held: Tensors) -> None:
        (beta1, beta2), lr = group["betas"], group["lr"]
        counts = [self.state[parameter]["step"] for parameter in held]
        taken = torch.stack(counts) + 1
        corrections = [[*_correction(beta, taken).unbind()] for beta in (beta1, beta2)]
        torch._foreach_add_(counts, 1.0 if self.left_out is None else [1 - self.left_out] * len(counts))
        kept = 1 - lr * group["weight_decay"]
        numbers = [lr, kept, group["eps"], 1 - beta1, beta2, 1 - beta2, *corrections]
        self.step_compiled(held, MOMENTS, numbers)

    def _step(self, group: dict[str, Any], bucket: Tensors, weights: Tensors, moments: list[Tensors]) -> None:
        """The kernel takes elements as they lie in memory, so that gradients must lie as weights do."""
        (beta1, beta2), is_fused = group["betas"], weights[0].device.type in FUSED_DEVICES
        means, squares = moments
        step_of_torch(
            weights,
            [torch.empty_like(one).copy_(own) for one, own in zip(weights, self.parts(bucket)[1], strict=True)],
            means,
            squares,
            [],
            [self.state[parameter]["step"] for parameter in bucket],
            fused=is_fused,
            found_inf=self.left_out if is_fused else None,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _keep(
        self, parameter: torch.Tensor, weight: torch.Tensor, moments: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """Round what is in bf16."""
        to_round = [(kept, new) for kept, new in moments if kept is not new]
        if self.is_split(parameter) or parameter.dtype != torch.bfloat16:
            self.keep(parameter, weight)
        else:
            to_round.insert(0, (local_tensor(parameter), weight))
        if to_round:
            self.round(parameter, to_round)

    def _dtype(self, parameter: torch.Tensor) -> torch.dtype:
        """That of its moments."""
        return self._moments if parameter.dtype == torch.bfloat16 else parameter.dtype


def _correction(beta: float, steps: torch.Tensor) -> torch.Tensor:
    """``1 − betaᵏ`` after k steps, to the last bits of fp32 where beta is almost 1, too."""
    return -torch.expm1(steps * log(beta)) if beta else torch.ones_like(steps)


def _new_values(
    weight: torch.Tensor, gradient: torch.Tensor, mean: torch.Tensor, square: torch.Tensor, *numbers: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    lr, kept, eps, of_mean, decay, of_square, correction, of_squares = numbers
    mean = mean + of_mean * (gradient - mean)
    square = decay * square + of_square * gradient * gradient
    root = (square / of_squares).sqrt() + eps
    return kept * weight - lr / correction * mean / root, mean, square
