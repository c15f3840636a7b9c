"""One step of AdamW in fp32."""

from __future__ import annotations

from typing import Any

import torch


def adamw_step(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    moments: list[torch.Tensor],
    count: torch.Tensor,
    group: dict[str, Any],
    is_taken: torch.Tensor,
) -> None:
    """Loshchilov and Hutter (2019, https://arxiv.org/abs/1711.05101), in place; nothing where ``is_taken`` is 0.

    Args:
        parameter: fp32, as ``gradient`` and both ``moments`` are.
        count: of steps before, a scalar on the device.
        group: ``betas``, ``eps``, ``lr``, ``weight_decay``.
    """
    (beta1, beta2), lr = group["betas"], group["lr"]
    momentum, square = moments
    count.add_(is_taken)
    at_least_one = count + (1 - is_taken)  # also if the first step is left out
    momentum.lerp_(gradient, (1 - beta1) * is_taken)
    square.lerp_(gradient.square(), (1 - beta2) * is_taken)
    root = (square / (1 - beta2**at_least_one)).sqrt_().add_(group["eps"])
    parameter.addcmul_(parameter, is_taken * (lr * group["weight_decay"]), value=-1)
    parameter.addcmul_(momentum / root, is_taken * lr / (1 - beta1**at_least_one), value=-1)
