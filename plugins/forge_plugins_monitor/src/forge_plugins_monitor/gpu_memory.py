"""What CUDA's allocator has taken from the GPU, and how often it ran short."""

from __future__ import annotations

import torch
import torch.distributed as dist

from forge_core.contracts.callback import Callback, RunContext, StepContext
from forge_core.errors import ConfigError
from forge_plugins_monitor.config import GpuMemoryConfig


class GpuMemory(Callback):
    """Reports in logged steps, of the rank that has most:

    - ``memory_reserved_gib``: the most that the allocator has held so far, in GiB, with what it keeps for later. Beside
      ``memory_gib`` it tells what is lost to pieces that fit nothing.
    - ``memory_retries``: how often there was no piece large enough, so that it freed what it kept and asked again. Each
      makes a step slower; the next one may fail.

    The host waits for no device; ranks agree by one collective on two numbers.

    Raises:
        ConfigError: from the constructor, if this machine has no CUDA.
    """

    def __init__(self, config: GpuMemoryConfig) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(
                "gpu_memory reports the memory of CUDA, and torch sees no GPU on this machine; take it out"
            )

    def step_end(self, run: RunContext, context: StepContext) -> None:
        if not context.logged:
            return
        stats = torch.cuda.memory_stats(run.device)
        values = torch.zeros(2, dtype=torch.float64, device=run.device)
        values[0].fill_(stats.get("reserved_bytes.all.peak", 0) / 2**30)
        values[1].fill_(stats.get("num_alloc_retries", 0))
        if run.world_size > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        values /= run.mesh.degrees["pp"]  # over whose stages they are summed
        run.report({"memory_reserved_gib": values[0], "memory_retries": values[1]})
