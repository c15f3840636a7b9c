"""The global norm of the gradient, and clipping by it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from forge_core.engine.mesh import Mesh


def clip_gradients(gradients: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale the gradients by ``min(1, max_norm / norm)``, in place; a ``max_norm`` of 0 leaves them as they are.

    Args:
        gradients: this rank's.
        norm: their ``global_norm``.
    """
    if max_norm > 0:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for group in _by_device_and_dtype(_local(gradient) for gradient in gradients):
            torch._foreach_mul_(group, scale.to(group[0].device))


def global_norm(gradients: Sequence[torch.Tensor], mesh: Mesh) -> torch.Tensor:
    """The L2 norm of the gradients of all ranks, each element counted once; zero for no gradients.

    They are summed over every axis of the mesh that shards them, and over pipeline stages.

    Returns:
        An fp32 scalar on the device, equal on all ranks. The host does not wait for it.
    """
    layouts: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        layouts[_sharded_over(gradient)].append(_local(gradient))
    total = torch.zeros((), device=gradients[0].device if gradients else "cpu")
    for (device_mesh, sharded), tensors in layouts.items():
        norms = torch._foreach_norm(tensors, 2.0, dtype=torch.float32)
        squares = torch.stack(norms).square_().sum()
        for dim in sharded:
            if device_mesh is not None and device_mesh.size(dim) > 1:
                dist.all_reduce(squares, group=device_mesh.get_group(dim))
        total = total + squares
    return mesh.sum_over(total, ("pp",)).sqrt_()


def _sharded_over(gradient: torch.Tensor) -> tuple[DeviceMesh | None, tuple[int, ...]]:
    """The dimensions of the gradient's mesh over which its parts are different elements."""
    if not isinstance(gradient, DTensor):
        return None, ()
    assert not any(isinstance(placement, Partial) for placement in gradient.placements), "gradient not yet reduced"
    return gradient.device_mesh, tuple(i for i, p in enumerate(gradient.placements) if not p.is_replicate())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    # not to_local(): that is differentiable, and costs 20 µs a tensor
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _by_device_and_dtype(tensors: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.device, tensor.dtype].append(tensor)
    return groups.values()
