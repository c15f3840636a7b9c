"""Fully sharded data parallelism with torch's FSDP2, and mixed precision on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from forge_core.contracts.parallel_pass import PassContext
from forge_core.errors import ConfigError
from forge_plugins_parallel.config import FullyShardConfig


class FullyShard:
    """Each block is a unit of its own; embedding, norm and head form the root's.

    Parameters stay in the dtype in which they were built (fp32), are gathered in the compute dtype, and gradients are
    reduced in fp32 as *sums*: the engine divides by the global number of tokens, not by ranks.

    With ``cpu_offload``, this rank's shards are in the host's memory. A unit's are copied to the device before they are
    gathered, and the reduced gradients are copied back; backward ends when all have arrived.
    """

    def __init__(self, config: FullyShardConfig) -> None:
        self._config = config
        self.parameters_on_host = config.cpu_offload

    def apply(self, model: nn.Module, context: PassContext) -> tuple[nn.Module, Sequence[str]]:
        compute = torch.bfloat16 if context.job.train.precision == "bf16" else None
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
        mesh = _data_mesh(context.mesh.device_mesh)
        if self._config.prefetch and mesh.size(mesh.ndim - 1) == 1:
            raise ConfigError(
                "parallel.passes.fsdp.prefetch: no rank shares its parameters, so that nothing is gathered"
            )
        options: dict[str, Any] = {
            "mesh": mesh,
            "shard_placement_fn": lambda parameter: _placement(parameter, mesh.size(mesh.ndim - 1)),
            "mp_policy": policy,
            "offload_policy": self._offload_policy(context.device),
        }
        touched = []
        for name, block in model.blocks.items():  # type: ignore[union-attr,operator]  # declared by the model
            fully_shard(block, reshard_after_forward=self._reshards(context), **options)
            touched.append(f"blocks.{name}")
        fully_shard(model, reshard_after_forward=False, **options)
        if self._config.prefetch:
            _prefetch(model, self._config.prefetch)
        if self._config.keep_gathered:
            _free_after_last_microbatch(model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                # a factor is otherwise applied by NCCL's PREMUL_SUM, which gloo does not have
                module.set_force_sum_reduction_for_comms(True)
        return model, [*touched, ""]

    def _offload_policy(self, device: torch.device) -> OffloadPolicy:
        if not self._config.cpu_offload:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=device.type == "cuda")  # copies from other memory would not overlap

    def _reshards(self, context: PassContext) -> bool:
        """Whether blocks free their parameters between forward and backward."""
        if self._config.keep_gathered:
            return False
        if self._config.reshard_after_forward == "auto":
            # a pipeline stage has many forwards before its backwards, and would gather the same parameters for each
            return context.mesh.degrees["pp"] == 1
        return self._config.reshard_after_forward == "always"


def _prefetch(model: Any, ahead: int) -> None:
    """Each unit, when it begins, has the next ones gathered: in forward after its own, in backward before."""
    blocks = list(model.blocks.values())
    forward, backward = [model, *blocks], [model, *reversed(blocks)]  # the root's has the embedding, and the head
    for i, unit in enumerate(forward):
        unit.set_modules_to_forward_prefetch(forward[i + 1 : i + 1 + ahead])
    for i, unit in enumerate(backward):
        unit.set_modules_to_backward_prefetch(backward[i + 1 : i + 1 + ahead])


def _free_after_last_microbatch(model: Any) -> None:
    """Microbatches whose gradients are not synchronised, which are all but the last, do not free parameters either."""
    synchronise = model.set_requires_gradient_sync

    def set_requires_gradient_sync(requires: bool, *, recurse: bool = True) -> None:
        synchronise(requires, recurse=recurse)
        model.set_reshard_after_backward(requires, recurse=recurse)

    model.set_requires_gradient_sync = set_requires_gradient_sync


def _placement(parameter: nn.Parameter, ranks: int) -> Shard | None:
    """Along the first dimension; along the second where tensor parallelism has cut the first into parts that are not
    even in their turn: a ``DTensor`` could not say where they belong.

    Raises:
        ConfigError: the second cannot be shared out evenly either.
    """
    if not isinstance(parameter, DTensor) or not any(one.is_shard(0) for one in parameter.placements):
        return None
    rows, *others = parameter.shape
    if rows % (ranks * parameter.device_mesh.size()) == 0:
        return None
    if not others or others[0] % ranks:
        raise ConfigError(
            f"parallel.tp = {parameter.device_mesh.size()} with parameters sharded over {ranks} ranks: a parameter of "
            f"shape {tuple(parameter.shape)} can be shared out evenly neither by its first dimension nor by its second"
        )
    return Shard(1)


def _data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """One dimension to shard over; with copies of the model (HSDP), one before it to replicate over.

    Ranks that share a sequence (``cp``) have gradients of the same parameters from other positions, just as ranks with
    other samples have, and so shard them with those.
    """
    shard = mesh["dp_shard"]
    if mesh["cp"].size() > 1:
        shard = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    if mesh["dp_replicate"].size() > 1:
        return DeviceMesh._concatenate([mesh["dp_replicate"], shard])
    return shard
