"""An exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from forge_core.contracts.callback import Callback, RunContext, StepContext
from forge_core.ops.local_tensor import local_tensor
from forge_plugins_optim.config import EMAConfig


class EMA(Callback):
    """``average ← d · average + (1 − d) · weight``, in fp32, with ``d = decay``, or ``min(decay, (1 + n) / (10 + n))``
    after n updates of the average with ``warm_up``.

    It begins with the weights that the run begins with. A step whose update is left out does not count. Weights that
    are never trained are their own average.
    """

    def __init__(self, config: EMAConfig) -> None:
        self._config = config
        self._weights: Mapping[str, torch.Tensor] = {}
        self._averages: dict[str, torch.Tensor] = {}
        self._updates = torch.zeros(())

    @torch.no_grad()
    def run_start(self, run: RunContext) -> None:
        self._weights = {name: one for name, one in run.parameters.items() if one.requires_grad}
        self._averages = {name: torch.zeros_like(one, dtype=torch.float32) for name, one in self._weights.items()}
        for name, average in self._averages.items():
            local_tensor(average).copy_(local_tensor(self._weights[name]))
        device = next((one.device for one in self._weights.values()), run.device)  # fsdp may keep them on the host
        self._updates = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def step_end(self, run: RunContext, context: StepContext) -> None:
        if context.step % self._config.interval:
            return
        counts = torch.ones_like(self._updates)
        if context.left_out is not None:
            counts -= context.left_out.to(self._updates)
        share = torch.full((), 1 - self._config.decay, device=self._updates.device)
        if self._config.warm_up:
            share = torch.maximum(share, 9 / (10 + self._updates))
        share = share * counts
        averages = [local_tensor(one) for one in self._averages.values()]
        weights = [local_tensor(one).float() for one in self._weights.values()]
        if averages:
            torch._foreach_lerp_(averages, weights, [share] * len(averages))
        self._updates += counts

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The averages, and how often they were updated."""
        return {"updates": self._updates, **{f"average.{name}": one for name, one in self._averages.items()}}

    def evaluation_weights(self) -> Mapping[str, torch.Tensor]:
        """The averages."""
        return self._averages
