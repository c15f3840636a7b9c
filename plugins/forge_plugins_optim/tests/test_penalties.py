"""``z_loss`` and ``label_smoothing`` around each loss, against formulas in float64."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from forge_core.contracts.loss import LossSum, VocabularyPart
from forge_core.ops.auxiliary_loss import LEDGER, attach_auxiliary_loss
from forge_plugins_optim.chunked_cross_entropy import ChunkedCrossEntropy
from forge_plugins_optim.cross_entropy import CrossEntropy
from forge_plugins_optim.label_smoothing import LabelSmoothing
from forge_plugins_optim.z_loss import ZLoss

B, S, D, V = 2, 9, 16, 50
Z, EPSILON = 0.03, 0.2


def plain(hidden, head, targets) -> LossSum:
    """A loss of somebody else, which has no log-partitions to give."""
    total = F.cross_entropy(head(hidden).float().flatten(0, 1), targets.flatten(), reduction="sum")
    return LossSum(total, (targets != -100).sum())


INNER = {
    "whole": CrossEntropy(),
    "chunks of 4": ChunkedCrossEntropy(4),
    "one chunk": ChunkedCrossEntropy(99),
    "other": plain,
}
OUTER = {
    "nothing": lambda inner: inner,
    "z": lambda inner: ZLoss(inner, Z),
    "smooth": lambda inner: LabelSmoothing(inner, EPSILON),
    "smooth z": lambda inner: LabelSmoothing(ZLoss(inner, Z), EPSILON),
    "z smooth": lambda inner: ZLoss(LabelSmoothing(inner, EPSILON), Z),
}
each_inner = pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
each_outer = pytest.mark.parametrize("outer", [name for name in OUTER if name != "nothing"])
each_inner_that_takes_weights = pytest.mark.parametrize(
    "inner",
    [inner for name, inner in INNER.items() if name != "other"],
    ids=[name for name in INNER if name != "other"],
)


def batch(dtype=torch.float32, ignored=0.3, bias=True):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(B, S, D, generator=generator).to(dtype).requires_grad_()
    head = nn.Linear(D, V, bias=bias)
    for parameter in head.parameters():
        nn.init.normal_(parameter, generator=generator)
    targets = torch.randint(V, (B, S), generator=generator)
    targets[torch.rand(B, S, generator=generator) < ignored] = -100
    return hidden, head.to(dtype), targets


def weights_of_targets() -> torch.Tensor:
    """Some of them 0."""
    return torch.rand(B, S, generator=torch.Generator().manual_seed(5)).mul(3).sub(0.5).clamp(min=0)


def expected(
    outer: str, hidden, head, targets, weights=None
) -> tuple[torch.Tensor, dict[str, float], list[torch.Tensor]]:
    """In float64: cross-entropy, what is added to it by name, and the gradients of it all."""
    weights = (torch.ones(B, S) if weights is None else weights).double().flatten()
    hidden, weight = hidden.detach().double().requires_grad_(), head.weight.detach().double().requires_grad_()
    bias = None if head.bias is None else head.bias.detach().double().requires_grad_()
    logits, flat = F.linear(hidden, weight, bias).flatten(0, 1), targets.flatten()
    each = F.cross_entropy(logits, flat, reduction="none")
    task = (weights * each).sum()
    added = {}
    if "z" in outer:
        added["z_loss"] = Z * (weights * logits.logsumexp(1).square() * (flat != -100)).sum()
    if "smooth" in outer:
        smoothed = F.cross_entropy(logits, flat, reduction="none", label_smoothing=EPSILON)
        added["label_smoothing"] = (weights * (smoothed - each)).sum()
    inputs = [one for one in (hidden, weight, bias) if one is not None]
    gradients = torch.autograd.grad(task + sum(added.values()), inputs)
    return task.detach(), {name: value.item() for name, value in added.items()}, list(gradients)


@each_inner
@each_outer
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"])
def test_value_and_gradients_are_those_of_the_formula(inner, outer, bias, dtype, tolerance) -> None:
    hidden, head, targets = batch(dtype, bias=bias)
    task, added, wanted = expected(outer, hidden, head, targets)
    scale = torch.tensor(1 / 7)
    LEDGER.start_step(scale)

    summed = OUTER[outer](inner)(hidden, head, targets)
    gradients = torch.autograd.grad(summed.total, [hidden, *head.parameters()], scale)

    torch.testing.assert_close(summed.total.double(), task, rtol=tolerance, atol=0)
    for gradient, of_formula in zip(gradients, wanted, strict=True):
        error = (gradient.double() - of_formula / 7).norm() / (of_formula / 7).norm()
        assert error < tolerance, f"relative error {error:.1e}"
    reported = {name: value.item() * 7 for name, value in LEDGER.means().items()}
    assert reported == pytest.approx(added, rel=max(tolerance, 1e-4))


@each_inner_that_takes_weights
@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"])
def test_with_weights_value_and_gradients_are_those_of_the_weighted_formula(inner, outer, dtype, tolerance) -> None:
    hidden, head, targets = batch(dtype)
    weights = weights_of_targets()
    task, added, wanted = expected(outer, hidden, head, targets, weights)
    LEDGER.start_step(torch.ones(()))
    loss = OUTER[outer](inner)

    summed = loss(hidden, head, targets, weights)
    gradients = torch.autograd.grad(summed.total, [hidden, *head.parameters()])

    assert loss.takes_weights
    assert summed.total.dtype == torch.float32
    torch.testing.assert_close(summed.total.double(), task, rtol=tolerance, atol=0)
    for gradient, of_formula in zip(gradients, wanted, strict=True):
        error = (gradient.double() - of_formula).norm() / of_formula.norm()
        assert error < tolerance, f"relative error {error:.1e}"
    assert {name: value.item() for name, value in LEDGER.means().items()} == pytest.approx(
        added, rel=max(tolerance, 1e-4)
    )
    with torch.no_grad():  # each is for reports, which weigh nothing
        torch.testing.assert_close(summed.each, inner(hidden, head, targets).each)
    assert int(summed.count) == int((targets != -100).sum())


@each_outer
def test_a_loss_around_one_without_weights_takes_none_either(outer) -> None:
    assert not OUTER[outer](plain).takes_weights


@each_outer
def test_a_loss_around_one_without_a_perplexity_has_none_either(outer) -> None:
    def error(hidden: torch.Tensor, head: torch.nn.Module, targets: torch.Tensor) -> LossSum:
        return plain(hidden, head, targets)

    error.has_perplexity = False  # type: ignore[attr-defined]  # of a function
    assert OUTER[outer](plain).has_perplexity
    assert not OUTER[outer](error).has_perplexity


class Tempered:
    """Somebody's loss, of logits times an entry; without it they are as they are, as are log-partitions at hand."""

    takes_weights = True
    takes_entries = ("scales",)
    with_z_loss = CrossEntropy.with_z_loss

    def __call__(self, hidden, head, targets, weights=None, *, scales=None):
        return CrossEntropy()(hidden if scales is None else hidden * scales.unsqueeze(-1), head, targets, weights)


