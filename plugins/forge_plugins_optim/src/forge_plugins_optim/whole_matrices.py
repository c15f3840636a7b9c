"""Matrices that are spread over ranks, brought together for a while: what an optimizer does to a matrix as a whole.

Shapes: B matrices of m × n, of which a rank holds ``(B, m', n')``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
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

    The next matrices travel while ``function`` is computed on these; small ones of several shapes travel together.

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
    alike: dict[_Layout, list[int]] = {}
    for index, tensor in enumerate(tensors):
        alike.setdefault(_layout(tensor), []).append(index)
    turns: dict[object, dict[object, int]] = defaultdict(dict)
    stacks = {
        layout: _Stack([tensors[index] for index in indices], function, turns[layout.of_travel])
        for layout, indices in alike.items()
    }
    runs = [_run([stacks[layout] for layout in layouts]) for layouts in _together(alike)]
    for run, following in zip(runs, [*runs[1:], None], strict=True):
        next(run, None)
        if following is not None:
            next(following, None)  # its first exchange is under way while these are computed
        for _ in run:
            pass
    results: dict[int, torch.Tensor] = {}
    for stack, indices in zip(stacks.values(), alike.values(), strict=True):
        results.update(zip(indices, stack.results, strict=True))
    return [results[index] for index in range(len(tensors))]


@attrs.frozen
class _Layout:
    """Equal for tensors that can be stacked."""

    mesh: object
    placements: tuple[object, ...]
    dtype: torch.dtype
    device: torch.device
    shape: torch.Size

    @property
    def of_travel(self) -> object:
        """Equal for stacks that can travel together: these pass the same axes."""
        return self.mesh, self.placements, self.dtype, self.device, len(self.shape)


_LARGE = 4 * 2**20
"""Matrices of one shape travel by themselves if they have more bytes than this, on all ranks that share them: an
exchange of less takes longer to begin than to run."""


def _together(alike: Mapping[_Layout, Sequence[int]]) -> list[list[_Layout]]:
    """Which stacks travel together, the same on all ranks."""
    groups: dict[object, list[_Layout]] = {}
    for layout, indices in alike.items():
        is_large = len(indices) * layout.shape.numel() * layout.dtype.itemsize > _LARGE
        groups.setdefault(layout if is_large else layout.of_travel, []).append(layout)
    return [*groups.values()]


def _layout(tensor: torch.Tensor) -> _Layout:
    if tensor.ndim not in (2, 3):
        raise PluginError(
            f"map_whole takes matrices (m, n) and stacks of them (E, m, n), and was given a tensor of shape "
            f"{tuple(tensor.shape)}"
        )
    mesh, placements = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else (None, ())
    if any(placement.is_partial() for placement in placements):
        raise PluginError(f"map_whole was given a sum that is not reduced yet: {placements} over {mesh}")
    return _Layout(mesh, placements, tensor.dtype, local_tensor(tensor).device, tensor.shape)


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


class _Stack:
    """Tensors of one shape and layout; ``results`` once it has travelled there and back."""

    results: Sequence[torch.Tensor]

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        function: Callable[[torch.Tensor], torch.Tensor],
        turns: dict[object, int],
    ) -> None:
        """
        Args:
            turns: of the groups of stacks that pass the same axes. Along others, ranks of one group may have had
                different numbers of matrices before.
        """
        self._tensors = tensors
        self._function = function
        local = local_tensor(tensors[0])
        n_matrices = len(tensors) * (local.shape[0] if local.ndim == 3 else 1)
        self.axes = []
        for axis in _axes(tensors[0]):
            first = turns.get(axis.group, 0)
            self.axes.append(attrs.evolve(axis, first=first % axis.size))
            turns[axis.group] = first + n_matrices % axis.size
            n_matrices = self.axes[-1].counts(n_matrices)[axis.rank]

    def held(self) -> torch.Tensor:
        """This rank's parts, ``(B, m', n')``."""
        parts = [local_tensor(tensor).detach() for tensor in self._tensors]
        return torch.stack(parts) if parts[0].ndim == 2 else torch.cat(parts)

    def compute(self, whole: torch.Tensor) -> torch.Tensor:
        if not whole.numel():
            return whole
        result = self._function(whole)
        if (result.shape, result.dtype) != (whole.shape, whole.dtype):
            raise PluginError(
                f"a function of whole matrices was given {tuple(whole.shape)} in {whole.dtype} and returned "
                f"{tuple(result.shape)} in {result.dtype}; it must return the same shape and dtype"
            )
        return result

    def keep(self, computed: torch.Tensor) -> None:
        """Set ``results`` from this rank's parts."""
        local = local_tensor(self._tensors[0])
        parts = computed.unbind() if local.ndim == 2 else torch.split(computed, len(local))
        self.results = [_as_given(part, one) for part, one in zip(parts, self._tensors, strict=True)]


