"""AdamW."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forge_core.contracts.optimizer import NamedParameter
from forge_plugins_optim.config import AdamWConfig
from forge_plugins_optim.parameter_groups import parameter_groups
from forge_plugins_optim.rounded_adamw import RoundedAdamW

_FUSED_DEVICES = ("cpu", "cuda", "mps")


def adamw(config: AdamWConfig, /, *, parameters: Sequence[NamedParameter]) -> torch.optim.Optimizer:
    """torch's AdamW (Loshchilov and Hutter, 2019, https://arxiv.org/abs/1711.05101) in its fused implementation.

    The fused kernel reads and writes each parameter and moment once. Where torch has none (other devices, dtypes that
    are not floating point), torch chooses the implementation. ``DTensor`` parameters are updated shard by shard. The
    moments have their parameter's dtype, and ``step`` is a scalar on its device. With ``stochastic_rounding`` it is
    ``RoundedAdamW``.

    Raises:
        ConfigError: a parameter group takes no parameter.
    """
    if config.stochastic_rounding:
        return RoundedAdamW(config, parameters=parameters)
    fusible = all(p.parameter.device.type in _FUSED_DEVICES and p.parameter.is_floating_point() for p in parameters)
    groups = parameter_groups(parameters, config)
    optimizer = torch.optim.AdamW(groups, betas=config.betas, eps=config.eps, fused=True if fusible else None)
    optimizer.update_size = "element"  # type: ignore[attr-defined]  # the contract of parametrizations
    return optimizer
