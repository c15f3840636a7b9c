"""``schedule_free_adamw`` against the authors' implementation, on the same gradients."""

import pytest
import torch
from schedulefree import AdamWScheduleFree as PublishedScheduleFree
from torch import nn

from forge_core.contracts.optimizer import HasEvaluationWeights, NamedParameter
from forge_plugins_optim.config import ScheduleFreeAdamWConfig
from forge_plugins_optim.schedule_free import ScheduleFreeAdamW

SHAPES = [(16, 24), (24, 8), (3, 4, 5), (7,), (1,)]
WARM_UP = 10


def started(dtype=torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def made(parameters, **keys) -> ScheduleFreeAdamW:
    named = [NamedParameter(f"p{i}", parameter, "matrix") for i, parameter in enumerate(parameters)]
    return ScheduleFreeAdamW(ScheduleFreeAdamWConfig(lr=1e-2, **keys), parameters=named)


def published(parameters, **keys) -> PublishedScheduleFree:
    optimizer = PublishedScheduleFree(parameters, lr=1e-2, warmup_steps=WARM_UP, **keys)
    optimizer.train()
    return optimizer


def steps(optimizer, parameters, n=50, *, warms_up=False, first=0) -> None:
    """``warms_up``: the learning rate rises as the published one's own warm-up has it."""
    for step in range(first, first + n):
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if warms_up:
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * min(1.0, (step + 1) / WARM_UP)
        optimizer.step()


def differences(ours, theirs) -> float:
    return max(float((one - other).detach().abs().max()) for one, other in zip(ours, theirs, strict=True))


def test_a_parameter_that_begins_later_counts_its_own_steps() -> None:
    early, late = (started()[0] for _ in range(2))
    alone = started()[0]
    optimizer, other = made([early, late]), made([alone])

    steps(optimizer, [early], 3)
    steps(optimizer, [early, late], 1, first=3)
    generator = torch.Generator().manual_seed(3)
    alone.grad = [torch.randn(alone.shape, generator=generator) for _ in range(2)][1]
    other.step()

    assert torch.equal(late, alone)
    assert not torch.equal(early, late)


@pytest.mark.parametrize(
    "keys",
    [
        {"weight_decay": 0.1},
        {"weight_decay": 0.0, "betas": (0.95, 0.99)},
        {"weight_decay": 0.1, "r": 1.0},
        {"weight_decay": 0.1, "weight_lr_power": 0.0},
    ],
)
def test_it_is_the_published_one_and_so_is_what_it_evaluates(keys) -> None:
    ours, theirs = started(), started()
    optimizer, other = made(ours, **keys), published(theirs, **keys)

    steps(optimizer, ours, warms_up=True)
    steps(other, theirs)

    assert differences(ours, theirs) <= 1e-6
    weights = optimizer.evaluation_weights()
    other.eval()  # puts the averages into its parameters
    assert [*weights] == [f"p{i}" for i in range(len(SHAPES))]
    assert differences(weights.values(), theirs) <= 1e-6
    assert differences(weights.values(), ours) > 1e-3  # they are others


def test_a_parameter_is_its_own_average_until_it_is_updated() -> None:
    parameters = started()
    optimizer = made(parameters)

    assert isinstance(optimizer, HasEvaluationWeights)
    assert all(torch.equal(*pair) for pair in zip(optimizer.evaluation_weights().values(), parameters, strict=True))
    assert not optimizer.state


def test_a_parameter_that_was_frozen_at_first_is_averaged_from_its_own_first_step() -> None:
    """As if it had been trained alone, later."""
    late, alone = started(), started()
    optimizer, other = made(late), made(alone[1:])

    steps(optimizer, late[:1], 20)
    late[0].grad = None
    steps(optimizer, late[1:], 20, first=20)
    steps(other, alone[1:], 20, first=20)

    assert differences(late[1:], alone[1:]) == 0
    of_late, of_alone = optimizer.evaluation_weights(), other.evaluation_weights()
    assert torch.equal(of_late["p1"], of_alone["p0"])


def test_the_weight_of_a_step_is_the_highest_learning_rate_so_far() -> None:
    """Whatever the schedule does afterwards, as in the published one."""
    ours, theirs = started(), started()
    optimizer = made(ours)
    other = PublishedScheduleFree(theirs, lr=1e-2, weight_decay=0.1)
    other.train()
    for step in range(50):
        generator = torch.Generator().manual_seed(step)
        for one, parameters in ((optimizer, ours), (other, theirs)):
            generator.manual_seed(step)
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            for group in one.param_groups:
                group["lr"] = 1e-2 * (1 - step / 50)
            one.step()

    assert differences(ours, theirs) <= 1e-6


def test_a_learning_rate_of_zero_at_first_leaves_everything_as_it_is() -> None:
    parameters, before = started(), started()
    optimizer = made(parameters)
    optimizer.param_groups[0]["lr"] = 0.0

    steps(optimizer, parameters, 2)

    assert differences(parameters, before) == 0
    assert differences(optimizer.evaluation_weights().values(), before) == 0


def test_in_bf16_the_average_is_weighted_as_in_fp32() -> None:
    """Sums of weights are float64: a bf16 sum would stop growing after 256 steps."""
    (parameter,) = parameters = [nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))]
    optimizer = made(parameters)

    steps(optimizer, parameters, 300)

    state = optimizer.state[parameter]
    assert state["step"].item() == 300
    assert state["weight_sum"].item() == pytest.approx(300 * 1e-2**2)


def test_on_a_cpu_large_tensors_are_updated_piece_by_piece() -> None:
    """And one that is not contiguous in one piece."""
    ours, theirs = ([nn.Parameter(torch.ones(300, 400)), nn.Parameter(torch.ones(30, 40).T)] for _ in range(2))
    other = PublishedScheduleFree(theirs, lr=1e-2, weight_decay=0.1)
    other.train()

    steps(made(ours), ours, 5)
    steps(other, theirs, 5)

    assert differences(ours, theirs) <= 1e-6


def test_a_rank_that_has_nothing_of_several_parameters_updates_the_others() -> None:
    """Those without an element were taken together, and had the factors of all of them."""
    generator = torch.Generator().manual_seed(1)
    held, alone = ([nn.Parameter(torch.ones(n, 3)) for n in sizes] for sizes in ((0, 0, 2, 0, 0), (2,)))
    gradient = torch.randn(2, 3, generator=generator)
    for parameters in (held, alone):
        optimizer = made(parameters)
        for one in parameters:
            one.grad = gradient[: len(one)].clone()
        optimizer.step()

    assert held[2].equal(alone[0])