@each_outer
@pytest.mark.parametrize("weights", [None, weights_of_targets()], ids=["plain", "weighted"])
def test_entries_reach_the_loss_inside(weights, outer) -> None:
    """They were not declared, so that it was called without them, in silence."""
    hidden, head, targets = batch(bias=False)
    scales = torch.rand(B, S, generator=torch.Generator().manual_seed(6)).add(0.5)
    bare, around = Tempered(), OUTER[outer](Tempered())
    _, added, (wanted, *_) = expected(outer, hidden, head, targets, weights)
    task, _, (of_task, *_) = expected("nothing", hidden * scales.unsqueeze(-1), head, targets, weights)
    _, _, (untempered, *_) = expected("nothing", hidden, head, targets, weights)
    LEDGER.start_step(torch.ones(()))

    taken = {"scales": scales}
    total = around(hidden, head, targets, weights, **taken).total
    (gradient,) = torch.autograd.grad(total, hidden)

    assert around.takes_entries == bare.takes_entries
    torch.testing.assert_close(total.double(), task, rtol=1e-5, atol=0)
    wanted = wanted - untempered + of_task * scales.double().unsqueeze(-1)
    torch.testing.assert_close(gradient.double(), wanted, rtol=1e-4, atol=1e-5)
    assert {name: value.item() for name, value in LEDGER.means().items()} == pytest.approx(added, rel=1e-4)
    with torch.no_grad():
        found = around(hidden, head, targets, **taken).total
        assert torch.equal(found, bare(hidden, head, targets, **taken).total)
        assert torch.equal(around(hidden, head, targets).total, bare(hidden, head, targets).total)