def _run(stacks: Sequence[_Stack]) -> Travel[None]:
    """Find the ``results`` of stacks that travel together.

    Along each axis ranks exchange parts of all matrices for all parts of some, which is one all-to-all; afterwards the
    same backwards.
    """
    spread = [stack.held() for stack in stacks]
    levels = [*zip(*(stack.axes for stack in stacks), strict=True)]
    before = []
    for axes in levels:
        before.append([len(one) for one in spread])
        spread = yield from _bring_together(spread, axes)
    whole = [stack.compute(one) for stack, one in zip(stacks, spread, strict=True)]
    for axes, n_matrices in zip(reversed(levels), reversed(before), strict=True):
        whole = yield from _lay_out(whole, axes, n_matrices)
    for stack, one in zip(stacks, whole, strict=True):
        stack.keep(one)


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


def _bring_together(spread: Sequence[torch.Tensor], axes: Sequence[_Axis]) -> Travel[list[torch.Tensor]]:
    """Of each stack, all parts along its axis of the matrices that this rank computes."""
    parts = [torch.split(one, axis.counts(len(one))) for one, axis in zip(spread, axes, strict=True)]
    if axes[0].sizes is None:
        return [one[axis.rank] for one, axis in zip(parts, axes, strict=True)]
    shapes = []
    for one, axis in zip(parts, axes, strict=True):
        own, *shape = one[axis.rank].shape
        shapes.append([[own, *shape[: axis.dim - 1], size, *shape[axis.dim :]] for size in axis.sizes or ()])
    arrived = yield from _exchange(parts, shapes, axes[0].group)
    return [torch.cat(one, axis.dim) for one, axis in zip(arrived, axes, strict=True)]


def _lay_out(
    whole: Sequence[torch.Tensor], axes: Sequence[_Axis], n_matrices: Sequence[int]
) -> Travel[list[torch.Tensor]]:
    """Of each stack, this rank's parts along its axis of all matrices."""
    parts, shapes = [], []
    for one, axis, n in zip(whole, axes, n_matrices, strict=True):
        shape = list(one.shape[1:])
        if axis.sizes is None:
            parts.append([one] * axis.size)
        else:
            shape[axis.dim - 1] = axis.sizes[axis.rank]
            parts.append([*torch.split(one, list(axis.sizes), axis.dim)])
        shapes.append([[count, *shape] for count in axis.counts(n)])
    arrived = yield from _exchange(parts, shapes, axes[0].group)
    return [torch.cat(one) for one in arrived]


def _exchange(
    parts: Sequence[Sequence[torch.Tensor]], shapes: Sequence[Sequence[Sequence[int]]], group: dist.ProcessGroup
) -> Travel[list[list[torch.Tensor]]]:
    """Send ``parts[stack][i]`` to rank i of the group; returns, by stack, one of ``shapes[stack][i]`` from each."""
    to_ranks, from_ranks = [*zip(*parts, strict=True)], [*zip(*shapes, strict=True)]
    sent = torch.cat([part.reshape(-1) for of_rank in to_ranks for part in of_rank])
    numels = [[torch.Size(shape).numel() for shape in of_rank] for of_rank in from_ranks]
    arrived = sent.new_empty(sum(map(sum, numels)))
    sizes = [sum(part.numel() for part in of_rank) for of_rank in to_ranks]
    work = dist.all_to_all_single(arrived, sent, [*map(sum, numels)], sizes, group=group, async_op=True)
    yield
    work.wait()
    pieces = iter(torch.split(arrived, [numel for of_rank in numels for numel in of_rank]))
    from_each = [[next(pieces).view(list(shape)) for shape in of_rank] for of_rank in from_ranks]
    return [list(of_stack) for of_stack in zip(*from_each, strict=True)]


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
