"""The callback ``ema``: an average of the weights, against its formula in float64."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from forge_core.contracts.callback import StepContext
from forge_core.contracts.optimizer import HasEvaluationWeights
from forge_plugins_optim.config import EMAConfig
from forge_plugins_optim.ema import EMA

SHAPES = {"a": (16, 24), "b": (7,), "c": (3, 4, 5)}


class Training:
    """Parameters that go somewhere else in each step, unless it is left out; and what a callback is told of it."""

    def __init__(self, *, dtype=torch.float32, frozen=(), **keys) -> None:
        generator = torch.Generator().manual_seed(0)
        self.parameters = {
            name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype), requires_grad=name not in frozen)
            for name, shape in SHAPES.items()
        }
        self.ema = EMA(EMAConfig(**keys))
        self.start()

    def start(self) -> None:
        self.ema.run_start(SimpleNamespace(parameters=self.parameters, device=torch.device("cpu")))

    @torch.no_grad()
    def step(self, step, left_out=None) -> None:
        generator = torch.Generator().manual_seed(step)
        for parameter in self.parameters.values():
            moved = 0.1 * torch.randn(parameter.shape, generator=generator)
            if not left_out and parameter.requires_grad:
                parameter += moved.to(parameter.dtype)
        given = None if left_out is None else torch.tensor(float(left_out))
        self.ema.step_end(None, StepContext(step, 0, {}, False, given))

    def values(self) -> dict[str, torch.Tensor]:
        return {name: one.detach().double() for name, one in self.parameters.items()}


def decays(decay, warm_up):
    n = 0
    while True:
        yield min(decay, (1 + n) / (10 + n)) if warm_up else decay
        n += 1


@pytest.mark.parametrize("warm_up", [False, True])
@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_formula_in_float64(interval, warm_up, dtype) -> None:
    training = Training(decay=0.9, interval=interval, warm_up=warm_up, dtype=dtype)
    expected, decay = training.values(), decays(0.9, warm_up)

    for step in range(1, 61):
        training.step(step)
        if step % interval == 0:
            d = next(decay)
            expected = {name: d * expected[name] + (1 - d) * one for name, one in training.values().items()}

    averages = training.ema.evaluation_weights()
    assert averages.keys() == SHAPES.keys()
    for name, average in averages.items():
        assert average.dtype == torch.float32
        assert float((average.double() - expected[name]).abs().max()) <= 1e-6


@pytest.mark.parametrize("warm_up", [False, True])
def test_steps_that_are_left_out_do_not_count(warm_up) -> None:
    one, other = Training(decay=0.9, warm_up=warm_up), Training(decay=0.9, warm_up=warm_up)

    for step in range(1, 11):
        one.step(step, left_out=False)
        other.step(step)
        for left_out in range(3):
            one.step(100 + left_out, left_out=True)

    for name, average in one.ema.tensors().items():
        assert torch.equal(average, other.ema.tensors()[name])


def test_weights_that_are_never_trained_have_no_average() -> None:
    assert [*Training(decay=0.9, frozen=("b",)).ema.evaluation_weights()] == ["a", "c"]


def test_it_has_averages_from_the_start_and_again_after_a_resume() -> None:
    training = Training(decay=0.9, warm_up=True)
    assert isinstance(training.ema, HasEvaluationWeights)
    for name, average in training.ema.evaluation_weights().items():
        assert torch.equal(average, training.parameters[name])
    for step in range(1, 6):
        training.step(step)
    saved = {name: one.clone() for name, one in training.ema.tensors().items()}

    resumed = Training(decay=0.9, warm_up=True)
    resumed.parameters = {name: nn.Parameter(one.detach().clone()) for name, one in training.parameters.items()}
    resumed.start()
    for name, tensor in resumed.ema.tensors().items():
        tensor.copy_(saved[name])
    for step in range(6, 11):
        training.step(step)
        resumed.step(step)

    for name, tensor in resumed.ema.tensors().items():
        assert torch.equal(tensor, training.ema.tensors()[name])
