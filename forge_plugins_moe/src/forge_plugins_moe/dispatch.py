"""Dispatchers: how rows come to the experts that work on them, and back to their tokens.

Shapes: T = tokens of a microbatch on this rank, A = assignments of tokens to experts, R = rows that this rank's experts
work on, E = experts in all, D = width of the residual stream.

Rows are taken with ``index_select``, which on a CPU is several times as fast as an index in brackets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh

from forge_core.contracts.gpu import planned_gpu

if TYPE_CHECKING:
    from forge_plugins_moe.visits import MeanVisits

_CACHED = 2**17
"""Numbers in fp32 that leave room in a core's cache for what else is there."""


@attrs.define(eq=False)  # an object, as FSDP would cast the weights of a tuple or dataclass to the compute dtype
class Assignments:
    """Which experts work on which token, and with what weight; as ``Routing``."""

    token: torch.Tensor
    """``(A,)`` int64."""
    expert: torch.Tensor
    """``(A,)`` int64; E stands for none."""
    weight: torch.Tensor
    """``(A,)`` fp32."""
    top_k: int | None = None
    """Same as ``Routing.top_k``."""
    some_to_none: bool = False
    """Whether ``expert`` may be E."""


@attrs.define(eq=False)
class Dispatched:
    """Rows on their way."""

    rows: torch.Tensor
    """``(R, D)``, those of this rank's first expert first. Rows beyond the sum of ``counts`` belong to none."""
    counts: torch.Tensor
    """``(experts of this rank,)`` int64."""
    way_back: Any
    """What the dispatcher itself needs to combine."""


