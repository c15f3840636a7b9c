"""Matrices that are spread over ranks, brought together for a while: what an optimizer does to a matrix as a whole.

Shapes: B matrices of m × n, of which a rank holds ``(B, m', n')``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeVar

import attrs
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from forge_core.errors import PluginError
from forge_core.ops.local_tensor import local_tensor

T = TypeVar("T")
Travel = Generator[None, None, T]
"""Pauses wherever something has been sent and there is nothing to do until it arrives."""


@torch.no_grad()
def map_whole(tensors: Sequence[torch.Tensor], function: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """``function`` of whole matrices, laid out over the ranks as the given tensors are.

    A ``DTensor`` may be spread over any axes: ``dp_shard``, ``cp`` and ``tp``, evenly or not, ``ep``, copies. The ranks
    that share matrices of one shape share out the work: each brings some of them together, computes them, and sends
    every rank its part. The experts of a stack ``(E, m, n)`` are matrices of their own, and stay on the ranks that have
    them where the stack is cut between experts, as ``ep`` does. A plain tensor is computed where it is.

    The next matrices travel while ``function`` is computed on these.

    Args:
        tensors: matrices ``(m, n)`` and stacks ``(E, m, n)``. Ranks that share some call with the same ones, in the
            same order.
        function: of matrices of one shape, stacked: ``(k, m, n)`` to ``(k, m, n)``, of the same dtype and on the same
            device. It must treat each by itself, as how many come together depends on the layout.

    Returns:
        One for each of ``tensors``, in order, of its shape, dtype and layout; no memory is shared with it.

    Raises:
        PluginError: a tensor has not 2 or 3 dimensions, or is not reduced yet; ``function`` gives another shape or
            dtype.
    """
    buckets: dict[object, list[int]] = {}
    for index, tensor in enumerate(tensors):
        buckets.setdefault(_layout(tensor), []).append(index)
    turns: dict[object, int] = {}
    bucketed = [_Bucket([tensors[index] for index in indices], function, turns) for indices in buckets.values()]
    runs = [bucket.run() for bucket in bucketed]
    for run, following in zip(runs, [*runs[1:], None], strict=True):
        next(run, None)
        if following is not None:
            next(following, None)  # its first exchange is under way while this bucket is computed
        for _ in run:
            pass
    results: dict[int, torch.Tensor] = {}
    for bucket, indices in zip(bucketed, buckets.values(), strict=True):
        results.update(zip(indices, bucket.results, strict=True))
    return [results[index] for index in range(len(tensors))]


def _layout(tensor: torch.Tensor) -> object:
    """Equal for tensors that can be stacked and travel together."""
    if tensor.ndim not in (2, 3):
        raise PluginError(
            f"map_whole takes matrices (m, n) and stacks of them (E, m, n), and was given a tensor of shape "
            f"{tuple(tensor.shape)}"
        )
    mesh, placements = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else (None, ())
    if any(placement.is_partial() for placement in placements):
        raise PluginError(f"map_whole was given a sum that is not reduced yet: {placements} over {mesh}")
    return mesh, placements, tensor.shape, tensor.dtype, local_tensor(tensor).device


@attrs.frozen
class _Axis:
    """A dimension of the mesh along which parts have to travel."""

    group: dist.ProcessGroup
    rank: int
    size: int
    first: int
    """The rank that gets one matrix more if they cannot be shared out evenly, so that it is not always the same."""
    sizes: Sequence[int] | None
    """Rows or columns of each rank's part; ``None`` for copies."""
    dim: int = 0
    """The one of ``(B, m, n)`` which is cut."""

    def counts(self, n_matrices: int) -> list[int]:
        """How many matrices each rank computes."""
        each, more = divmod(n_matrices, self.size)
        return [each + ((rank - self.first) % self.size < more) for rank in range(self.size)]


