import pytest
import torch
from torch.utils.checkpoint import checkpoint

from forge_core.ops.auxiliary_loss import LEDGER, attach_auxiliary_loss


@pytest.fixture
def weights():
    return torch.randn(4, 4, dtype=torch.float64, requires_grad=True)


def _layer(weights, hidden):
    out = hidden @ weights
    return attach_auxiliary_loss(out, 0.01 * out.square().sum(), "size", place="stream")


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


def test_a_backward_for_inputs_and_another_for_parameters_report_once(weights):
    """As zero-bubble pipelines do; the loss is computed from what does not depend on the stage's input."""
    hidden = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    LEDGER.start_step(torch.tensor(1 / 6, dtype=torch.float64))
    size = 0.01 * (hidden.detach() @ weights).square().sum()

    attached = attach_auxiliary_loss(2 * hidden, size, "size", place="read")
    attached.sum().backward(inputs=[hidden], retain_graph=True)
    attached.sum().backward(inputs=[weights])

    torch.testing.assert_close(LEDGER.means()["size"], size.detach() / 6)
    torch.testing.assert_close(
        weights.grad, _expected(weights, hidden.detach(), 6) - hidden.detach().sum(0)[:, None] / 6
    )


def test_evaluation_attaches_nothing(weights):
    LEDGER.start_step(torch.tensor(1.0))

    with torch.no_grad():
        _layer(weights, torch.randn(2, 4, dtype=torch.float64))

    assert LEDGER.means() == {}


def test_ranks_that_compute_the_same_value_share_its_gradient_and_its_report(weights):
    """Along tp the gradients of what is read are added up, and so are the reports."""
    hidden = torch.randn(6, 4, dtype=torch.float64)
    scale = torch.tensor(1 / 6, dtype=torch.float64)
    LEDGER.start_step(scale, readers=2)

    out = hidden @ weights
    attached = attach_auxiliary_loss(out, 0.01 * out.square().sum(), "size", place="read")
    (0 * attached).sum().backward()

    half = 0.01 * (hidden @ weights.detach()).square().sum() / 6 / 2
    torch.testing.assert_close(LEDGER.means()["size"], half)
    alone = weights.detach().clone().requires_grad_()
    (0.01 * (hidden @ alone).square().sum() / 6 / 2).backward()
    torch.testing.assert_close(weights.grad, alone.grad)


def test_what_the_head_gives_is_reported_once_and_each_rank_goes_on_with_its_gradient(weights):
    """The ranks along tp compute one loss of it, each the gradient of its part of the vocabulary."""
    hidden = torch.randn(6, 4, dtype=torch.float64)
    LEDGER.start_run()
    LEDGER.share_out_stream()
    LEDGER.start_step(torch.tensor(1 / 6, dtype=torch.float64), readers=2)

    out = hidden @ weights
    attached = attach_auxiliary_loss(out, 0.01 * out.square().sum(), "size", place="head")
    (0 * attached).sum().backward()
    reported = LEDGER.means()["size"]
    LEDGER.start_run()

    torch.testing.assert_close(reported, 0.01 * (hidden @ weights.detach()).square().sum() / 6 / 2)
    alone = weights.detach().clone().requires_grad_()
    (0.01 * (hidden @ alone).square().sum() / 6).backward()
    torch.testing.assert_close(weights.grad, alone.grad)


def test_a_loss_may_be_a_mean_over_other_tokens_than_the_task_is(weights):
    hidden = torch.randn(6, 4, dtype=torch.float64)
    scales = {"size": torch.tensor(1 / 5, dtype=torch.float64)}
    LEDGER.start_step(torch.tensor(1 / 6, dtype=torch.float64), own_scales=scales)

    _layer(weights, hidden).sum().backward(torch.tensor(1 / 5, dtype=torch.float64))

    torch.testing.assert_close(weights.grad, _expected(weights, hidden, 5))
    torch.testing.assert_close(LEDGER.means()["size"], 0.01 * (hidden @ weights.detach()).square().sum() / 5)


def test_only_what_comes_from_the_head_is_a_mean_over_targets(weights):
    """Of six tokens five have a target."""
    hidden = torch.randn(6, 4)
    LEDGER.start_step(torch.tensor(1 / 5), token_scale=torch.tensor(1 / 6))

    out = hidden @ weights.detach().float().requires_grad_()
    for place in ("head", "read", "stream"):
        attach_auxiliary_loss(out, 3 * out.sum() / out.sum().detach(), place, place=place).sum().backward(
            retain_graph=True
        )

    assert {name: round(value.item(), 4) for name, value in LEDGER.means().items()} == {
        "head": 0.6,
        "read": 0.5,
        "stream": 0.5,
    }


