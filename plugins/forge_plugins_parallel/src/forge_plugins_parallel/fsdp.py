"""Fully sharded data parallelism with torch's FSDP2, and mixed precision on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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

from forge_core.contracts.model import canonical_name
from forge_core.contracts.parallel_pass import PassContext
from forge_core.distributed.mesh import sharding_mesh
from forge_core.errors import ConfigError, PluginError
from forge_plugins_parallel.compute_dtype import cast_dtype
from forge_plugins_parallel.config import FullyShardConfig, even_dimension
from forge_plugins_parallel.end_units import EndUnit, end_units
from forge_plugins_parallel.float8_scales import scale_together
from forge_plugins_parallel.gradient_sums import sums_whole, whole_gradient_bytes
from forge_plugins_parallel.kept_whole import ComputeDtype, kept_whole
from forge_plugins_parallel.units import units_of


class FullyShard:
    """Each block is a unit of its own, and so is what the model names in ``units``, the embedding, and the head with
    the norm before it (``EndUnit``); the rest forms the root's.

    Parameters stay in the dtype in which they were built (fp32), are gathered in the compute dtype, and gradients are
    reduced in fp32 as *sums*: the engine divides by the global number of tokens, not by ranks.

    What ``keep_whole`` means is left alone: each rank has all of it, in the dtype in which it was built, and a copy in
    the compute dtype, with which it computes.

    With ``cpu_offload``, this rank's shards are in the host's memory. A unit's are copied to the device before they are
    gathered, and the reduced gradients are copied back; backward ends when all have arrived.
    """

    def __init__(self, config: FullyShardConfig) -> None:
        self._config = config
        self.parameters_on_host = config.cpu_offload

    def apply(self, model: nn.Module, context: PassContext) -> tuple[nn.Module, Sequence[str]]:
        _refuse_scalars(model)
        compute = cast_dtype(context.job.train.precision)
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
        whole = context.mesh.device_mesh
        mesh = _with_copies(whole, sharding_mesh(whole))
        experts = context.mesh.experts
        names = {id(parameter): canonical_name(name) for name, parameter in model.named_parameters()}
        options: dict[str, Any] = {
            "mesh": mesh,
            "shard_placement_fn": _placements(names, mesh, experts and _with_copies(whole, experts["expert_dp"])),
            "mp_policy": policy,
            "offload_policy": self._offload_policy(context.device),
        }
        kept = kept_whole(model, self._config.keep_whole, is_stage=context.mesh.degrees["pp"] > 1)
        if kept:
            options["ignored_params"] = set(kept.values())
        keeps_whole_gradients = sums_whole(whole_gradient_bytes(model), self._config.accumulate, context)
        is_whole = mesh.size(mesh.ndim - 1) == 1 and not self._config.cpu_offload
        reshards = self._config.reshards(pp=context.mesh.degrees["pp"], is_whole=is_whole)
        touched = []
        units = {name: unit for name, unit in units_of(model).items() if not _is_kept(unit.parameters(), kept)}
        for name, unit in units.items():
            fully_shard(unit, reshard_after_forward=reshards, **options)
            touched.append(name)
        ends = [end for end in end_units(model) if not _is_kept(end.parameters(), kept)]
        for end in ends:
            fully_shard(list(end.modules.values()), reshard_after_forward=False, **options)
            touched.append(end.name)
        fully_shard(model, reshard_after_forward=False, **options)
        for end in ends:
            end.hook(model, frees=reshards)
        if kept and compute is not None:
            model.register_forward_pre_hook(ComputeDtype(kept, model, compute))
        scale_together(model, mesh.size(mesh.ndim - 1), kept.values())
        _prefetch(model, list(units.values()), ends, self._config.prefetch)
        if not keeps_whole_gradients:
            _reduce_with_each_microbatch(model)
        by_itself = is_whole and self._config.reshard_after_forward == "auto" and context.mesh.degrees["pp"] == 1
        if self._config.keep_gathered or by_itself:
            _free_after_last_microbatch(model)
        is_alone = mesh.size() == 1 and experts is None  # to divide by 1 would cost another pass over the gradients
        if not is_alone:
            _reduce_sums(model)
        return model, [*touched, ""]

    def _offload_policy(self, device: torch.device) -> OffloadPolicy:
        if not self._config.cpu_offload:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=device.type == "cuda")  # copies from other memory would not overlap


def _is_kept(parameters: Iterable[nn.Parameter], kept: Mapping[str, nn.Parameter]) -> bool:
    """Return whether nothing of a unit is sharded."""
    own = {id(parameter) for parameter in parameters}
    return len(own) > 0 and own <= {id(parameter) for parameter in kept.values()}


def _refuse_scalars(model: nn.Module) -> None:
    """
    Raises:
        PluginError: a parameter has no dimension by which it could be sharded.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise PluginError(
                f"the parameter {canonical_name(name)} has no dimension by which fsdp could shard it; the module that "
                "it belongs to should give it the shape (1,)"
            )


