import pytest
import torch
from torch.utils.checkpoint import checkpoint

from forge_core.ops.accumulate import accumulate
from forge_core.ops.auxiliary_loss import LEDGER, attach_auxiliary_loss

DYNAMO_S_OWN = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@pytest.fixture
def hidden():
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()


@pytest.fixture
def buffer():
    return torch.zeros(3)


def test_a_value_is_added_in_backward_and_the_gradient_is_as_without(hidden, buffer):
    output = accumulate(hidden * 2, buffer, torch.tensor([1.0, 2, 3]))
    assert not buffer.any()

    output.square().sum().backward()

    assert buffer.tolist() == [1, 2, 3]
    torch.testing.assert_close(hidden.grad, 8 * hidden.detach())


def test_what_is_computed_again_is_added_once(hidden, buffer):
    def layer(states):
        return accumulate(states.sin(), buffer, states.detach().sum(0).sign() ** 2).square()

    checkpoint(layer, hidden, use_reentrant=False).sum().backward()

    assert buffer.tolist() == [1, 1, 1]


def test_nothing_is_added_without_training(hidden, buffer):
    with torch.no_grad():
        accumulate(hidden * 2, buffer, torch.ones(3))
    accumulate(hidden.detach() * 2, buffer, torch.ones(3))

    assert not buffer.any()


def test_all_forwards_may_come_before_the_first_backward(hidden, buffer):
    """As in a pipeline."""
    outputs = [accumulate(hidden * i, buffer, torch.full((3,), float(i))) for i in range(1, 4)]

    for output in outputs:
        output.sum().backward()

    assert buffer.tolist() == [6, 6, 6]


@DYNAMO_S_OWN
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_graph_that_ends_with_it_adds_all_the_same(hidden, buffer, backend):
    """A compiler makes views that leave its graph anew, and would pass by the function that gave one."""

    @torch.compile(fullgraph=True, backend=backend)
    def layer(states):
        return accumulate((states * 2).flatten(), buffer, torch.ones(3))

    layer(hidden).square().sum().backward()

    assert buffer.tolist() == [1, 1, 1]
    torch.testing.assert_close(hidden.grad, 8 * hidden.detach())


@DYNAMO_S_OWN
def test_an_auxiliary_loss_at_the_end_of_a_compiled_graph_has_its_gradient(hidden):
    LEDGER.start_step(torch.tensor(1.0))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(states):
        doubled = states * 2
        return attach_auxiliary_loss(doubled.flatten(), states.square().sum(), "size", place="stream")

    layer(hidden).sum().backward()

    torch.testing.assert_close(hidden.grad, 2 + 2 * hidden.detach())
