"""How long a rank waits for the others: long while things are built and compiled, shorter afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from math import ceil

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo, _world

from forge_core.config.sections import RunSection
from forge_core.contracts.callback import Callback, RunContext

CHECKPOINT_GROUP = "forge_checkpoint"
"""The process group of the saver, which has a time limit of its own."""
_GRACE = 60.0
"""Seconds that NCCL gets on top: its watchdog ends the process without a word, and by then the supervisor has said
which rank is lost."""


class Timeouts(Callback):
    """``run.first_step_timeout`` for the first step of this process, and ``run.step_timeout`` from then on; says so if
    that is not twice what steps take."""

    def __init__(self, run: RunSection) -> None:
        self._seconds = run
        self._steps = 0
        self._logged = 0

    def run_start(self, run: RunContext) -> None:
        set_timeouts(self._seconds.first_step_timeout)

    def step_start(self, run: RunContext, step: int) -> None:
        self._steps += 1
        if self._steps == 2:
            set_timeouts(self._seconds.step_timeout)

    def step_logged(self, run: RunContext, step: int, metrics: Mapping[str, float]) -> None:
        self._logged += 1
        limit, seconds = self._seconds.step_timeout, metrics["step_seconds"]
        if self._logged == 2 and limit < 2 * seconds:  # the first has the first step in it
            run.log(
                f"run.step_timeout = {limit:g} is little: steps take {seconds:.1f} s, and one that takes longer than "
                f"the timeout ends the run; {ceil(2 * seconds)} would be twice that"
            )


@contextmanager
def longer_timeouts(run: RunSection) -> Iterator[None]:
    """``run.first_step_timeout`` once more, for what a step does not do."""
    set_timeouts(run.first_step_timeout)
    yield
    set_timeouts(run.step_timeout)


def set_timeouts(seconds: float) -> None:
    """For all process groups of this rank, whoever has made them, and for collectives that start from now on; only that
    of checkpoints has its own."""
    if dist.get_world_size() == 1:
        return
    for group in list(_world.pg_map):
        if group.group_desc == CHECKPOINT_GROUP:
            continue
        for device in group._device_types:
            backend = group._get_backend(torch.device(device))
            grace = 0.0 if isinstance(backend, ProcessGroupGloo) else _GRACE
            backend._set_default_timeout(timedelta(seconds=seconds + grace))
