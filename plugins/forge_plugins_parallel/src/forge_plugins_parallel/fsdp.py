"""Fully sharded data parallelism with torch's FSDP2, and mixed precision on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from forge_core.contracts.parallel_pass import PassContext
from forge_plugins_parallel.config import FullyShardConfig


class FullyShard:
    """Each block is a unit of its own; embedding, norm and head form the root's.

    Parameters stay in the dtype in which they were built (fp32), are gathered in the compute dtype, and gradients are
    reduced in fp32 as *sums*: the engine divides by the global number of tokens, not by ranks.
    """

    def __init__(self, config: FullyShardConfig) -> None:
        self._config = config

    def apply(self, model: nn.Module, context: PassContext) -> tuple[nn.Module, Sequence[str]]:
        compute = torch.bfloat16 if context.job.train.precision == "bf16" else None
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
        mesh = _data_mesh(context.mesh.device_mesh)
        touched = []
        for name, block in model.blocks.items():  # type: ignore[union-attr,operator]  # declared by the model
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=self._config.reshard_after_forward)
            touched.append(f"blocks.{name}")
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                # a factor is otherwise applied by NCCL's PREMUL_SUM, which gloo does not have
                module.set_force_sum_reduction_for_comms(True)
        return model, [*touched, ""]


def _data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """One dimension to shard over; with copies of the model (HSDP), one before it to replicate over."""
    if mesh["dp_replicate"].size() > 1:
        return mesh["dp_replicate", "dp_shard"]
    return mesh["dp_shard"]
