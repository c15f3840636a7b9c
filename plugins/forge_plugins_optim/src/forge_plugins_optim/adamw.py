"""AdamW."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from forge_core.contracts.optimizer import NamedParameter
from forge_core.ops.local_tensor import local_tensor
from forge_plugins_optim.config import AdamWConfig
from forge_plugins_optim.foreach import TAIL
from forge_plugins_optim.parameter_groups import parameter_groups
from forge_plugins_optim.rounded_adamw import FUSED_DEVICES, MOMENTS, RoundedAdamW


def adamw(config: AdamWConfig, /, *, parameters: Sequence[NamedParameter]) -> torch.optim.Optimizer:
    """torch's AdamW (Loshchilov and Hutter, 2019, https://arxiv.org/abs/1711.05101) in its fused implementation.

    The fused kernel reads and writes each parameter and moment once. Where torch has none (other devices, dtypes that
    are not floating point), torch chooses the implementation. ``DTensor`` parameters are updated shard by shard. The
    moments have their parameter's dtype, and ``step`` is a scalar on its device. With another ``rounding`` than to the
    nearest it is ``RoundedAdamW``.

    Raises:
        ConfigError: a parameter group takes no parameter.
    """
    if config.keeps != "nearest":
        return RoundedAdamW(config, parameters=parameters)
    fusible = all(p.parameter.device.type in FUSED_DEVICES and p.parameter.is_floating_point() for p in parameters)
    groups = parameter_groups(parameters, config)
    optimizer = LocalAdamW(groups, betas=config.betas, eps=config.eps, fused=True if fusible else None)
    optimizer.scales_gradients = fusible
    optimizer.update_size = "element"  # type: ignore[attr-defined]  # the contract of parametrizations
    optimizer.register_step_pre_hook(_drop_tails)
    return optimizer


class LocalAdamW(torch.optim.AdamW):
    """Steps on this rank's parts of parameters, gradients and moments, as each element is updated by itself.

    Given the ``DTensor`` that they are parts of, torch would look up in every step how each of them is laid out, and in
    the first one work it out.
    """

    scales_gradients = False
    """Whether the kernel clips gradients, as the fused one does."""
    gradient_scale: torch.Tensor | None = None

    @property
    def grad_scale(self) -> torch.Tensor | None:
        """The number by which torch's kernel divides gradients."""
        return None if self.gradient_scale is None else 1 / self.gradient_scale

    def _init_group(self, group: dict[str, Any], *lists: list[torch.Tensor]) -> bool:
        is_complex = bool(super()._init_group(group, *lists))  # type: ignore[no-untyped-call]  # torch's
        for tensors in lists:
            tensors[:] = map(local_tensor, tensors)
        return is_complex


def _drop_tails(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Of a run that was resumed and had split weights before: its moments are then those of fp32 parameters."""
    for parameter, state in optimizer.state.items():
        if TAIL in state:
            del state[TAIL]
            state.update({name: state[name].to(parameter.dtype) for name in MOMENTS})
