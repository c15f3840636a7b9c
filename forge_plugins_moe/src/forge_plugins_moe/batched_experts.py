"""Experts in bf16 on the CPU: neighbours together, in batched products.

Where experts have few rows, what goes on around a product of oneDNN takes as long as the product itself, and longer if
it has not lately multiplied so many rows, as it then prepares anew. So neighbours that have about as many rows are a
batch, in which each has as many as the one with most, rounded up; where it has no more of its own, they are zeros.

Shapes: R = rows, E = experts, D = width of the residual stream, H = width of an expert, P = rows with those of zeros.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch._subclasses.fake_tensor import FakeTensor

_BLOCK = 32
"""Of which an expert's rows are a multiple: AMX sums over 32 features of bf16 at once, and for the gradient of weights
it sums over rows."""
_BATCH = 128
"""As many rows take as long as a batch does beside its own: with one thread and two, experts of 128 × 256 and of
1024 × 1408."""

Function = Callable[..., torch.Tensor]
ACTIVATIONS: dict[str, tuple[Function, Function]] = {
    "silu": (torch.ops.aten.silu, torch.ops.aten.silu_backward),
    "gelu": (torch.ops.aten.gelu, torch.ops.aten.gelu_backward),
    "gelu_tanh": (
        functools.partial(torch.ops.aten.gelu, approximate="tanh"),
        functools.partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    ),
    "relu": (torch.ops.aten.relu, lambda gradient, hidden: torch.ops.aten.threshold_backward(gradient, hidden, 0)),
    "relu2": (
        lambda hidden, out: torch.ops.aten.relu(hidden, out=out).square_(),
        lambda gradient, hidden: gradient * torch.ops.aten.relu(hidden) * 2,
    ),
}
"""Each with its backward, which is given the gradient and what the activation was given."""


def in_batches(rows: torch.Tensor) -> bool:
    """Return whether this is for such rows. Not for those of ``forge plan``, which stand for what a GPU has."""
    return rows.device.type == "cpu" and rows.dtype == torch.bfloat16 and not isinstance(rows, FakeTensor)


def batched_experts(
    rows: torch.Tensor,
    counts: torch.Tensor,
    gate: torch.Tensor | None,
    up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """Each row through its expert, ``(R, D)`` bf16: ``down · (act(gate · x) ∘ up · x)``, each product rounded to bf16.

    Args:
        rows: ``(R, D)`` bf16, as are weights; of which the first ``counts[0]`` are the first expert's, and so on.
        counts: ``(E,)`` int64. Rows beyond their sum give 0.
        gate: ``(E, H, D)``; ``None``: ``down · act(up · x)``.
        up: ``(E, H, D)``.
        down: ``(E, D, H)``.
    """
    output: torch.Tensor = _forward(rows, counts, gate, up, down, activation)[0]
    return output


@torch.library.custom_op("forge_moe::batched_experts", mutates_args=())
def _forward(
    rows: torch.Tensor,
    counts: torch.Tensor,
    gate: torch.Tensor | None,
    up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output, and for backward the rows with those of zeros, ``(P, D)``, and ``(2 or 4, P, H)``: what ``up`` gave,
    what ``down`` was given; with a ``gate``, what it gave, and the activation of that."""
    activate, _ = ACTIVATIONS[activation]
    layout = _Layout.of(counts)
    x, between = _kept(rows, gate, up)
    y = torch.empty_like(x)
    layout.add_zeros(rows, x)
    for batch in layout.batches:
        inputs = batch.rows(x)
        raised, hidden, *beside = map(batch.rows, between)
        torch.bmm(inputs, batch.experts(up).mT, out=raised)
        if gate is None:
            activate(raised, out=hidden)
        else:
            gated, activated = beside
            torch.bmm(inputs, batch.experts(gate).mT, out=gated)
            torch.mul(activate(gated, out=activated), raised, out=hidden)
        torch.bmm(hidden, batch.experts(down).mT, out=batch.rows(y))
    return layout.without_zeros(y, len(rows)), x, between


