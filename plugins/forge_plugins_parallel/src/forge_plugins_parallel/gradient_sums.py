"""Where FSDP sums the gradients of a step's microbatches: whole on each rank, or in shards."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from forge_core.contracts.parallel_pass import PassContext
from forge_core.ops.local_tensor import local_tensor

SMALL = 1 / 16
"""``auto`` sums whole gradients where they take at most this part of a GPU's memory."""


def whole_gradient_bytes(model: nn.Module) -> float:
    """Bytes of fp32 gradients of all parameters of this rank, before they are sharded."""
    return 4.0 * sum(local_tensor(parameter).numel() for parameter in model.parameters())


def sums_whole(fp32_bytes: float, accumulate: Literal["auto", "sharded", "whole"], context: PassContext) -> bool:
    """Return whether each rank keeps whole gradients in fp32 until the step's last microbatch. All ranks call it
    together, and modules that share parameters get the same answer.

    Args:
        fp32_bytes: ``whole_gradient_bytes`` of the model.
    """
    if (context.job.train.grad_accumulation or 1) == 1:
        return False
    if context.mesh.degrees["pp"] > 1:
        return True  # a schedule reduces the gradients of a stage once a step
    if accumulate != "auto":
        return accumulate == "whole"
    memory = _memory(context)
    return memory is None or fp32_bytes <= SMALL * memory


def _memory(context: PassContext) -> float | None:
    """Bytes of a rank's GPU, planned or present, the least of all ranks; ``None`` on other devices."""
    if context.planned_gpu is not None:
        return context.planned_gpu.memory_gib * 2**30
    if context.device.type != "cuda":
        return None
    least = torch.tensor(torch.cuda.get_device_properties(context.device).total_memory, device=context.device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return float(least)
