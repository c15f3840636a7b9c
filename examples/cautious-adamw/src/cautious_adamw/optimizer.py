"""AdamW that leaves out what goes against the gradient."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cautious_adamw.config import CautiousAdamWConfig
from forge_core.contracts.optimizer import NamedParameter

_DECAYED = ("matrix", "expert", "head")
_LEAST_SHARE = 1e-3
"""By which what is kept is divided at least: where almost nothing is, an update would be made enormous."""


class CautiousAdamW(torch.optim.Optimizer):
    """Algorithm 2 of Liang et al., "Cautious Optimizers: Improving Training with One Line of Code"
    (https://arxiv.org/abs/2411.16085): of AdamW's update, elements whose sign is not that of the gradient are left out,
    and the others divided by the share of those that are kept.

    That share is of a whole parameter. Shards of one are ``DTensor``s, whose sum is over all of them.
    """

    def __init__(self, config: CautiousAdamWConfig, /, *, parameters: Sequence[NamedParameter], **_: object) -> None:
        self.config = config
        decayed = [one.parameter for one in parameters if one.role in _DECAYED]
        others = [one.parameter for one in parameters if one.role not in _DECAYED]
        groups: list[dict[str, Any]] = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        super().__init__([group for group in groups if group["params"]], {"lr": config.lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # as torch's
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"], group["weight_decay"])
        return loss

    def _update(self, parameter: torch.Tensor, lr: float, weight_decay: float) -> None:
        gradient, state, (first, second) = parameter.grad, self.state[parameter], self.config.betas
        assert gradient is not None, "step looks"
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["mean"], state["square"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        mean = state["mean"].lerp_(gradient, 1 - first)
        square = state["square"].lerp_(gradient * gradient, 1 - second)
        spread = (square / (1 - second ** state["step"])).sqrt_().add_(self.config.eps)
        update = mean / (1 - first ** state["step"]) / spread
        if self.config.cautious:
            kept = (mean * gradient > 0).to(update.dtype)
            share = kept.sum() / parameter.numel()
            update = update * kept / share.clamp(min=_LEAST_SHARE)
        parameter.mul_(1 - lr * weight_decay).sub_(update, alpha=lr)