@each_inner
@each_outer
def test_nothing_to_learn_is_a_finite_zero_with_a_gradient(inner, outer) -> None:
    hidden, head, targets = batch(ignored=1.1)
    LEDGER.start_step(torch.ones(()))

    total = OUTER[outer](inner)(hidden, head, targets).total
    gradients = torch.autograd.grad(total, [hidden, *head.parameters()])

    assert total == 0
    assert all((gradient == 0).all() for gradient in gradients)
    assert all(value == 0 for value in LEDGER.means().values())


@each_outer
@pytest.mark.parametrize("inner", [CrossEntropy(), ChunkedCrossEntropy(4)], ids=["whole", "chunks"])
def test_what_ignored_positions_hold_reaches_no_penalty(inner, outer) -> None:
    """NaN there is the guard's affair if the model makes it; here it would spoil the sums of others."""
    hidden, head, targets = batch()
    _, added, _ = expected(outer, hidden, head, targets)
    LEDGER.start_step(torch.ones(()))
    with torch.no_grad():
        hidden[targets == -100] = float("nan")

    torch.autograd.grad(OUTER[outer](inner)(hidden, head, targets).total, hidden)

    assert {name: value.item() for name, value in LEDGER.means().items()} == pytest.approx(added, rel=1e-4)


class InOnePart(nn.Linear):
    """A head cut by vocabulary over one rank. Over two, it is in the parity matrix."""

    def vocabulary_part(self, hidden):
        return VocabularyPart(hidden, self.weight, self.bias, 0, dist.group.WORLD)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("weights", [None, weights_of_targets()], ids=["plain", "weighted"])
@pytest.mark.parametrize("ignored", [0.3, 1.1], ids=["some", "all"])
@pytest.mark.parametrize("inner", [CrossEntropy(), ChunkedCrossEntropy(4)], ids=["whole", "chunks"])
def test_by_vocabulary_value_and_gradients_are_the_same(inner, ignored, weights, outer) -> None:
    hidden, linear, targets = batch(ignored=ignored)
    head = InOnePart(D, V)
    head.load_state_dict(linear.state_dict())
    task, added, wanted = expected(outer, hidden, head, targets, weights)
    LEDGER.start_step(torch.ones(()))

    total = OUTER[outer](inner)(hidden, head, targets, weights).total
    gradients = torch.autograd.grad(total, [hidden, *head.parameters()])

    torch.testing.assert_close(total.double(), task, rtol=1e-5, atol=0)
    for gradient, of_formula in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient.double(), of_formula, rtol=1e-4, atol=1e-4)
    assert {name: value.item() for name, value in LEDGER.means().items()} == pytest.approx(added, rel=1e-4)


@pytest.mark.usefixtures("one_rank")
def test_by_vocabulary_a_loss_of_bf16_is_in_fp32() -> None:
    hidden, linear, targets = batch(torch.bfloat16)
    head = InOnePart(D, V, dtype=torch.bfloat16)
    head.load_state_dict(linear.state_dict())

    total = CrossEntropy()(hidden, head, targets).total

    logits = linear(hidden).double().flatten(0, 1)
    wanted = F.cross_entropy(logits, targets.flatten(), reduction="sum")
    torch.testing.assert_close(total.double(), wanted, rtol=1e-5, atol=0)


@each_outer
def test_evaluation_is_that_of_the_loss_inside(outer) -> None:
    hidden, head, targets = batch()
    LEDGER.start_step(torch.ones(()))

    with torch.no_grad():
        found, wanted = OUTER[outer](CrossEntropy())(hidden, head, targets), CrossEntropy()(hidden, head, targets)

    assert torch.equal(found.total, wanted.total)
    assert torch.equal(found.each, wanted.each)
    assert LEDGER.means() == {}


@each_outer
def test_a_head_that_does_more_is_applied_as_it_is(outer) -> None:
    class Capped(nn.Linear):
        def forward(self, hidden):
            return 3 * torch.tanh(super().forward(hidden) / 3)

    hidden, linear, targets = batch()
    head = Capped(D, V)
    head.load_state_dict(linear.state_dict())
    LEDGER.start_step(torch.ones(()))

    total = OUTER[outer](CrossEntropy())(hidden, head, targets).total
    (gradient,) = torch.autograd.grad(total, hidden)

    logits, flat = head(hidden).double().flatten(0, 1), targets.flatten()
    minimised = F.cross_entropy(logits, flat, reduction="sum", label_smoothing=EPSILON if "smooth" in outer else 0.0)
    if "z" in outer:
        minimised = minimised + Z * (logits.logsumexp(1).square() * (flat != -100)).sum()
    (wanted,) = torch.autograd.grad(minimised, hidden)
    torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5)


