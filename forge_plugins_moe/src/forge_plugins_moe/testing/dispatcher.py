"""Conformance of dispatchers (contract: ``forge_plugins_moe.dispatch``).

Shapes: T = tokens of a rank, A = assignments of them, R = rows that come to a rank's experts, E = experts in all, e =
experts a rank, D = width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from forge_plugins_moe.dispatch import Assignments, Dispatched, LocalDispatcher
from forge_testing.component_case import ComponentCase
from forge_testing.several_ranks import on_ranks

_DIM = 8
_LARGE, _SMALL = 256, 2.6
"""A weight, and the sum of all others of a token, where they are summed in bf16."""

CASES = ("usual", "uneven", "empty_rank", "one_expert", "padding", "any_number", "none_at_all", "no_tokens_at_all")
"""What the ranks send. ``usual``: each token to two experts. ``uneven``: some ranks have more tokens. ``empty_rank``:
the last one has none. ``one_expert``: all tokens to the first expert, so that the others have no rows. ``padding``:
some tokens to none. ``any_number``: zero to three experts a token, in no order. ``none_at_all``: all assignments are to
none."""


@attrs.frozen
class Passage:
    """What became of one rank's tokens."""

    output: torch.Tensor
    """``(T, D)``."""
    tokens: torch.Tensor
    """The gradient of tokens ``(T, D)``."""
    weight: torch.Tensor
    """That of the assignments' weights ``(A,)``."""
    experts: torch.Tensor
    """That of the matrices of the rank's experts ``(e, D, D)``."""


@attrs.frozen
class RankReport:
    """What one rank has seen; everything is made in one launch."""

    passages: Mapping[str, Passage]
    """By name of ``CASES``."""
    recomputed: Passage
    """``usual``, with activation checkpointing."""
    nested: Sequence[Passage]
    """``usual`` and ``padding``, both dispatched before either is combined."""
    bf16: Passage
    summed: Mapping[str, torch.Tensor]
    """In bf16, outputs and gradients of tokens that all experts leave as they are."""
    evaluated: torch.Tensor
    """The output of ``usual`` without gradients."""
    counts: torch.Tensor
    rows: torch.Tensor
    """The rows of ``usual``, and how many each expert has."""
    in_steps: Passage | None
    """``usual``, with ``depart`` to ``gather`` in place of ``dispatch`` and ``combine``; ``None`` if it has none."""


