"""The loss ``dpo`` against its formula in float64, on samples of several pairs, and what it leaves alone."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from forge_core.contracts.loss import LossSum
from forge_core.errors import ConfigError
from forge_core.ops.auxiliary_loss import LEDGER
from forge_plugins_optim.chunked_cross_entropy import ChunkedCrossEntropy
from forge_plugins_optim.cross_entropy import CrossEntropy
from forge_plugins_optim.dpo import DPO, dpo

B, S, D, V = 2, 14, 16, 50
DOCUMENT = torch.tensor([[0] * 4 + [1] * 3 + [2] * 2 + [3] * 4 + [4], [0] * 5 + [1] * 6 + [2] * 3])
"""Two pairs and a padding; one pair and a padding."""
ANSWERS = {0: [slice(1, 3), slice(4, 7), slice(7, 9), slice(10, 12)], 1: [slice(3, 5), slice(7, 10)]}
"""Of each row, where its documents have answers."""
BETA, EPSILON = 0.3, 0.1

each_inner = pytest.mark.parametrize("inner", [CrossEntropy(), ChunkedCrossEntropy(5)], ids=["plain", "chunks"])
each_smoothing = pytest.mark.parametrize("smoothing", [0.0, EPSILON], ids=["dpo", "conservative"])


def batch(dtype=torch.float32):
    """Hidden states, a head, targets, and the entries of pairs."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(B, S, D, generator=generator).to(dtype).requires_grad_()
    head = nn.Linear(D, V)
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    tokens = torch.randint(V, (B, S), generator=generator)
    answers, targets, reference = torch.full((B, S), -100), torch.full((B, S), -100), torch.zeros(B, S)
    for row, places in ANSWERS.items():
        for number, place in enumerate(places):
            answers[row, place] = tokens[row, place]
            reference[row, place.stop - 1] = -3.0 - number - row
            if number % 2 == 0:
                targets[row, place.stop - 1] = tokens[row, place.stop - 1]
    return hidden, head.to(dtype), targets, {"answers": answers, "document": DOCUMENT, "reference": reference}


def of_formula(hidden, head, entries, smoothing, weights=(1.0, 1.0, 1.0)):
    """Each pair by itself: the weighted sum of losses, the gradients, and the margins."""
    hidden = hidden.detach().double().requires_grad_()
    parameters = [parameter.detach().double().requires_grad_() for parameter in head.parameters()]
    logs = F.linear(hidden, *parameters).log_softmax(-1)
    ratios = []
    for row, places in ANSWERS.items():
        for place in places:
            of_answer = logs[row, place].gather(-1, entries["answers"][row, place, None]).sum()
            ratios.append(of_answer - entries["reference"][row, place.stop - 1].double())
    margins = torch.stack([chosen - rejected for chosen, rejected in zip(ratios[::2], ratios[1::2], strict=True)])
    scaled = BETA * margins
    each = -(1 - smoothing) * F.logsigmoid(scaled) - smoothing * F.logsigmoid(-scaled)
    total = (each * torch.tensor(weights, dtype=torch.float64)).sum()
    return total.detach(), torch.autograd.grad(total, [hidden, *parameters]), margins.detach()


@each_inner
@each_smoothing
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"])
def test_value_gradients_and_reports_are_those_of_the_formula(inner, smoothing, dtype, tolerance):
    hidden, head, targets, entries = batch(dtype)
    total, wanted, margins = of_formula(hidden, head, entries, smoothing)
    scale = torch.tensor(1 / 3)
    LEDGER.start_step(scale)

    found = DPO(inner, BETA, smoothing)(hidden, head, targets, **entries)
    gradients = torch.autograd.grad(found.total, [hidden, *head.parameters()], scale)

    torch.testing.assert_close(found.total.double(), total, rtol=tolerance, atol=0)
    assert int(found.count) == 3
    torch.testing.assert_close(found.each.sum(), found.total)
    assert (found.each[targets == -100] == 0).all()
    for gradient, expected in zip(gradients, wanted, strict=True):
        error = (gradient.double() - expected / 3).norm() / (expected / 3).norm()
        assert error < tolerance, f"relative error {error:.1e}"
    reported = {name: float(value) for name, value in LEDGER.means().items()}
    assert reported["reward_margin"] == pytest.approx(BETA * float(margins.mean()), rel=tolerance)
    assert reported["reward_chosen"] - reported["reward_rejected"] == pytest.approx(reported["reward_margin"], rel=1e-4)
    assert reported["reward_accuracy"] == pytest.approx(float((margins > 0).double().mean()))


