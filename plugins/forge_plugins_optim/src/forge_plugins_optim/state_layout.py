"""State that is not of its parameter's shape, cut over the mesh as the parameter is, and sums over the cuts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from forge_core.ops.local_tensor import local_tensor


def zeros_along(parameter: torch.Tensor, shape: Sequence[int], dims: Sequence[int | None]) -> torch.Tensor:
    """fp32 zeros of ``shape``, on the parameter's device and cut over its mesh.

    Args:
        shape: of the whole tensor.
        dims: for each dimension of ``shape``, that of the parameter along which it is cut; ``None`` for one that every
            rank has whole, with any part of the parameter.
    """
    local = local_tensor(parameter)
    held = [length if dim is None else local.shape[dim] for length, dim in zip(shape, dims, strict=True)]
    zeros = torch.zeros(held, device=local.device)
    if not isinstance(parameter, DTensor):
        return zeros
    placements = [_along(placement, dims) for placement in parameter.placements]
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(
        zeros, parameter.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def _along(placement: Placement, dims: Sequence[int | None]) -> Placement:
    if not isinstance(placement, (Shard, _StridedShard)) or placement.dim not in dims:
        return Replicate()
    dim = dims.index(placement.dim)
    if isinstance(placement, _StridedShard):
        return _StridedShard(dim, split_factor=placement.split_factor)
    return Shard(dim)


def offset_in(parameter: torch.Tensor, dim: int) -> int:
    """Where in the whole parameter this rank's part begins along a dimension.

    torch's own arithmetic goes through tensors, for which a simulation on shapes alone has no values.
    """
    if not isinstance(parameter, DTensor):
        return 0
    mesh = parameter.device_mesh
    cuts = [
        (i, isinstance(placement, _StridedShard) and placement.split_factor > 1)
        for i, placement in enumerate(parameter.placements)
        if isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim
    ]
    plain, strided = ([i for i, one in cuts if one is is_strided] for is_strided in (False, True))
    offset, length = 0, parameter.shape[dim]
    for i in (*plain, *reversed(strided)):  # in which order they were cut, each as torch.chunk does
        each = -(-length // mesh.size(i))
        start = min(length, each * mesh.get_local_rank(i))
        offset, length = offset + start, min(each, length - start)
    return offset


def groups_across(parameter: torch.Tensor, dims: Sequence[int]) -> list[dist.ProcessGroup]:
    """The ranks among which the parameter is cut along any of ``dims``, one group for each axis of the mesh."""
    if not isinstance(parameter, DTensor):
        return []
    mesh = parameter.device_mesh
    return [
        mesh.get_group(i)
        for i, placement in enumerate(parameter.placements)
        if isinstance(placement, (Shard, _StridedShard)) and placement.dim in dims and mesh.size(i) > 1
    ]


def reduce_across(
    tensors: Sequence[torch.Tensor],
    groups: Sequence[Sequence[dist.ProcessGroup]],
    operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> None:
    """Reduce each tensor over its groups, in place, by one collective for each group.

    Args:
        tensors: fp32. Ranks of a group call with tensors of the same shapes in the same order.
    """
    for group in dict.fromkeys(group for own in groups for group in own):
        bucket = [tensor for tensor, own in zip(tensors, groups, strict=True) if group in own]
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.all_reduce(flat, operation, group=group)
        parts = flat.split([tensor.numel() for tensor in bucket])  # type: ignore[no-untyped-call]  # torch's
        torch._foreach_copy_(bucket, [part.view_as(one) for part, one in zip(parts, bucket, strict=True)])