class DispatcherConformance(ComponentCase):
    """Subclass it at the top level of a file, name the component, and pytest runs every check below on it, over gloo.

    The ranks are launched once for all checks of a class.
    """

    kind = "dispatcher"
    ranks: ClassVar[int] = 2
    experts_each: ClassVar[int] = 3
    tolerance: ClassVar[float] = 1e-5
    """How far outputs and gradients may be from those of one process, relative to the largest value of a tensor."""

    @pytest.mark.parametrize("case", CASES)
    def test_gives_what_one_process_gives(self, case: str) -> None:
        for rank, report in enumerate(self.reports()):
            self._compare(rank, report.passages[case], self._expected(rank, case), case)

    @pytest.mark.parametrize("case", CASES)
    def test_gradients_of_experts_are_those_of_all_ranks_tokens(self, case: str) -> None:
        expected = self._of_experts(case)
        for rank, report in enumerate(self.reports()):
            own = expected[rank * self.experts_each : (rank + 1) * self.experts_each]
            self._near(report.passages[case].experts, own, f"rank {rank}, {case}: the gradient of its experts")

    def test_rows_stand_by_expert(self) -> None:
        every = [self._send(rank, "usual") for rank in range(self.ranks)]
        expert = torch.cat([assignments.expert for _, assignments in every])
        row = torch.cat([tokens[assignments.token] for tokens, assignments in every])
        for rank, report in enumerate(self.reports()):
            counts, rows = report.counts, report.rows
            assert (counts.dtype, counts.shape) == (torch.int64, (self.experts_each,)), (
                f"counts must be int64 of shape ({self.experts_each},), got {counts.dtype} of {tuple(counts.shape)}"
            )
            start = 0
            for own, count in enumerate(counts.tolist()):
                expected = row[expert == rank * self.experts_each + own]
                got = rows[start : start + count]
                start += count
                assert len(got) == len(expected), (
                    f"rank {rank}: counts say {count} rows for its expert {own}, and {len(expected)} were sent"
                )
                assert torch.equal(_sorted(got), _sorted(expected)), (
                    f"rank {rank}: the rows of its expert {own} are not the tokens that were sent to it"
                )

    def test_keeps_the_dtype(self) -> None:
        for rank, report in enumerate(self.reports()):
            for name in ("output", "tokens"):
                tensor, expected = getattr(report.bf16, name), getattr(self._expected(rank, "usual"), name)
                assert tensor.dtype == torch.bfloat16, f"rank {rank}: {name} must stay bf16, got {tensor.dtype}"
                error = ((tensor.float() - expected).abs().max() / expected.abs().max()).item()
                assert error < 0.03, f"rank {rank}: {name} in bf16 is off by {error:.3g} of its largest value"
            weight = report.bf16.weight
            assert weight.dtype == torch.float32, (
                f"rank {rank}: the gradient of weights must be fp32, got {weight.dtype}"
            )

    def test_sums_in_fp32(self) -> None:
        """A large term and many small ones: in bf16, 256 and less than 1 are 256."""
        for rank, report in enumerate(self.reports()):
            for name, tensor in report.summed.items():
                error = (tensor.float() - _LARGE - _SMALL).abs().max().item()
                assert error < 2, (  # the sum of each place may be rounded on its way, and that of all of them
                    f"rank {rank}: in bf16, the {name} is {tensor.flatten()[0].item():g} where {_LARGE} and terms that "
                    f"are {_SMALL} together were to be summed; sum in fp32"
                )

    def test_two_microbatches_may_be_on_their_way(self) -> None:
        for rank, report in enumerate(self.reports()):
            for case, passage in zip(("usual", "padding"), report.nested, strict=True):
                what = f"{case}, while another microbatch was dispatched and not combined yet"
                self._compare(rank, passage, self._expected(rank, case), what)

    def test_recomputes_in_backward(self) -> None:
        for rank, report in enumerate(self.reports()):
            expected = self._expected(rank, "usual")
            self._compare(rank, report.recomputed, expected, "usual, with activation checkpointing")

    def test_evaluates_as_it_trains(self) -> None:
        for rank, report in enumerate(self.reports()):
            self._near(report.evaluated, report.passages["usual"].output, f"rank {rank}: the output without gradients")

    def test_steps_give_what_the_whole_gives(self) -> None:
        for rank, report in enumerate(self.reports()):
            if report.in_steps is None:
                pytest.skip("the dispatcher cannot overlap: it has no depart")
            self._compare(rank, report.in_steps, self._expected(rank, "usual"), "usual, in steps")

    # -- the launch

    def reports(self) -> Sequence[RankReport]:
        """What each rank has seen, in their order. Ranks are launched the first time only."""
        found = _REPORTS.get(type(self))
        if found is None:
            try:
                found = on_ranks(type(self), "report", self.ranks)
            except AssertionError as error:
                found = error
            _REPORTS[type(self)] = found
        if isinstance(found, AssertionError):
            raise found
        return found

    def report(self) -> RankReport:
        """Send everything, as the rank that this is."""
        rank = dist.get_rank()
        mesh = init_device_mesh("cpu", (self.ranks,), mesh_dim_names=("ep",))
        dispatcher: Any = self.make(n_experts=self.ranks * self.experts_each, mesh=mesh)
        matrices = self._matrices()[rank * self.experts_each : (rank + 1) * self.experts_each]

        def passage(case: str, through: Any = _through, dtype: torch.dtype = torch.float32) -> Passage:
            tokens, assignments = self._send(rank, case)
            return _passage(dispatcher, tokens.to(dtype), assignments, matrices.to(dtype), through)

        def nested() -> list[Passage]:
            sent = [_Leaves.of(*self._send(rank, case), matrices) for case in ("usual", "padding")]
            there = [dispatcher.dispatch(one.tokens, one.assignments) for one in sent]
            outputs = [dispatcher.combine(_compute(d, one.experts), d) for d, one in zip(there, sent, strict=True)]
            return [one.after(output) for output, one in reversed([*zip(outputs, sent, strict=True)])][::-1]

        tokens, assignments = self._send(rank, "usual")
        with torch.no_grad():
            dispatched = dispatcher.dispatch(tokens, assignments)
            evaluated = dispatcher.combine(_compute(dispatched, matrices), dispatched)
        return RankReport(
            passages={case: passage(case) for case in CASES},
            recomputed=passage("usual", _recomputed),
            nested=nested(),
            bf16=passage("usual", dtype=torch.bfloat16),
            summed={
                **_summed(dispatcher, self.ranks * self.experts_each, with_top_k=True),
                **_summed(dispatcher, self.ranks * self.experts_each, with_top_k=False),
            },
            evaluated=evaluated,
            counts=dispatched.counts,
            rows=dispatched.rows,
            in_steps=passage("usual", _in_steps) if hasattr(dispatcher, "depart") else None,
        )

    # -- what is sent, and what it is compared with

    def _send(self, rank: int, case: str) -> tuple[torch.Tensor, Assignments]:
        """Tokens ``(T, D)`` of a rank and where they go."""
        generator = torch.Generator().manual_seed(100 * CASES.index(case) + rank)
        n_tokens, n_experts = _n_tokens(rank, self.ranks, case), self.ranks * self.experts_each
        tokens = torch.randn(n_tokens, _DIM, generator=generator)
        choice = torch.rand(n_tokens, n_experts, generator=generator)
        top_k: int | None = 1 if case == "one_expert" else 2
        if case == "any_number":
            top_k = None
            wanted = torch.arange(n_tokens) % 4
            token, expert = (choice.argsort().argsort() < wanted[:, None]).nonzero().unbind(1)
            order = torch.randperm(len(token), generator=generator)
            token, expert = token[order], expert[order]
        else:
            token = torch.arange(n_tokens).repeat_interleave(top_k or 0)
            expert = choice.topk(top_k or 0).indices.flatten()
        weight = torch.rand(len(expert), generator=generator) + 0.1
        if case == "one_expert":
            expert = torch.zeros_like(expert)
        to_none = (case == "none_at_all") | ((case == "padding") & (token % 3 == 0))
        expert, weight = torch.where(to_none, n_experts, expert), torch.where(to_none, 0, weight)
        some_to_none = case in ("padding", "none_at_all", "any_number")
        return tokens, Assignments(token, expert, weight, top_k, some_to_none)

    def _matrices(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(self.ranks * self.experts_each, _DIM, _DIM, generator=generator)

    def _expected(self, rank: int, case: str) -> Passage:
        """With all experts on one rank; gradients of experts are those of its own tokens."""
        tokens, assignments = self._send(rank, case)
        return _passage(
            LocalDispatcher(self.ranks * self.experts_each), tokens, assignments, self._matrices(), _through
        )

    def _of_experts(self, case: str) -> torch.Tensor:
        return torch.stack([self._expected(rank, case).experts for rank in range(self.ranks)]).sum(0)

    def _compare(self, rank: int, passage: Passage, expected: Passage, what: str) -> None:
        self._near(passage.output, expected.output, f"rank {rank}, {what}: the output")
        self._near(passage.tokens, expected.tokens, f"rank {rank}, {what}: the gradient of tokens")
        self._near(passage.weight, expected.weight, f"rank {rank}, {what}: the gradient of weights")

    def _near(self, found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        assert found.shape == expected.shape, f"{what} has the shape {tuple(found.shape)}, not {tuple(expected.shape)}"
        if not found.numel():
            return
        assert torch.isfinite(found).all(), f"{what} is not finite; rows beyond the sum of counts may hold anything"
        largest = expected.abs().max().item() or 1.0
        error = (found - expected).abs().max().item() / largest
        assert error <= self.tolerance, (
            f"{what} is off by {error:.3g} of its largest value; tolerance says {self.tolerance:g}"
        )


_REPORTS: dict[type, Sequence[RankReport] | AssertionError] = {}


def _n_tokens(rank: int, ranks: int, case: str) -> int:
    if case == "no_tokens_at_all":
        return 0
    if case == "uneven":
        return 3 + 9 * rank
    return 0 if case == "empty_rank" and rank == ranks - 1 else 12


@attrs.frozen(eq=False)
class _Leaves:
    tokens: torch.Tensor
    assignments: Assignments
    experts: torch.Tensor

    @classmethod
    def of(cls, tokens: torch.Tensor, assignments: Assignments, experts: torch.Tensor) -> _Leaves:
        leaves = (one.detach().clone().requires_grad_() for one in (tokens, assignments.weight, experts))
        tokens, weight, experts = leaves
        return cls(tokens, attrs.evolve(assignments, weight=weight), experts)

    def after(self, output: torch.Tensor) -> Passage:
        """What there is to see after a backward from ``output``, in which each element has another gradient."""
        factors = torch.linspace(-1, 2, output.numel()).view_as(output)
        torch.autograd.backward((output.float() * factors).sum())
        found = (self.tokens, self.assignments.weight, self.experts)
        gradients = (torch.zeros_like(one) if one.grad is None else one.grad for one in found)
        return Passage(output.detach(), *gradients)


def _passage(
    dispatcher: Any, tokens: torch.Tensor, assignments: Assignments, experts: torch.Tensor, through: Any
) -> Passage:
    leaves = _Leaves.of(tokens, assignments, experts)
    return leaves.after(through(dispatcher, leaves))


def _through(dispatcher: Any, leaves: _Leaves) -> torch.Tensor:
    dispatched = dispatcher.dispatch(leaves.tokens, leaves.assignments)
    output: torch.Tensor = dispatcher.combine(_compute(dispatched, leaves.experts), dispatched)
    return output


def _summed(dispatcher: Any, n_experts: int, *, with_top_k: bool) -> Mapping[str, torch.Tensor]:
    """Ones to all experts, which leave them as they are, with weights of which the first is large."""
    tokens = torch.ones(4, _DIM, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.full((n_experts,), _SMALL / (n_experts - 1))
    weight[0] = _LARGE
    token, expert = torch.arange(4).repeat_interleave(n_experts), torch.arange(n_experts).repeat(4)
    assignments = Assignments(token, expert, weight.repeat(4), n_experts if with_top_k else None)
    dispatched = dispatcher.dispatch(tokens, assignments)
    output = dispatcher.combine(dispatched.rows, dispatched)
    (gradient,) = torch.autograd.grad(output.sum(), tokens)
    kind = "with top_k" if with_top_k else "without top_k"
    return {f"output {kind}": output.detach(), f"gradient of tokens {kind}": gradient}


def _in_steps(dispatcher: Any, leaves: _Leaves) -> torch.Tensor:
    departed = dispatcher.depart(leaves.tokens, leaves.assignments)
    dispatched = dispatcher.arrive(departed)
    returning = dispatcher.send_back(_compute(dispatched, leaves.experts), dispatched)
    output: torch.Tensor = dispatcher.gather(returning)
    return output


def _recomputed(dispatcher: Any, leaves: _Leaves) -> torch.Tensor:
    output: torch.Tensor = checkpoint(_through, dispatcher, leaves, use_reentrant=False)
    return output


def _compute(dispatched: Dispatched, experts: torch.Tensor) -> torch.Tensor:
    """Another function for each expert; and, as from a grouped product, anything in rows that belong to none, and in
    their gradients."""
    counts = dispatched.counts.tolist()
    parts = torch.split(dispatched.rows, [*counts, len(dispatched.rows) - sum(counts)])
    outputs = [(part @ matrix).tanh() for part, matrix in zip(parts, experts, strict=False)]
    return torch.cat([*outputs, _Anything.apply(parts[-1])])  # type: ignore[no-untyped-call]  # torch's


class _Anything(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        return torch.full_like(rows, float("nan"))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return torch.full_like(gradients[0], float("nan"))


def _sorted(rows: torch.Tensor) -> torch.Tensor:
    """In an order that does not depend on where they stood."""
    return rows[rows[:, 0].argsort()]