@each_inner
def test_a_pair_counts_by_the_weight_of_its_target(inner):
    hidden, head, targets, entries = batch()
    weights = (2.0, 0.0, 0.5)
    by_place = torch.full((B, S), 7.0)
    by_place[targets != -100] = torch.tensor(weights)
    total, wanted, _ = of_formula(hidden, head, entries, EPSILON, weights)
    LEDGER.start_step(torch.ones(()))

    found = DPO(inner, BETA, EPSILON)(hidden, head, targets, by_place, **entries)
    gradients = torch.autograd.grad(found.total, [hidden, *head.parameters()])

    torch.testing.assert_close(found.total.double(), total, rtol=1e-5, atol=0)
    for gradient, expected in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-6)


def test_a_pair_without_its_target_does_not_count():
    hidden, head, targets, entries = batch()
    last = targets.clone()
    last[0] = -100
    LEDGER.start_step(torch.ones(()))

    found = DPO(CrossEntropy(), BETA, 0.0)(hidden, head, last, **entries)
    (gradient,) = torch.autograd.grad(found.total, hidden)
    of_all = DPO(CrossEntropy(), BETA, 0.0)(hidden, head, targets, **entries)

    assert int(found.count) == 1
    torch.testing.assert_close(found.each[1], of_all.each[1])
    assert (gradient[0] == 0).all()
    assert (gradient[1] != 0).any()


def test_nothing_to_prefer_is_a_connected_zero():
    hidden, head, targets, entries = batch()

    found = DPO(CrossEntropy(), BETA, 0.0)(hidden, head, torch.full_like(targets, -100), **entries)

    assert float(found.total.detach()) == 0
    assert (torch.autograd.grad(found.total, hidden)[0] == 0).all()


def test_with_the_reference_s_own_probabilities_the_loss_is_the_logarithm_of_two():
    hidden, head, targets, entries = batch()
    with torch.no_grad():
        each = CrossEntropy()(hidden, head, entries["answers"]).each
        for row, places in ANSWERS.items():
            for place in places:
                entries["reference"][row, place.stop - 1] = -each[row, place].sum()
        found = DPO(CrossEntropy(), BETA, EPSILON)(hidden, head, targets, **entries)

    assert float(found.total) / 3 == pytest.approx(0.693147, abs=1e-6)


def test_a_batch_without_pairs_has_the_inner_loss():
    hidden, head, targets, _ = batch()

    found, expected = DPO(CrossEntropy(), BETA, 0.0)(hidden, head, targets), CrossEntropy()(hidden, head, targets)

    assert torch.equal(found.total, expected.total)


def test_a_loss_without_weights_is_refused_by_name_before_the_first_step():
    """It was a TypeError in step 1."""
    config = SimpleNamespace(loss=SimpleNamespace(name="mine"), beta=BETA, label_smoothing=0.0)

    with pytest.raises(ConfigError, match=r"loss\.loss: dpo gives weights to targets, which mine does not take"):
        dpo(config, build=lambda _: lambda hidden, head, targets: LossSum(hidden.sum(), (targets != -100).sum()))


def test_a_loss_that_tells_nothing_of_each_target_is_refused():
    def mine(hidden, head, targets, weights=None):
        return CrossEntropy()(hidden, head, targets, weights)._replace(each=None)

    hidden, head, targets, entries = batch()
    with pytest.raises(ConfigError, match="needs the loss of each target"):
        DPO(mine, BETA, 0.0)(hidden, head, targets, **entries)
