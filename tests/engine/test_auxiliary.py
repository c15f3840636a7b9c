import pytest
import torch
from torch.utils.checkpoint import checkpoint

from forge_core.auxiliary import LEDGER, attach_auxiliary_loss


@pytest.fixture
def weights():
    return torch.randn(4, 4, dtype=torch.float64, requires_grad=True)


def _layer(weights, hidden):
    out = hidden @ weights
    return attach_auxiliary_loss(out, 0.01 * out.square().sum(), "size")


def _expected(weights, hidden, tokens):
    copy = weights.detach().clone().requires_grad_()
    out = hidden @ copy
    ((out.sum() + 0.01 * out.square().sum()) / tokens).backward()
    return copy.grad


def test_the_gradient_is_that_of_the_sum_of_both_losses(weights):
    hidden = torch.randn(6, 4, dtype=torch.float64)
    scale = torch.tensor(1 / 6, dtype=torch.float64)
    LEDGER.start_step(scale)

    _layer(weights, hidden).sum().backward(scale)

    torch.testing.assert_close(weights.grad, _expected(weights, hidden, 6))


def test_the_gradient_and_the_report_do_not_depend_on_microbatches(weights):
    hidden = torch.randn(6, 4, dtype=torch.float64)
    scale = torch.tensor(1 / 6, dtype=torch.float64)
    LEDGER.start_step(scale)

    for part in hidden.split([1, 2, 3]):
        _layer(weights, part).sum().backward(scale)

    torch.testing.assert_close(weights.grad, _expected(weights, hidden, 6))
    torch.testing.assert_close(LEDGER.means()["size"], 0.01 * (hidden @ weights.detach()).square().sum() / 6)


def test_recomputation_changes_neither_gradient_nor_report(weights):
    hidden = torch.randn(6, 4, dtype=torch.float64)
    scale = torch.tensor(1 / 6, dtype=torch.float64)
    LEDGER.start_step(scale)

    checkpoint(_layer, weights, hidden, use_reentrant=False).sum().backward(scale)

    torch.testing.assert_close(weights.grad, _expected(weights, hidden, 6))
    torch.testing.assert_close(LEDGER.means()["size"], 0.01 * (hidden @ weights.detach()).square().sum() / 6)


def test_evaluation_attaches_nothing(weights):
    LEDGER.start_step(torch.tensor(1.0))

    with torch.no_grad():
        _layer(weights, torch.randn(2, 4, dtype=torch.float64))

    assert LEDGER.means() == {}
