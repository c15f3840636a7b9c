"""The loss kit passes a loss that keeps the contract, and has a sentence for each way to break it."""

import pytest
import torch
import torch.nn.functional as F

from forge_core.contracts.loss import IGNORED, LossSum
from forge_testing.loss import LossConformance


def cross_entropy(hidden, head, targets):
    """Keeps the contract."""
    logits = head(hidden).flatten(0, 1).float()
    return LossSum(F.cross_entropy(logits, targets.flatten(), reduction="sum"), (targets != -100).sum())


def weighing(weigh):
    """A loss that takes weights, which ``weigh(each, weights)`` applies."""

    def loss(hidden, head, targets, weights=None):
        logits = head(hidden).flatten(0, 1).float()
        each = F.cross_entropy(logits, targets.flatten(), reduction="none").view(targets.shape)
        used = each if weights is None else weigh(each, weights)
        return LossSum(used.sum(), (targets != IGNORED).sum(), each.detach())

    loss.takes_weights = True
    return loss


class TestWeighing(LossConformance):
    def make(self):
        return weighing(lambda each, weights: each * weights)


class TestCrossEntropy(LossConformance):
    def make(self):
        return cross_entropy


def changed(**fields):
    """A loss whose total or count goes through a function."""
    return lambda *batch: (
        result := cross_entropy(*batch),
        result._replace(**{name: change(getattr(result, name)) for name, change in fields.items()}),
    )[1]


def mean(hidden, head, targets):
    total, count, _ = cross_entropy(hidden, head, targets)
    return LossSum(total / count.clamp(min=1), count)


def a_pair(hidden, head, targets):
    return tuple(cross_entropy(hidden, head, targets))


def with_each(change, detached=True):
    """The loss of each position, after ``change``."""

    def loss(hidden, head, targets):
        total, count, _ = cross_entropy(hidden, head, targets)
        logits = head(hidden).flatten(0, 1).float()
        each = F.cross_entropy(logits, targets.flatten(), reduction="none").view(targets.shape)
        return LossSum(total, count, change(each.detach() if detached else each, targets))

    return loss


def in_bf16(hidden, head, targets):
    total, count, _ = cross_entropy(hidden, head, targets)
    return LossSum(total.bfloat16().float(), count)


def with_z_loss_everywhere(hidden, head, targets):
    total, count, _ = cross_entropy(hidden, head, targets)
    return LossSum(total + 0.1 * head(hidden).float().logsumexp(-1).square().sum() * (count > 0), count)


def learning_from_ignored(hidden, head, targets):
    total, count, _ = cross_entropy(hidden, head, targets)
    leak = (hidden.float() - hidden.float().detach()).sum() * (count > 0)
    return LossSum(total + leak, count)


def ignored_weights(hidden, head, targets):
    """Value and gradient of hidden are right, that of head.weight sees ignored positions."""
    total, count, _ = cross_entropy(hidden, head, targets)
    logits = F.linear(hidden.detach(), head.weight).float()
    return LossSum(total + (logits - logits.detach()).sum() * (count > 0), count)


def nan_without_tokens(hidden, head, targets):
    total, count, _ = cross_entropy(hidden, head, targets)
    return LossSum(total / count * count, count)


def constant_without_tokens(hidden, head, targets):
    total, count, _ = cross_entropy(hidden, head, targets)
    return LossSum(total if count else torch.zeros(()), count)


def count_at_least_one(hidden, head, targets):
    total, count, _ = cross_entropy(hidden, head, targets)
    return LossSum(total, count.clamp(min=1))


def gradient_without_tokens(hidden, head, targets):
    total, count, _ = cross_entropy(hidden, head, targets)
    return LossSum(total + (hidden - hidden.detach()).float().sum(), count)


def double_gradient_of_hidden(hidden, head, targets):
    return cross_entropy(2 * hidden - hidden.detach(), head, targets)


class FixedGradient(torch.autograd.Function):
    """Forgets what comes in."""

    @staticmethod
    def forward(ctx, total):
        return total.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.ones_like(gradient)


def label_smoothing_in_training(hidden, head, targets):
    total, count, _ = cross_entropy(hidden, head, targets)
    return LossSum(total * (1.1 if torch.is_grad_enabled() else 1.0), count)


def always_a_graph(hidden, head, targets):
    with torch.enable_grad():
        return cross_entropy(hidden, head, targets)


def through_the_head_only(hidden, head, targets):
    if not head.weight.requires_grad:
        hidden = hidden.detach()
    return cross_entropy(hidden, head, targets)


def scaled_with_a_frozen_head(hidden, head, targets):
    total, count, _ = cross_entropy(hidden, head, targets)
    return LossSum(total if head.weight.requires_grad else 2 * total, count)


def overwriting_targets(hidden, head, targets):
    result = cross_entropy(hidden, head, targets)
    targets.clamp_(min=0)
    return result


def noisy(hidden, head, targets):
    total, count, _ = cross_entropy(hidden, head, targets)
    return LossSum(total * (1 + 0.1 * torch.rand(())), count)


