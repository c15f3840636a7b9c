"""Conformance of losses (contract: ``forge_core.contracts.loss``)."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import nn

from forge_core.contracts.loss import IGNORED, LossSum, apply_loss
from forge_core.ops.auxiliary_loss import LEDGER
from forge_testing.component_case import ComponentCase

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


class LossConformance(ComponentCase):
    """Subclass it, name the component, and pytest runs every check below on it."""

    kind = "loss"
    dim: ClassVar[int] = 16
    vocab_size: ClassVar[int] = 40
    seq_len: ClassVar[int] = 12

    @each_dtype
    def test_returns_an_fp32_total_and_an_integer_count(self, dtype: torch.dtype) -> None:
        hidden, head, targets = self._batch(dtype=dtype)

        result = self._apply(hidden, head, targets)

        assert isinstance(result, LossSum), f"a loss must return a LossSum, got {type(result).__qualname__}"
        for name, tensor, wanted in (("total", result.total, torch.float32), ("count", result.count, torch.int64)):
            assert isinstance(tensor, torch.Tensor), (
                f"LossSum.{name} must be a tensor, which stays on its device; got {type(tensor).__name__}"
            )
            assert tensor.shape == (), f"LossSum.{name} must be a scalar, got the shape {tuple(tensor.shape)}"
            assert tensor.dtype == wanted, f"LossSum.{name} must be {wanted}, got {tensor.dtype} for {dtype} inputs"
        valid = int((targets != IGNORED).sum())
        assert int(result.count) == valid, (
            f"LossSum.count must be the number of targets that are not {IGNORED}, {valid}, got {int(result.count)}"
        )

    def test_the_loss_of_each_position_is_its_part_of_the_total(self) -> None:
        hidden, head, targets = self._batch()
        total, _, each = self._apply(hidden, head, targets)
        if each is None:
            return  # it is optional

        assert each.shape == targets.shape, (
            f"LossSum.each must have the targets' shape, {tuple(targets.shape)}, got {tuple(each.shape)}"
        )
        assert each.dtype == torch.float32, f"LossSum.each must be torch.float32, got {each.dtype}"
        assert not each.requires_grad, (
            "LossSum.each must be detached: it is for reports, and would keep the graph alive"
        )
        assert (each[targets == IGNORED] == 0).all(), f"LossSum.each must be 0 where the target is {IGNORED}"
        assert torch.isclose(each.sum(), total, rtol=1e-4, atol=1e-5), (
            f"LossSum.each adds up to {float(each.sum()):.6g}, and the total is {float(total.detach()):.6g}"
        )

    def test_is_computed_in_fp32(self) -> None:
        totals = [self._apply(*self._batch(seed, dtype=torch.bfloat16)).total.detach() for seed in range(4)]

        assert any(total.bfloat16().float() != total for total in totals), (
            "the total of bf16 hidden states has only the resolution of bf16; compute the loss in fp32"
        )

    def test_is_a_sum_over_tokens(self) -> None:
        hidden, head, targets = self._batch()
        parts = [self._apply(hidden[row : row + 1], head, targets[row : row + 1]) for row in range(len(hidden))]
        whole = self._apply(hidden, head, targets)

        of_parts = torch.stack([part.total for part in parts]).sum()
        assert torch.isclose(whole.total, of_parts, rtol=1e-4, atol=1e-5), (
            f"the total of a batch is {float(whole.total.detach()):.6g}, but the totals of its rows add up to "
            f"{float(of_parts.detach()):.6g}; return the sum over valid tokens, not their mean: the engine divides"
        )

    def test_with_weights_each_target_counts_by_its_own(self) -> None:
        hidden, head, targets = self._batch()
        if not getattr(self.make(), "takes_weights", False):
            return  # it is optional
        halves = [torch.where(part, targets, IGNORED) for part in self._in_two(targets)]
        weights = torch.where(self._in_two(targets)[0], 2.0, 0.5)

        total, gradient = self._weighted(hidden, head, targets, weights)
        parts = [self._weighted(hidden, head, half, None) for half in halves]

        for what, found, (first, second) in zip(
            ("total", "gradient"), (total, gradient), zip(*parts, strict=True), strict=True
        ):
            assert torch.allclose(found, 2 * first + 0.5 * second, rtol=1e-4, atol=1e-5), (
                f"with the weight 2 for half of the targets and 0.5 for the others, the {what} is not 2 times that of "
                "the half and 0.5 times that of the others; multiply the loss of each position by its weight"
            )
        summed = self.make()(hidden, head, targets, weights)
        plain = self._apply(hidden, head, targets)
        assert int(summed.count) == int(plain.count), "weights change LossSum.count, which is the number of targets"
        if plain.each is not None:
            assert torch.equal(summed.each, plain.each), "weights change LossSum.each, which is the loss without them"

    def test_what_ignored_positions_hold_does_not_matter(self) -> None:
        hidden, head, targets = self._batch()
        ignored = targets == IGNORED
        other = hidden.detach().clone()
        other[ignored] = 3.0 - other[ignored]

        plain = self._value_and_gradients(hidden, head, targets)
        changed = self._value_and_gradients(other.requires_grad_(), head, targets)

        assert torch.allclose(plain[0], changed[0], rtol=1e-5, atol=1e-6), (
            f"hidden states where the target is {IGNORED} change the total"
        )
        assert (plain[1][ignored] == 0).all(), f"a gradient reaches hidden states where the target is {IGNORED}"
        assert torch.allclose(plain[2], changed[2], rtol=1e-4, atol=1e-5), (
            f"hidden states where the target is {IGNORED} change the gradient of head.weight"
        )

    @each_dtype
    def test_nothing_to_learn_is_a_connected_zero(self, dtype: torch.dtype) -> None:
        hidden, head, targets = self._batch(dtype=dtype)
        total, count, _ = self._apply(hidden, head, torch.full_like(targets, IGNORED))

        value = float(total.detach())
        assert value == 0, f"the total of a batch with nothing to learn must be 0, got {value}"
        assert int(count) == 0, f"the count of a batch with nothing to learn must be 0, got {int(count)}"
        assert total.requires_grad, (
            "the total of a batch with nothing to learn is not connected to the graph: backward would raise on the one "
            "rank that has such a batch, and all others would wait for it"
        )
        gradients = torch.autograd.grad(total, (hidden, head.weight), allow_unused=True)
        assert all(gradient is None or (gradient == 0).all() for gradient in gradients), (
            "the gradient of a batch with nothing to learn must be zero"
        )

    def test_gradients_match_differences(self) -> None:
        """Central differences in fp32 along random directions, hidden states and head weights apart."""
        hidden, head, targets = self._batch()
        _, of_hidden, of_weight = self._value_and_gradients(hidden, head, targets)
        generator = torch.Generator().manual_seed(5)

        for name, tensor, gradient in (("hidden", hidden, of_hidden), ("head.weight", head.weight, of_weight)):
            for _ in range(3):
                # Along the gradient as well as across it, so that a slope far from zero is measured.
                direction = gradient / gradient.norm().clamp(min=1e-6)
                direction = direction + torch.randn(tensor.shape, generator=generator) / tensor.numel() ** 0.5
                with torch.no_grad():
                    start, ends = tensor.clone(), []
                    for step in (1e-2, -1e-2):
                        tensor.copy_(start + step * direction)
                        ends.append(self._minimised(hidden, head, targets))
                    tensor.copy_(start)
                slope, claimed = (ends[0] - ends[1]) / 2e-2, float((gradient * direction).sum())
                assert abs(slope - claimed) <= 2e-2 * max(1.0, abs(slope)), (
                    f"the gradient of {name} is wrong: along a direction in which the total changes by {slope:.5g} a "
                    f"unit, the gradient says {claimed:.5g}"
                )

    def test_gradients_scale_with_what_comes_in(self) -> None:
        batch = self._batch()
        _, *whole = self._value_and_gradients(*batch)
        _, *quarter = self._value_and_gradients(*batch, scale=0.25)

        for name, full, part in zip(("hidden", "head.weight"), whole, quarter, strict=True):
            assert torch.allclose(0.25 * full, part, rtol=1e-4, atol=1e-6), (
                f"the gradient of {name} does not scale with the gradient that comes in, which holds the engine's "
                "1 / number of tokens"
            )

    def test_evaluation_gives_the_same_value(self) -> None:
        hidden, head, targets = self._batch()
        training = self._apply(hidden, head, targets)
        with torch.no_grad():
            evaluation = self._apply(hidden, head, targets)

        assert not evaluation.total.requires_grad, "the total is connected to a graph under torch.no_grad()"
        value = training.total.detach()
        assert torch.allclose(value, evaluation.total, rtol=1e-5), (
            f"the total is {float(value):.6g} with gradients and {float(evaluation.total):.6g} without"
        )

    def test_works_with_a_frozen_head(self) -> None:
        hidden, head, targets = self._batch()
        _, expected, _ = self._value_and_gradients(hidden, head, targets)
        head.requires_grad_(False)
        total = self._apply(hidden, head, targets).total

        assert total.requires_grad, "with a frozen head the total is not connected to the hidden states"
        (gradient,) = torch.autograd.grad(total, hidden)
        assert torch.allclose(gradient, expected, rtol=1e-4, atol=1e-6), "a frozen head changes the gradient of hidden"

    def test_changes_nothing(self) -> None:
        hidden, head, targets = self._batch()
        given = {"hidden": hidden, "head.weight": head.weight, "targets": targets}
        before = {name: tensor.detach().clone() for name, tensor in given.items()}
        loss = self.make()

        first, second = (loss(hidden, head, targets).total.detach() for _ in range(2))

        for name, tensor in given.items():
            assert torch.equal(tensor.detach(), before[name]), f"the loss changes {name} in place"
        assert torch.equal(first, second), (
            f"two calls with the same batch give {float(first):.6g} and {float(second):.6g}; a loss has no state"
        )

    def _batch(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, nn.Linear, torch.Tensor]:
        """Hidden states of 3 rows, a head, and targets of which about a third are ignored, some in each row."""
        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn(3, self.seq_len, self.dim, generator=generator).to(dtype).requires_grad_()
        head = nn.Linear(self.dim, self.vocab_size, bias=False)
        nn.init.normal_(head.weight, std=self.dim**-0.5, generator=generator)
        targets = torch.randint(self.vocab_size, (3, self.seq_len), generator=generator)
        targets[:, 1::3] = IGNORED
        targets[1, : self.seq_len // 2] = IGNORED
        return hidden, head.to(dtype), targets

    def _in_two(self, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = (torch.arange(targets.numel()) % 2 == 0).view_as(targets)
        return first, ~first

    def _weighted(
        self, hidden: torch.Tensor, head: nn.Module, targets: torch.Tensor, weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The total, and the gradient of all that is minimised by the hidden states."""
        LEDGER.start_step(torch.ones(()))
        total = apply_loss(self.make(), hidden, head, targets, weights).total
        return total.detach(), torch.autograd.grad(total, hidden)[0]

    def _apply(self, hidden: torch.Tensor, head: nn.Module, targets: torch.Tensor) -> LossSum:
        result: LossSum = self.make()(hidden, head, targets)
        return result

    @torch.enable_grad()
    def _minimised(self, hidden: torch.Tensor, head: nn.Module, targets: torch.Tensor) -> float:
        """The total, and what the loss has attached to the graph beside it, which is known after a backward."""
        LEDGER.start_step(torch.ones(()))
        total = self._apply(hidden, head, targets).total
        torch.autograd.grad(total, hidden)
        return float(total.detach() + sum(LEDGER.means().values()))

    def _value_and_gradients(
        self, hidden: torch.Tensor, head: nn.Linear, targets: torch.Tensor, scale: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The total, and ``scale`` times its gradients by hidden states and head weights."""
        total = self._apply(hidden, head, targets).total
        assert total.requires_grad, "the total is not connected to the graph"
        LEDGER.start_step(torch.tensor(scale))  # for what is attached to the graph
        gradients = torch.autograd.grad(total * scale, (hidden, head.weight), allow_unused=True)
        for name, gradient in zip(("hidden", "head.weight"), gradients, strict=True):
            assert gradient is not None, f"no gradient reaches {name}"
        return total.detach(), gradients[0], gradients[1]
