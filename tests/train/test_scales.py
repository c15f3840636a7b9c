"""A step's losses are means over its targets, over its tokens without padding, or over what the model counts."""

from types import SimpleNamespace

import torch
from torch import nn

from forge_core.contracts.loss import IGNORED
from forge_core.train.replication import Replicas
from forge_core.train.scales import LossScale, step_scales

CPU = torch.device("cpu")
ALONE = SimpleNamespace(dp_size=1)


def batch(targets, positions=None, weights=None):
    found = {"tokens": torch.zeros(len(targets), dtype=torch.int64), "targets": torch.tensor(targets)}
    more = {"positions": positions, "weights": weights}
    return {**found, **{name: torch.tensor(values) for name, values in more.items() if values is not None}}


def test_positions_without_a_target_and_padding_do_not_count():
    step = [batch([1, IGNORED, 3, 4], [0, 1, 2, -1]), batch([1, IGNORED, IGNORED, IGNORED], [0, 1, -1, -1])]

    scales = step_scales(step, nn.Module(), ALONE, CPU, Replicas())

    assert 1 / scales.targets.item() == scales.n_targets.item() == 4
    assert round(1 / scales.tokens.item(), 4) == 5
    assert scales.own == {}


def test_a_step_without_targets_divides_by_one():
    scales = step_scales([batch([IGNORED])], nn.Module(), ALONE, CPU, Replicas())

    assert (scales.targets.item(), scales.n_targets.item()) == (1, 0)


def test_weights_of_targets_are_added_up_in_place_of_their_number():
    step = [batch([1, IGNORED, 3], weights=[0.25, 7.0, 0.0]), batch([1, 2, 3], weights=[0.125, 0.125, 0.0])]

    scales = step_scales(step, nn.Module(), ALONE, CPU, Replicas())

    assert (scales.targets.item(), scales.n_targets.item()) == (2, 0.5)
    assert round(1 / scales.tokens.item(), 4) == 6


def test_many_weights_are_added_up_without_rounding():
    scales = step_scales([batch([1, 2, 3], weights=[2.0**24, 1.0, 1.0])], nn.Module(), ALONE, CPU, Replicas())

    assert scales.n_targets.item() == 2**24 + 2


def test_a_step_of_weights_0_divides_by_one():
    assert step_scales([batch([1], weights=[0.0])], nn.Module(), ALONE, CPU, Replicas()).targets.item() == 1


def test_over_ranks_sums_below_one_are_kept():
    ranks = SimpleNamespace(dp_size=2, sum_over=lambda each, axes: each.mul_(2))

    scales = step_scales([batch([1], weights=[0.125])], nn.Module(), ranks, CPU, Replicas())

    assert (scales.targets.item(), scales.n_targets.item()) == (4, 0.25)


def test_a_rank_that_is_alone_in_its_replica_counts_with_the_others():
    two = SimpleNamespace(share=SimpleNamespace(count=2), sum=lambda each: each * 2)

    assert (
        step_scales(
            [batch([1, 2])], nn.Module(), SimpleNamespace(dp_size=1, sum_over=lambda each, axes: each), CPU, two
        ).n_targets
        == 4
    )


def test_the_model_counts_for_losses_of_its_own():
    model = nn.Module()
    model.count_targets = lambda one: {"ahead": 2}

    scales = step_scales([batch([1, 2]), batch([3, 4])], model, ALONE, CPU, Replicas())

    assert 1 / scales.own["ahead"].item() == 4


def test_the_loss_scale_is_that_of_torchs_scaler():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.0)
    (parameter,) = optimizer.param_groups[0]["params"]
    scaler, loss_scale = torch.amp.GradScaler("cpu"), LossScale("fp16", CPU)
    scaler.scale(torch.ones(()))  # which makes its tensors

    for step in range(9000):
        overflows = step in (0, 1, 1500, 5000, 8999)
        parameter.grad = torch.full((1,), torch.inf if overflows else 1.0)
        scaler.unscale_(optimizer)
        scaler.update()
        loss_scale.update(torch.zeros(()), torch.full((), float(overflows)))
        assert loss_scale.factor.item() == scaler.get_scale(), step

    assert loss_scale.metrics()["overflows"] == 5
    assert loss_scale.factor == 2.0**13


def test_gradients_are_what_they_would_be_without_a_loss_scale():
    loss_scale, parameter = LossScale("fp16", CPU), nn.Parameter(torch.ones(4))
    (parameter.square().sum()).backward(torch.full((), 0.25) * loss_scale.factor)
    assert parameter.grad.equal(torch.full((4,), 2.0**15))

    loss_scale.unscale([parameter.grad])

    assert parameter.grad.equal(torch.full((4,), 0.5))


def test_a_loss_scale_that_no_gradient_overflows_stays_finite():
    """As after 224,000 steps of gradients that are 0."""
    largest = 2.0**127
    loss_scale = LossScale("fp16", CPU)
    loss_scale.restart({"loss_scale": (largest, 1999.0, 0.0)})

    loss_scale.update(torch.zeros(()), torch.zeros(()))

    assert loss_scale.state()["loss_scale"] == [largest, 0, 0]