@pytest.mark.parametrize(("shared_out", "copies"), [(True, 1), (False, 2)])
def test_what_the_stream_gives_is_shared_out_or_computed_by_each_rank(weights, shared_out, copies):
    LEDGER.start_run()
    if shared_out:
        LEDGER.share_out_stream()
    LEDGER.start_step(torch.tensor(1 / 6, dtype=torch.float64), readers=2)

    hidden = torch.randn(6, 4, dtype=torch.float64)
    _layer(weights, hidden).sum().backward()
    reported = LEDGER.means()["size"]
    LEDGER.start_run()

    torch.testing.assert_close(reported, 0.01 * (hidden @ weights.detach()).square().sum() / 6 / copies)


@pytest.mark.parametrize("trained", [True, False])
def test_a_loss_that_follows_is_weighted_as_what_it_follows_and_reported_also_without_a_gradient(trained):
    LEDGER.start_step(torch.tensor(1 / 4))
    total, value = torch.tensor(2.0, requires_grad=True), torch.tensor(3.0, dtype=torch.float64, requires_grad=trained)

    attach_auxiliary_loss(total, value, "size", place="head", follow=True).backward(torch.tensor(5 / 4))

    assert total.grad == 5 / 4
    assert value.grad == (5 / 4 if trained else None)
    assert LEDGER.means()["size"].item() == 5 * 3 / 4


def test_a_value_without_a_gradient_is_not_reported_by_itself(weights):
    LEDGER.start_step(torch.tensor(1.0))

    attach_auxiliary_loss(weights, torch.tensor(3.0), "size", place="read").sum().backward()

    assert LEDGER.means() == {}


def test_sums_are_in_one_order_on_ranks_that_have_made_them_in_another():
    values = {("balance", "read"): 1.0, ("z", "head"): 2.0, ("z", "stream"): 3.0}
    for order in (values, reversed(values)):
        LEDGER.start_step(torch.ones(()))
        for name, place in order:
            LEDGER.add(name, place, torch.tensor(values[name, place]))

        assert [one.item() for one in LEDGER.sums()] == [1.0, 2.0, 3.0]


def test_a_loss_that_comes_from_several_places_is_reported_as_their_sum(weights):
    """One name may be an expert layer's and a head's."""
    LEDGER.start_step(torch.tensor(1 / 5), token_scale=torch.tensor(1 / 6))
    value = torch.tensor(3.0, requires_grad=True)

    for place in ("head", "read", "read"):
        attach_auxiliary_loss(weights, value, "size", place=place).sum().backward()

    torch.testing.assert_close(LEDGER.means(), {"size": torch.tensor(3 / 5 + 3 / 6 + 3 / 6)})


@pytest.mark.parametrize("name", ["record_auxiliary_loss", "accumulate"])
def test_what_is_another_thing_in_each_step_is_kept_out_of_cuda_graphs(name):
    (overload,) = getattr(torch.ops.forge, name).overloads()

    assert torch.Tag.cudagraph_unsafe in getattr(getattr(torch.ops.forge, name), overload).tags


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile's own doing
def test_compiled_blocks_report_and_follow_the_scale_of_each_step():
    weights = torch.randn(4, 4, requires_grad=True)
    hidden = torch.randn(6, 4)
    compiled = torch.compile(_layer, fullgraph=True, backend="aot_eager")
    grads, reports = [], []

    for tokens in (6, 3):
        scale = torch.tensor(1 / tokens)
        LEDGER.start_step(scale)
        (gradient,) = torch.autograd.grad(compiled(weights, hidden).sum(), weights, scale)
        grads.append(gradient)
        reports.append(LEDGER.means()["size"])

    for tokens, gradient, report in zip((6, 3), grads, reports, strict=True):
        torch.testing.assert_close(gradient, _expected(weights, hidden, tokens))
        torch.testing.assert_close(report, 0.01 * (hidden @ weights.detach()).square().sum() / tokens)


def test_a_loss_scale_multiplies_the_gradient_and_not_what_is_reported(weights):
    hidden = torch.randn(6, 4, dtype=torch.float64)
    scale, factor = torch.tensor(1 / 6, dtype=torch.float64), torch.tensor(1024.0)
    LEDGER.start_step(scale, loss_scale=factor)

    _layer(weights, hidden).sum().backward(scale * factor)

    torch.testing.assert_close(weights.grad, _expected(weights, hidden, 6) * 1024)
    torch.testing.assert_close(LEDGER.means()["size"], 0.01 * (hidden @ weights.detach()).square().sum() / 6)