FP32 = (torch.float32,)
FAULTS = [
    (a_pair, "test_returns_an_fp32_total_and_an_integer_count", FP32, "must return a LossSum, got tuple"),
    (
        changed(total=lambda x: x.bfloat16()),
        "test_returns_an_fp32_total_and_an_integer_count",
        FP32,
        "LossSum.total must be torch.float32, got torch.bfloat16",
    ),
    (
        changed(total=lambda x: x[None]),
        "test_returns_an_fp32_total_and_an_integer_count",
        FP32,
        r"LossSum.total must be a scalar, got the shape \(1,\)",
    ),
    (
        changed(count=lambda x: x.float()),
        "test_returns_an_fp32_total_and_an_integer_count",
        FP32,
        "LossSum.count must be torch.int64",
    ),
    (
        changed(count=int),
        "test_returns_an_fp32_total_and_an_integer_count",
        FP32,
        "LossSum.count must be a tensor, which stays on its device; got int",
    ),
    (
        changed(count=lambda x: x + 1),
        "test_returns_an_fp32_total_and_an_integer_count",
        FP32,
        "the number of targets that are not -100",
    ),
    (
        with_each(lambda each, targets: each[:1]),
        "test_the_loss_of_each_position_is_its_part_of_the_total",
        (),
        r"must have the targets' shape, \(3, 12\), got \(1, 12\)",
    ),
    (
        with_each(lambda each, targets: each.double()),
        "test_the_loss_of_each_position_is_its_part_of_the_total",
        (),
        "must be torch.float32, got torch.float64",
    ),
    (
        with_each(lambda each, targets: each, detached=False),
        "test_the_loss_of_each_position_is_its_part_of_the_total",
        (),
        "must be detached",
    ),
    (
        with_each(lambda each, targets: each + (targets == IGNORED)),
        "test_the_loss_of_each_position_is_its_part_of_the_total",
        (),
        "must be 0 where the target is -100",
    ),
    (
        with_each(lambda each, targets: 2 * each),
        "test_the_loss_of_each_position_is_its_part_of_the_total",
        (),
        "LossSum.each adds up to .*, and the total is",
    ),
    (
        weighing(lambda each, weights: each),
        "test_with_weights_each_target_counts_by_its_own",
        (),
        "multiply the loss of each position by its weight",
    ),
    (
        weighing(lambda each, weights: each * weights / weights.mean()),
        "test_with_weights_each_target_counts_by_its_own",
        (),
        "the total is not 2 times",
    ),
    (in_bf16, "test_is_computed_in_fp32", (), "has only the resolution of bf16"),
    (mean, "test_is_a_sum_over_tokens", (), "return the sum over valid tokens, not their mean"),
    (with_z_loss_everywhere, "test_what_ignored_positions_hold_does_not_matter", (), "change the total"),
    (learning_from_ignored, "test_what_ignored_positions_hold_does_not_matter", (), "a gradient reaches hidden states"),
    (ignored_weights, "test_what_ignored_positions_hold_does_not_matter", (), "change the gradient of head.weight"),
    (nan_without_tokens, "test_nothing_to_learn_is_a_connected_zero", FP32, "must be 0, got nan"),
    (constant_without_tokens, "test_nothing_to_learn_is_a_connected_zero", FP32, "not connected to the graph"),
    (count_at_least_one, "test_nothing_to_learn_is_a_connected_zero", FP32, "the count of .* must be 0, got 1"),
    (gradient_without_tokens, "test_nothing_to_learn_is_a_connected_zero", FP32, "must be zero"),
    (double_gradient_of_hidden, "test_gradients_match_differences", (), "the gradient of hidden is wrong"),
    (changed(total=lambda x: x.detach()), "test_gradients_match_differences", (), "not connected to the graph"),
    (
        lambda hidden, head, targets: cross_entropy(hidden.detach(), head, targets),
        "test_gradients_match_differences",
        (),
        "no gradient reaches hidden",
    ),
    (changed(total=FixedGradient.apply), "test_gradients_scale_with_what_comes_in", (), "hidden does not scale"),
    (label_smoothing_in_training, "test_evaluation_gives_the_same_value", (), "with gradients and .* without"),
    (always_a_graph, "test_evaluation_gives_the_same_value", (), "connected to a graph under"),
    (through_the_head_only, "test_works_with_a_frozen_head", (), "not connected to the hidden states"),
    (scaled_with_a_frozen_head, "test_works_with_a_frozen_head", (), "changes the gradient of hidden"),
    (overwriting_targets, "test_changes_nothing", (), "changes targets in place"),
    (noisy, "test_changes_nothing", (), "a loss has no state"),
]


@pytest.mark.parametrize(("loss", "check", "given", "sentence"), FAULTS)
def test_a_fault_is_found_and_told(loss, check, given, sentence):
    class Case(LossConformance):
        def make(self):
            return loss

    with pytest.raises(AssertionError, match=sentence):
        getattr(Case(), check)(*given)


def test_every_check_has_a_fault_that_it_finds():
    checks = {name for name in vars(LossConformance) if name.startswith("test_")}

    assert {check for _, check, _, _ in FAULTS} == checks