class Dispatcher(Protocol):
    """One a layer. Ranks that exchange rows call the same methods in the same order, however few rows they have."""

    def dispatch(self, tokens: torch.Tensor, assignments: Assignments) -> Dispatched:
        """Bring a copy of each token ``(T, D)`` to each of its experts."""
        ...

    def combine(self, rows: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        """The weighted sum of each token's rows, ``(T, D)`` in their dtype; multiplied and summed in fp32.

        Args:
            rows: ``(R, D)``, what the experts made of the rows that they were given.
        """
        ...


class OverlappingDispatcher(Dispatcher, Protocol):
    """One whose exchanges can begin, and go on while something else is computed (``expert_parallel.overlap``).

    ``dispatch`` is ``arrive(depart(…))`` and ``combine`` is ``gather(send_back(…))``. There may be others of the same
    dispatcher between the two.
    """

    def depart(self, tokens: torch.Tensor, assignments: Assignments) -> Any:
        """Begin to ``dispatch``."""
        ...

    def arrive(self, departed: Any) -> Dispatched:
        """Wait for what ``depart`` has begun."""
        ...

    def send_back(self, rows: torch.Tensor, dispatched: Dispatched) -> Any:
        """Begin to ``combine``."""
        ...

    def gather(self, returning: Any) -> torch.Tensor:
        """Wait for what ``send_back`` has begun, and give what ``combine`` gives."""
        ...


class CountedDispatcher(Dispatcher, Protocol):
    """One that can tell ``forge plan`` what it sends."""

    def sent_bytes(self, visits: MeanVisits, row_bytes: int) -> tuple[float, float]:
        """Bytes a token that a rank sends to other ranks of its node, and to other nodes, on average over ranks; in
        forward and backward together.

        Args:
            visits: where a token goes, which is any expert of any rank alike.
            row_bytes: of one token.
        """
        ...


class DispatcherFactory(Protocol):
    """The signature of the factory that a description names."""

    def __call__(self, config: Any, /, *, n_experts: int, mesh: DeviceMesh) -> Dispatcher:
        """Build the dispatcher of one layer.

        Args:
            n_experts: E, of the layer as a whole; each rank of ``mesh`` has E / n neighbouring ones, rank 0 the
                first.
            mesh: the n ranks of ``ep``, one dimension.
        """
        ...


class LocalDispatcher:
    """All experts are on this rank."""

    def __init__(self, n_experts: int) -> None:
        self._n_experts = n_experts

    def dispatch(self, tokens: torch.Tensor, assignments: Assignments) -> Dispatched:
        sorting = sort_by_expert(tokens, assignments, self._n_experts)
        return Dispatched(sorting.rows, sorting.counts, sorting)

    def combine(self, rows: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        sorting: Sorting = dispatched.way_back
        return sorting.combine(rows)


@attrs.define(eq=False)
class Sorting:
    """A row for each assignment, in the order of experts, and what brings them back."""

    rows: torch.Tensor
    """``(A, D)``; rows that go to no expert are last."""
    counts: torch.Tensor
    """``(E,)`` int64, rows of each expert."""
    assignments: Assignments
    order: torch.Tensor
    """``(A,)`` int64: which assignment each row is of."""
    n_tokens: int

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        """Same as ``Dispatcher.combine``, for rows in this order."""
        given = self.assignments
        rows = self.without_none(rows)
        if given.top_k is not None:
            summed: torch.Tensor = _WeightAndSum.apply(rows, given.weight, self.order, given.top_k)  # type: ignore[no-untyped-call]  # torch's
            return summed
        weighted = rows * given.weight[self.order, None]
        return sum_by_token(weighted, given.token[self.order], self.n_tokens).to(rows.dtype)

    def without_none(self, rows: torch.Tensor) -> torch.Tensor:
        """With zeros in the rows that go to no expert, in which a product leaves what was in memory."""
        if not self.assignments.some_to_none:
            return rows
        some = torch.arange(len(rows), device=rows.device) < self.counts.sum()
        return torch.where(some[:, None], rows, 0)


def sort_by_expert(tokens: torch.Tensor, assignments: Assignments, n_experts: int) -> Sorting:
    """Copies of tokens ``(T, D)`` in the order of their experts; the host does not wait."""
    order = assignments.expert.argsort(stable=True)
    counts = count_by_expert(assignments.expert, n_experts)
    if assignments.top_k is not None:
        rows = _CopyAndSort.apply(tokens, order, assignments.top_k)  # type: ignore[no-untyped-call]  # torch's
    else:
        rows = copy_tokens(tokens, assignments.token[order])
    sorting = Sorting(rows, counts, assignments, order, len(tokens))
    sorting.rows = sorting.without_none(rows)  # for its backward: a product leaves anything in their gradients too
    return sorting


def count_by_expert(expert: torch.Tensor, n_experts: int) -> torch.Tensor:
    """Assignments to each expert ``(E,)`` int64, those to none left out. (For ``bincount`` the host would wait.)"""
    counts = torch.zeros(n_experts + 1, dtype=torch.int64, device=expert.device)
    return counts.scatter_add_(0, expert, torch.ones_like(expert))[:n_experts]


def copy_tokens(tokens: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """``tokens[token]``, whose gradient is summed in fp32."""
    rows: torch.Tensor = _CopyTokens.apply(tokens, token)  # type: ignore[no-untyped-call]  # torch's
    return rows


def sum_by_token(rows: torch.Tensor, token: torch.Tensor, n_tokens: int) -> torch.Tensor:
    """The sum of each token's rows, ``(N, D)`` to ``(T, D)``, in fp32 meanwhile, and on GPUs too always in one order,
    unlike ``index_add``."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    whole = rows.new_zeros(n_tokens, rows.shape[1], dtype=wide)
    return whole.index_put((token,), rows.to(wide), accumulate=True).to(rows.dtype)


def permute(rows: torch.Tensor, order: torch.Tensor, *, back: bool = False) -> torch.Tensor:
    """``rows[order]``; with ``back``, the rows of which that is made."""
    there, home = (_inverse(order), order) if back else (order, _inverse(order))
    permuted: torch.Tensor = _Permute.apply(rows, there, home)  # type: ignore[no-untyped-call]  # torch's
    return permuted


class _CopyAndSort(torch.autograd.Function):
    """``tokens[order // top_k]``, whose gradient is a sum over each token's rows, in fp32 and always in one order."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, order: torch.Tensor, top_k: int) -> torch.Tensor:
        ctx.save_for_backward(order)
        ctx.top_k = top_k
        return tokens.index_select(0, order // top_k)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (order,) = ctx.saved_tensors
        (gradient,) = gradients
        place = _inverse(order).view(-1, ctx.top_k)
        summed = gradient.new_empty(len(place), gradient.shape[1])
        for some in _few_tokens(place, gradient):
            summed[some] = _rows_of(place[some], gradient).sum(1)
        return summed, None, None


class _CopyTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(token)
        ctx.n_tokens = len(tokens)
        return tokens.index_select(0, token)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (token,) = ctx.saved_tensors
        return sum_by_token(gradients[0], token, ctx.n_tokens), None


class _WeightAndSum(torch.autograd.Function):
    """For rows ``(T · k, D)`` in this order of the weights ``(T · k,)``, the weighted sum of each token's k rows.

    One operation, since rows and weights differ in dtype: autograd would keep copies of all rows in fp32, and
    products of unequal dtypes are slow on CPUs.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, order: torch.Tensor, top_k: int) -> torch.Tensor:
        ctx.save_for_backward(rows, weight, order)
        ctx.top_k = top_k
        place, by_token = _inverse(order).view(-1, top_k), weight.view(-1, top_k, 1)
        output = rows.new_empty(len(place), rows.shape[1])
        for some in _few_tokens(place, rows):
            output[some] = _rows_of(place[some], rows).mul_(by_token[some]).sum(1)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        rows, weight, order = ctx.saved_tensors
        (gradient,) = gradients
        place, by_token = _inverse(order).view(-1, ctx.top_k), weight.view(-1, ctx.top_k, 1)
        weighted, of_weight = rows.new_empty(*place.shape, rows.shape[1]), torch.empty_like(by_token)
        for some in _few_tokens(place, rows):
            wide = gradient[some].to(torch.promote_types(rows.dtype, weight.dtype))[:, None]
            of_weight[some] = _rows_of(place[some], rows).mul_(wide).sum(2, keepdim=True)
            weighted[some] = wide * by_token[some]
        return weighted.flatten(0, 1).index_select(0, order), of_weight.flatten(), None, None


def _few_tokens(place: torch.Tensor, rows: torch.Tensor) -> Iterator[slice]:
    """All tokens of ``place``, ``(T, k)``; on a CPU so few at a time that their rows in fp32 stay in its caches."""
    n_tokens, top_k = place.shape
    if planned_gpu(rows) or rows.device.type != "cpu" or torch.compiler.is_compiling():
        yield slice(n_tokens)
        return
    few = max(1, _CACHED * torch.get_num_threads() // (top_k * rows.shape[1]))
    starts: Sequence[int] = range(0, n_tokens, few)
    if isinstance(rows, FakeTensor):  # in a plan for a CPU: those between take no more memory
        starts = [*starts[:2], *starts[2:][-1:]]
    yield from (slice(first, first + few) for first in starts)


def _rows_of(place: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``rows[place]``, ``(T, k, D)`` fp32, or fp64 if rows are; in memory of its own."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    return rows.index_select(0, place.flatten()).view(*place.shape, rows.shape[1]).to(wide)


class _Permute(torch.autograd.Function):
    """``rows[order]``, whose gradient is a permutation too."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (inverse,) = ctx.saved_tensors
        return gradients[0].index_select(0, inverse), None, None


def _inverse(order: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