class _Bucket:
    """Tensors of one shape and layout; ``results`` once ``run`` has ended.

    Along each axis ranks exchange parts of all matrices for all parts of some, which is one all-to-all; afterwards the
    same backwards.
    """

    results: Sequence[torch.Tensor]

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        function: Callable[[torch.Tensor], torch.Tensor],
        turns: dict[object, int],
    ) -> None:
        self._tensors = tensors
        self._function = function
        local = local_tensor(tensors[0])
        n_matrices = len(tensors) * (local.shape[0] if local.ndim == 3 else 1)
        self._axes = []
        for axis in _axes(tensors[0]):
            first = turns.get(axis.group, 0)
            self._axes.append(attrs.evolve(axis, first=first % axis.size))
            turns[axis.group] = first + n_matrices % axis.size
            n_matrices = self._axes[-1].counts(n_matrices)[axis.rank]

    def run(self) -> Travel[None]:
        """Find ``results``."""
        held = [local_tensor(tensor).detach() for tensor in self._tensors]
        spread = torch.stack(held) if held[0].ndim == 2 else torch.cat(held)
        before = []
        for axis in self._axes:
            before.append(len(spread))
            spread = yield from _bring_together(spread, axis)
        whole = self._compute(spread)
        for axis, n_matrices in zip(reversed(self._axes), reversed(before), strict=True):
            whole = yield from _lay_out(whole, axis, n_matrices)
        parts = whole.unbind() if held[0].ndim == 2 else torch.split(whole, len(held[0]))
        self.results = [_as_given(part, one) for part, one in zip(parts, self._tensors, strict=True)]

    def _compute(self, whole: torch.Tensor) -> torch.Tensor:
        if not whole.numel():
            return whole
        result = self._function(whole)
        if (result.shape, result.dtype) != (whole.shape, whole.dtype):
            raise PluginError(
                f"a function of whole matrices was given {tuple(whole.shape)} in {whole.dtype} and returned "
                f"{tuple(result.shape)} in {result.dtype}; it must return the same shape and dtype"
            )
        return result


def _axes(tensor: torch.Tensor) -> Iterator[_Axis]:
    """The axes along which a matrix is spread, in the order in which its parts can simply be put one after another.

    Parts were cut along the mesh from its first dimension to its last, and are put together the other way round;
    ``_StridedShard`` says that a cut comes after those of later dimensions.
    """
    if not isinstance(tensor, DTensor):
        return
    stack, mesh = tensor.ndim - 2, tensor.device_mesh
    strided = [i for i, one in enumerate(tensor.placements) if isinstance(one, _StridedShard) and one.split_factor > 1]
    order = [*strided, *(i for i in reversed(range(mesh.ndim)) if i not in strided)]
    lengths, sizes = list(tensor.shape), dict[int, list[int]]()
    for i in reversed(order):  # as they were cut
        placement: Any = tensor.placements[i]
        if not placement.is_replicate():
            sizes[i] = _chunks(lengths[placement.dim], mesh.size(i))
            lengths[placement.dim] = sizes[i][mesh.get_local_rank(i)]
    assert tuple(lengths) == local_tensor(tensor).shape, f"{tensor.placements} of {tuple(tensor.shape)}"
    for i in order:
        placement = tensor.placements[i]
        cuts_stack = i in sizes and placement.dim < stack
        if mesh.size(i) > 1 and not cuts_stack:
            dim = 1 + placement.dim - stack if i in sizes else 0
            yield _Axis(mesh.get_group(i), mesh.get_local_rank(i), mesh.size(i), 0, sizes.get(i), dim)


def _chunks(length: int, n: int) -> list[int]:
    """The lengths of n parts as ``torch.chunk`` makes them, with empty ones at the end."""
    each = -(-length // n)
    return [max(0, min(each, length - i * each)) for i in range(n)]


def _bring_together(spread: torch.Tensor, axis: _Axis) -> Travel[torch.Tensor]:
    """All parts along the axis of the matrices that this rank computes."""
    counts = axis.counts(len(spread))
    if axis.sizes is None:
        return torch.split(spread, counts)[axis.rank]
    own, shape = counts[axis.rank], list(spread.shape)
    shapes = [[own, *shape[1 : axis.dim], size, *shape[axis.dim + 1 :]] for size in axis.sizes]
    parts = yield from _exchange(torch.split(spread, counts), shapes, axis.group)
    return torch.cat(parts, axis.dim)


def _lay_out(whole: torch.Tensor, axis: _Axis, n_matrices: int) -> Travel[torch.Tensor]:
    """This rank's parts along the axis of all matrices."""
    own, shape = axis.rank, list(whole.shape[1:])
    if axis.sizes is None:
        parts: Sequence[torch.Tensor] = [whole] * axis.size
    else:
        shape[axis.dim - 1] = axis.sizes[own]
        parts = torch.split(whole, list(axis.sizes), axis.dim)
    arrived = yield from _exchange(parts, [[count, *shape] for count in axis.counts(n_matrices)], axis.group)
    return torch.cat(arrived)


def _exchange(
    parts: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]], group: dist.ProcessGroup
) -> Travel[list[torch.Tensor]]:
    """Send ``parts[i]`` to rank i of the group; returns a tensor of ``shapes[i]`` from each."""
    sent = torch.cat([part.reshape(-1) for part in parts])
    numels = [torch.Size(shape).numel() for shape in shapes]
    arrived = sent.new_empty(sum(numels))
    work = dist.all_to_all_single(arrived, sent, numels, [part.numel() for part in parts], group=group, async_op=True)
    yield
    work.wait()
    return [one.view(list(shape)) for one, shape in zip(torch.split(arrived, numels), shapes, strict=True)]


def _as_given(part: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return part
    return DTensor.from_local(
        part.contiguous(),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
