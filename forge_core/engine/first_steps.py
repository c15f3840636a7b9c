"""What is looked at in the first two steps after each start, and not in every step, as the host has to wait for it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from forge_core.checkpoint.tensors import plain_values
from forge_core.engine.loss_check import CheckedLoss
from forge_core.engine.ranks import on_all_ranks
from forge_core.errors import PluginError

_STEPS = 2
"""What an optimizer does in backward shows in the second one at the latest, when it has state."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes: what the bits of a value are read as."""


class FirstSteps:
    """All ranks call the same methods at the same steps.

    Args:
        parameters: this rank's, by name.
        loss: what the executor computes.
        optimizer: names it in messages.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], loss: CheckedLoss, optimizer: str) -> None:
        self._parameters = parameters
        self._loss = loss
        self._optimizer = optimizer
        self._left = _STEPS
        self._before: Mapping[str, int] = {}
        loss.is_watched = True

    def before_gradients(self) -> None:
        """Nothing has been computed in this step."""
        if self._left:
            self._before = bit_sums(self._parameters)

    def after_gradients(self, step: int) -> None:
        """Gradients are there, and no update.

        Raises:
            PluginError: what the loss returns is not what its contract says; or parameters have changed.
        """
        if not self._left:
            return
        self._left -= 1
        on_all_ranks(lambda: self._refuse_what_is_wrong(step))
        self._before = {}
        self._loss.is_watched = self._loss.is_watched and self._left > 0

    def _refuse_what_is_wrong(self, step: int) -> None:
        if self._loss.problem:
            raise PluginError(self._loss.problem)
        after = bit_sums(self._parameters)
        changed = [name for name in after if after[name] != self._before[name]]
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise PluginError(
                f"step {step}: {changed[0]}{more} changed while gradients were computed. Only the step of "
                f"{self._optimizer} may change parameters, which the engine calls after gradients are summed over "
                "microbatches and ranks and are clipped. This is a bug in the optimizer if it updates in backward, and "
                "otherwise in the model"
            )


def bit_sums(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The sum of the bits of each tensor's elements on this rank, so that no difference is lost in rounding. The host
    waits once for each device."""
    on_device: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        values = plain_values(tensor.detach())
        local = values._local_tensor if isinstance(values, DTensor) else values
        total = local.contiguous().view(_INTEGERS[local.element_size()]).sum(dtype=torch.int64)
        on_device.setdefault(local.device, {})[name] = total
    return {
        name: total
        for sums in on_device.values()
        for name, total in zip(sums, torch.stack([*sums.values()]).tolist(), strict=True)
    }