def _prefetch(model: Any, units: Sequence[nn.Module], ends: Sequence[EndUnit], ahead: int) -> None:
    """Each unit, when it begins, has the next ones gathered: in forward after its own, in backward before.

    In any case the model has the embedding gathered, and in backward the last block; and the last block has the head.
    """
    entry = [end.sharded for end in ends if end.has_embedding]
    forward: list[Any] = [model, *units]
    backward: list[Any] = [model, *reversed(units)]
    before_heads = {end.last: end.sharded for end in ends if end.has_head}
    for block, head in before_heads.items():
        if block in forward:
            forward.insert(forward.index(block) + 1, head)
    for i, unit in enumerate(forward):
        following = forward[i + 1 : i + 1 + (ahead or unit in before_heads)]
        unit.set_modules_to_forward_prefetch([*entry, *following] if unit is model else following)
    for i, unit in enumerate(backward):
        unit.set_modules_to_backward_prefetch(backward[i + 1 : i + 1 + (ahead or unit is model)])


def _reduce_sums(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # a factor is otherwise applied by NCCL's PREMUL_SUM, which gloo does not have
            module.set_force_sum_reduction_for_comms(True)


def _reduce_with_each_microbatch(model: Any) -> None:
    """Over copies of the model, too: what torch holds back for the last microbatch is lost where that one does not use
    a unit."""
    model.set_requires_gradient_sync = lambda requires, *, recurse=True: None


def _free_after_last_microbatch(model: Any) -> None:
    """Microbatches whose gradients are not synchronised, which are all but the last, do not free parameters either."""
    synchronise = model.set_requires_gradient_sync

    def set_requires_gradient_sync(requires: bool, *, recurse: bool = True) -> None:
        synchronise(requires, recurse=recurse)
        model.set_reshard_after_backward(requires, recurse=recurse)

    model.set_requires_gradient_sync = set_requires_gradient_sync


def _placements(
    names: Mapping[int, str], mesh: DeviceMesh, expert_mesh: DeviceMesh | None
) -> Callable[[nn.Parameter], Any]:
    """Where FSDP is to shard a parameter: over ``mesh``, or over ``expert_mesh`` if expert parallelism has shared out
    its experts over the other ranks.

    Raises:
        ConfigError: torch is too old to shard parameters of one unit over several meshes.
    """
    if expert_mesh is None:
        return lambda parameter: _placement(parameter, mesh.size(mesh.ndim - 1), names[id(parameter)])
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
    except ImportError as error:
        raise ConfigError(
            f"parallel.ep: torch {torch.__version__} cannot shard experts and the rest of a block over different "
            "ranks; torch 2.13 can"
        ) from error
    is_hybrid = expert_mesh.ndim > 1
    info = HSDPMeshInfo(expert_mesh, 1, 0) if is_hybrid else FSDPMeshInfo(expert_mesh, 0)

    def placement(parameter: nn.Parameter) -> Any:
        if isinstance(parameter, DTensor) and "ep" in (parameter.device_mesh.mesh_dim_names or ()):
            place = _placement(parameter, expert_mesh.size(expert_mesh.ndim - 1), names[id(parameter)])
            return ShardPlacementResult(place, info)
        return _placement(parameter, mesh.size(mesh.ndim - 1), names[id(parameter)])

    return placement


def _placement(parameter: nn.Parameter, ranks: int, name: str = "a parameter") -> Shard | None:
    """Along the first dimension; along the next one where that has been cut into parts that are not even in their
    turn, as a ``DTensor`` could not say where they belong, or is that of a stack with fewer layers than ranks.

    Raises:
        ConfigError: no dimension can be shared out evenly.
    """
    parts = [1] * parameter.ndim
    if isinstance(parameter, DTensor):
        for placement, size in zip(parameter.placements, parameter.device_mesh.shape, strict=True):
            if isinstance(placement, Shard):
                parts[placement.dim] *= size
    is_stack = parameter.ndim > 2 and parameter.shape[0] < ranks
    if parts[0] == 1 and not is_stack:
        return None
    dim = even_dimension(parameter.shape, parts, ranks)
    if dim is not None:
        return Shard(dim)
    if parts[0] == 1:
        return None
    raise ConfigError(
        f"{name}, of the shape {tuple(parameter.shape)}, cut into {' × '.join(map(str, parts))} parts by "
        f"tensor or expert parallelism, has no dimension that {ranks} ranks could share evenly; change parallel.tp, ep "
        "or dp_shard"
    )


def _with_copies(mesh: DeviceMesh, shard: DeviceMesh) -> DeviceMesh:
    """One dimension to shard over; with copies of the model (HSDP), one before it to replicate over."""
    if mesh["dp_replicate"].size() > 1:
        return DeviceMesh._concatenate([mesh["dp_replicate"], shard])
    return shard