@_forward.register_fake
def _(
    rows: torch.Tensor, counts: torch.Tensor, gate: torch.Tensor | None, up: torch.Tensor, *_: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(rows), *_kept(rows, gate, up)


def _kept(rows: torch.Tensor, gate: torch.Tensor | None, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As large as it can get, as torch.compile knows shapes and not counts. Memory that is not used costs nothing."""
    most = len(rows) + len(up) * (_BLOCK - 1 + _BATCH)
    return rows.new_empty(most, rows.shape[1]), rows.new_empty(2 if gate is None else 4, most, up.shape[1])


@torch.library.custom_op("forge_moe::batched_experts_backward", mutates_args=())
def _backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    between: torch.Tensor,
    counts: torch.Tensor,
    gate: torch.Tensor | None,
    up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of rows, ``gate`` (empty without one), ``up`` and ``down``."""
    _, of_activation = ACTIVATIONS[activation]
    layout = _Layout.of(counts)
    of_x, of_y = torch.empty_like(x), torch.empty_like(x)
    of_gate, of_up, of_down = _like(gate, up), torch.empty_like(up), torch.empty_like(down)
    layout.add_zeros(gradient, of_y)
    for batch in layout.batches:
        inputs, of_inputs, of_outputs = batch.rows(x), batch.rows(of_x), batch.rows(of_y)
        raised, hidden, *beside = map(batch.rows, between)
        of_hidden = torch.bmm(of_outputs, batch.experts(down))
        torch.bmm(of_outputs.mT, hidden, out=batch.experts(of_down))
        if gate is None:
            of_raised = of_activation(of_hidden, raised)
        else:
            gated, activated = beside
            of_raised = of_hidden * activated
            of_gated = of_activation(of_hidden * raised, gated)
            torch.bmm(of_gated.mT, inputs, out=batch.experts(of_gate))
        torch.bmm(of_raised.mT, inputs, out=batch.experts(of_up))
        torch.bmm(of_raised, batch.experts(up), out=of_inputs)
        if gate is not None:
            of_inputs.baddbmm_(of_gated, batch.experts(gate))
    return layout.without_zeros(of_x, len(gradient)), of_gate, of_up, of_down


@_backward.register_fake
def _(
    gradient: torch.Tensor,
    x: torch.Tensor,
    between: torch.Tensor,
    counts: torch.Tensor,
    gate: torch.Tensor | None,
    up: torch.Tensor,
    down: torch.Tensor,
    *_: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(gradient), _like(gate, up), torch.empty_like(up), torch.empty_like(down)


def _like(gate: torch.Tensor | None, up: torch.Tensor) -> torch.Tensor:
    return up.new_empty(0) if gate is None else torch.empty_like(gate)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, *others, ctx.activation = inputs
    _, *kept = output
    ctx.save_for_backward(*kept, *others)
    ctx.mark_non_differentiable(*kept)
    ctx.set_materialize_grads(False)  # zeros for these would take as long as an activation


def _gradients(ctx: Any, gradient: torch.Tensor, *_: None) -> tuple[torch.Tensor | None, ...]:
    x, between, counts, gate, up, down = ctx.saved_tensors
    given = (x, between, counts, gate, up, down, ctx.activation)
    of_rows, of_gate, of_up, of_down = _backward(gradient, *given)
    return of_rows, None, None if gate is None else of_gate, of_up, of_down, None


_forward.register_autograd(_gradients, setup_context=_keep)


@attrs.frozen
class _Batch:
    first_expert: int
    n_experts: int
    first_row: int
    n_rows: int
    """Of each expert."""

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """``(P, F)`` to ``(n_experts, n_rows, F)``."""
        end = self.first_row + self.n_experts * self.n_rows
        return tensor[self.first_row : end].view(self.n_experts, self.n_rows, tensor.shape[1])

    def experts(self, stack: torch.Tensor) -> torch.Tensor:
        return stack[self.first_expert : self.first_expert + self.n_experts]


@attrs.frozen
class _Layout:
    batches: list[_Batch]
    counts: list[int]
    """Rows of each expert."""
    zeros: list[int]
    """Rows of zeros after those of each."""

    @classmethod
    def of(cls, counts: torch.Tensor) -> _Layout:
        rows: list[int] = counts.tolist()
        batches: list[_Batch] = []
        sizes: list[int] = []
        for n_experts, n_rows in _neighbours([-(-count // _BLOCK) * _BLOCK for count in rows]):
            batches.append(_Batch(len(sizes), n_experts, sum(sizes), n_rows))
            sizes.extend([n_rows] * n_experts)
        return cls(batches, rows, [size - count for size, count in zip(sizes, rows, strict=True)])

    @property
    def n_rows(self) -> int:
        """With those of zeros."""
        return sum(self.counts) + sum(self.zeros)

    def add_zeros(self, rows: torch.Tensor, padded: torch.Tensor) -> None:
        """From ``(R, F)`` to ``(P, F)``."""
        own = rows[: sum(self.counts)].split(self.counts)  # type: ignore[no-untyped-call]  # torch's
        zero = rows.new_zeros(1, rows.shape[1])
        pieces = zip(own, (zero.expand(size, -1) for size in self.zeros), strict=True)
        torch.cat([*itertools.chain(*pieces)], out=padded[: self.n_rows])

    def without_zeros(self, padded: torch.Tensor, n_rows: int) -> torch.Tensor:
        """From ``(P, F)`` to ``(R, F)``."""
        sizes = itertools.chain(*zip(self.counts, self.zeros, strict=True))
        own = padded[: self.n_rows].split([*sizes])[::2]  # type: ignore[no-untyped-call]  # torch's
        return torch.cat([*own, padded.new_zeros(n_rows - sum(self.counts), padded.shape[1])])


def _neighbours(rows: list[int]) -> list[tuple[int, int]]:
    """How many experts each batch has, and how many rows of each: all are together, or halves where that costs less."""
    together = [(len(rows), max(rows))]
    if len(rows) == 1:
        return together
    middle = len(rows) // 2
    return min(together, [*_neighbours(rows[:middle]), *_neighbours(rows[middle:])], key=_cost)


def _cost(batches: list[tuple[int, int]]) -> int:
    return sum(n_experts * n_rows + _BATCH for n_experts, n_rows in batches)
