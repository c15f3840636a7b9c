"""``adafactor`` against that of transformers, on the same gradients; and in every layout against one process."""

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor as PublishedAdafactor

from forge_core.contracts.optimizer import NamedParameter
from forge_plugins_optim.adafactor import Adafactor
from forge_plugins_optim.config import AdafactorConfig

SHAPES = [(16, 24), (24, 8), (3, 4, 5), (7,), (1,), (1, 6)]


def started() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def named(parameters) -> list[NamedParameter]:
    return [NamedParameter(f"p{i}", parameter, "matrix") for i, parameter in enumerate(parameters)]


def steps(optimizer, parameters, n=50) -> None:
    generator = torch.Generator().manual_seed(2)
    for step in range(n):
        for parameter in parameters:
            large = 10.0 if step % 7 == 6 else 1.0  # such an update is clipped
            parameter.grad = large * torch.randn(parameter.shape, generator=generator)
        for group in optimizer.param_groups:
            group["lr"] *= 1 if step % 10 else 0.9  # a schedule changes it
        optimizer.step()


def differences(ours, theirs) -> float:
    return max(float((one - other).detach().abs().max()) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("scale_parameter", [False, True])
@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_it_is_that_of_transformers(beta1, scale_parameter) -> None:
    ours, theirs = started(), started()
    config = AdafactorConfig(lr=1e-2, beta1=beta1, scale_parameter=scale_parameter, weight_decay=0.3)

    steps(Adafactor(config, parameters=named(ours)), ours)
    published = PublishedAdafactor(
        theirs, 1e-2, beta1=beta1 or None, weight_decay=0.3, scale_parameter=scale_parameter, relative_step=False
    )
    steps(published, theirs)

    assert differences(ours, theirs) <= 1e-6


def test_with_relative_steps_it_is_that_of_the_paper() -> None:
    ours, theirs = started(), started()
    config = AdafactorConfig(lr=1.0, scale_parameter=True, relative_step=True, weight_decay=0.0)
    optimizer = Adafactor(config, parameters=named(ours))

    generators = [torch.Generator().manual_seed(2) for _ in range(2)]
    published = PublishedAdafactor(theirs)
    for _ in range(50):
        for parameters, one, generator in ((ours, optimizer, generators[0]), (theirs, published, generators[1])):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            one.step()

    assert differences(ours, theirs) <= 1e-6
    assert differences(ours, started()) > 1e-2


def test_parameters_in_bf16_have_means_in_fp32_and_are_rounded_once() -> None:
    ours, theirs = ([nn.Parameter(one.detach().bfloat16()) for one in started()] for _ in range(2))
    config = AdafactorConfig(lr=1e-1, weight_decay=0.3)
    optimizer = Adafactor(config, parameters=named(ours))
    published = PublishedAdafactor(theirs, 1e-1, weight_decay=0.3, scale_parameter=False, relative_step=False)

    for one, parameters in ((optimizer, ours), (published, theirs)):
        generator = torch.Generator().manual_seed(2)
        for _ in range(5):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16()
            one.step()

    assert {value.dtype for state in optimizer.state.values() for value in state.values()} == {torch.float32}
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-8, atol=0)  # what lies midway may be rounded either way


def test_state_of_a_matrix_is_a_row_and_a_column() -> None:
    parameters = started()
    optimizer = Adafactor(AdafactorConfig(lr=1e-2), parameters=named(parameters))

    steps(optimizer, parameters, n=1)

    shapes = [{slot: tuple(value.shape) for slot, value in optimizer.state[one].items()} for one in parameters]
    assert shapes[0] == {"step": (), "row": (16,), "column": (24,)}
    assert shapes[2] == {"step": (), "row": (3, 4), "column": (3, 5)}
    assert shapes[3] == {"step": (), "square": (7,)}