@each_outer
def test_penalties_of_a_head_that_does_more_are_in_fp32(outer) -> None:
    class Capped(nn.Linear):
        def forward(self, hidden):
            return 3 * torch.tanh(super().forward(hidden) / 3)

    hidden, linear, targets = batch(torch.bfloat16)
    head = Capped(D, V, dtype=torch.bfloat16)
    head.load_state_dict(linear.state_dict())
    LEDGER.start_step(torch.ones(()))

    torch.autograd.grad(OUTER[outer](CrossEntropy())(hidden, head, targets).total, hidden)

    logits = head(hidden).detach().double().flatten(0, 1)
    exact = nn.Linear(V, V, bias=False, dtype=torch.float64)
    nn.init.eye_(exact.weight)
    _, added, _ = expected(outer, logits.unflatten(0, (B, S)), exact, targets)
    assert {name: value.item() for name, value in LEDGER.means().items()} == pytest.approx(added, rel=1e-5)


def test_a_part_of_a_weighted_loss_has_its_weight() -> None:
    """As a predictor of further tokens, whose loss is weighted, and divided by another number of targets."""
    hidden, head, targets = batch()
    task, added, (wanted, *_) = expected("smooth z", hidden, head, targets)
    LEDGER.start_step(torch.tensor(1 / 7), own_scales={"ahead": torch.tensor(1 / 3)})

    own = OUTER["smooth z"](CrossEntropy())(hidden, head, targets).total
    total = attach_auxiliary_loss(hidden.sum(), 0.25 * own, "ahead", place="head")
    (gradient,) = torch.autograd.grad(total, hidden, torch.zeros(()))

    torch.testing.assert_close(gradient.double(), 0.25 / 3 * wanted, rtol=1e-4, atol=1e-7)
    reported = {name: value.item() for name, value in LEDGER.means().items()}
    assert reported.pop("ahead") == pytest.approx(0.25 / 3 * task.item(), rel=1e-5)
    assert reported == pytest.approx({name: 0.25 / 3 * value for name, value in added.items()}, rel=1e-4)


class Whole(nn.Module):
    """A model that returns its loss."""

    def __init__(self, loss) -> None:
        super().__init__()
        self.head, self.loss = nn.Linear(D, V), loss

    def forward(self, hidden, targets) -> LossSum:
        return self.loss(hidden, self.head, targets)


@pytest.mark.usefixtures("one_rank")
@each_outer
def test_fsdp_warns_of_nothing(outer) -> None:
    """It said of a total with a penalty that it may lead to wrong gradients: a view, of which it warns."""
    model = fully_shard(Whole(OUTER[outer](CrossEntropy())), mesh=init_device_mesh("cpu", (1,)))
    hidden, _, targets = batch()
    LEDGER.start_step(torch.ones(()))

    model(hidden, targets).total.backward()

    assert LEDGER.means().keys() == {{"z": "z_loss", "smooth": "label_smoothing"}[name] for name in outer.split()}


def test_one_product_with_the_head_is_enough_for_the_log_partitions() -> None:
    hidden, head, targets = batch(bias=False)

    for inner, forward in ((CrossEntropy(), 1), (ChunkedCrossEntropy(99), 3)):  # the chunked one has the gradients' too
        with torch.profiler.profile() as profile:
            OUTER["z"](inner)(hidden, head, targets)
        assert (
            sum(event.count for event in profile.key_averages() if event.key in ("aten::mm", "aten::addmm_")) == forward
        )


def test_the_partition_of_equal_logits_is_the_logarithm_of_their_number() -> None:
    hidden, head = torch.zeros(1, 10, D, requires_grad=True), nn.Linear(D, V, bias=False)
    LEDGER.start_step(torch.ones(()))

    OUTER["z"](CrossEntropy())(hidden, head, torch.arange(10).unsqueeze(0)).total.backward()

    assert LEDGER.means()["z_loss"].item() == pytest.approx(10 * Z * math.log(V) ** 2, rel=1e-5)
