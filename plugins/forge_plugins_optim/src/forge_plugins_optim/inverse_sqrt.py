"""One over the root of the step, after a linear warm-up."""

from __future__ import annotations

import math

from forge_core.contracts.scheduler import Schedule
from forge_plugins_optim.schedule_config import InverseSqrtConfig
from forge_plugins_optim.warm_up import after_warm_up, refuse_contradictions

_WITHOUT_WARM_UP = 10_000
"""The timescale of a run without warm-up, as in Hugging Face's ``get_inverse_sqrt_schedule``."""


def inverse_sqrt(config: InverseSqrtConfig, /, *, total_steps: int, tokens_per_step: int) -> Schedule:
    """With W steps of warm-up and T = ``timescale``: ``sqrt(T / (T + step − W))`` from step W on; with T = W, that is
    ``sqrt(W / step)`` (Vaswani et al., 2017, https://arxiv.org/abs/1706.03762, equation 3, without its factor).

    Raises:
        ConfigError: the warm-up is longer than the run.
    """
    warmup = refuse_contradictions(config, total_steps, tokens_per_step)
    timescale = config.timescale or warmup or _WITHOUT_WARM_UP
    return after_warm_up(warmup, lambda since: math.sqrt(timescale / (timescale + since)))
