"""``lion`` and ``sgd`` against published implementations, on the same gradients."""

import pytest
import torch
from lion_pytorch import Lion as PublishedLion
from torch import nn

from forge_core.contracts.optimizer import NamedParameter
from forge_plugins_optim.config import LionConfig, SGDConfig
from forge_plugins_optim.lion import Lion
from forge_plugins_optim.sgd import SGD

SHAPES = [(16, 24), (24, 8), (3, 4, 5), (7,), (1,)]


def started() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def named(parameters) -> list[NamedParameter]:
    return [NamedParameter(f"p{i}", parameter, "matrix") for i, parameter in enumerate(parameters)]


def steps(optimizer, parameters, n=50, lr=None) -> None:
    generator = torch.Generator().manual_seed(2)
    for step in range(n):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        for group in optimizer.param_groups:
            group["lr"] = (lr or group["lr"]) * (1 if step % 10 else 0.9)  # a schedule changes it
        optimizer.step()


def differences(ours, theirs) -> float:
    return max(float((one - other).detach().abs().max()) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.95, 0.98)])
def test_lion_is_the_published_one(betas) -> None:
    ours, theirs = started(), started()

    steps(Lion(LionConfig(lr=1e-3, betas=betas, weight_decay=0.3), parameters=named(ours)), ours)
    steps(PublishedLion(theirs, lr=1e-3, betas=betas, weight_decay=0.3), theirs)

    assert differences(ours, theirs) <= 1e-6


def test_an_element_moves_by_the_learning_rate_and_its_gradient_says_only_where() -> None:
    (parameter,) = parameters = [nn.Parameter(torch.zeros(3))]
    optimizer = Lion(LionConfig(lr=0.25, weight_decay=0.0), parameters=named(parameters))
    parameter.grad = torch.tensor([1e-8, -1e8, 0.0])

    optimizer.step()

    assert parameter.tolist() == [-0.25, 0.25, 0.0]


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.9, False), (0.9, True), (0.0, False)])
def test_sgd_is_that_of_torch(momentum, nesterov) -> None:
    ours, theirs = started(), started()
    config = SGDConfig(lr=1e-2, momentum=momentum, nesterov=nesterov, weight_decay=0.3, decoupled_weight_decay=False)

    steps(SGD(config, parameters=named(ours)), ours)
    steps(torch.optim.SGD(theirs, 1e-2, momentum, weight_decay=0.3, nesterov=nesterov, foreach=True), theirs)

    assert differences(ours, theirs) <= 1e-6


def test_decoupled_decay_of_sgd_shrinks_the_parameter_itself() -> None:
    """Algorithm 1 of arXiv 1711.05101 in float64, decay scaled by the learning rate."""
    ours, expected, sums = started(), [p.detach().double() for p in started()], [0.0] * len(SHAPES)
    optimizer = SGD(SGDConfig(lr=1e-2, weight_decay=0.3), parameters=named(ours))

    generator = torch.Generator().manual_seed(2)
    for _ in range(50):
        for i, parameter in enumerate(ours):
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            sums[i] = 0.9 * sums[i] + parameter.grad.double()
            expected[i] = expected[i] * (1 - 1e-2 * 0.3) - 1e-2 * sums[i]
        optimizer.step()

    assert differences([p.double() for p in ours], expected) <= 1e-5


def test_a_decay_in_bf16_is_as_exact_as_bf16() -> None:
    """0.99 is 0.9883 in bf16: a factor that was rounded first would shorten a memory of 100 steps to 85."""
    parameter = nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
    optimizer = Lion(LionConfig(lr=1e-3), parameters=named([parameter]))
    momentum = torch.randn(1000, generator=torch.Generator().manual_seed(3)).bfloat16()
    optimizer.state[parameter]["momentum"] = momentum.clone()
    parameter.grad = torch.zeros_like(parameter)

    optimizer.step()

    assert torch.equal(optimizer.state[parameter]["momentum"], (0.99 * momentum.float()).bfloat16())


def test_without_momentum_nothing_is_kept() -> None:
    parameters = started()
    optimizer = SGD(SGDConfig(lr=1e-2, momentum=0.0), parameters=named(parameters))

    steps(optimizer, parameters, n=1)

    assert not any(optimizer.state.values())


def test_on_a_cpu_large_tensors_are_updated_piece_by_piece() -> None:
    """And one that is not contiguous in one piece; each element as by the published implementation."""
    ours, theirs = ([nn.Parameter(torch.ones(300, 400)), nn.Parameter(torch.ones(30, 40).T)] for _ in range(2))

    steps(Lion(LionConfig(lr=1e-3), parameters=named(ours)), ours, n=3)
    steps(PublishedLion(theirs, lr=1e-3, weight_decay=0.1), theirs, n=3)

    assert differences(ours, theirs) <= 1e-6


def test_sgd_updates_a_parameter_whose_gradient_is_laid_out_otherwise() -> None:
    ours, theirs = ([nn.Parameter(torch.ones(30, 40).T)] for _ in range(2))

    steps(SGD(SGDConfig(lr=1e-2, weight_decay=0.0), parameters=named(ours)), ours, 5)
    steps(torch.optim.SGD(theirs, lr=1e-2, momentum=0.9), theirs, 5)

    assert differences(ours, theirs) <= 1e-6
