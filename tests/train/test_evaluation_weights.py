"""Averages take the parameters' place and leave it bit for bit; what is no average of a parameter is refused."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from forge_core.checkpoint.component_state import tensors_of
from forge_core.contracts.callback import Callback
from forge_core.errors import ConfigError, PluginError
from forge_core.train.evaluation_weights import EvaluationWeights


@pytest.fixture(autouse=True)
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=(tmp_path / "meeting").as_uri(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Owner:
    def __init__(self, **weights):
        self.weights = weights

    def evaluation_weights(self):
        return self.weights


def model():
    part = nn.Linear(3, 2)
    return SimpleNamespace(parameters=dict(part.named_parameters()), parts=[part])


def test_the_parameters_are_back_bit_for_bit_also_after_an_error():
    built, average = model(), torch.randn(2, 3)
    weight = built.parameters["weight"]
    before, bias = weight.detach().clone(), built.parameters["bias"].detach().clone()
    weights = EvaluationWeights(built, [("optimizer", object()), ("callback", Owner(weight=average))])

    def evaluate():
        with weights.in_place():
            assert torch.equal(weight, average)
            assert torch.equal(built.parameters["bias"], bias)
            raise RuntimeError("in an evaluation")

    with pytest.raises(RuntimeError, match="in an evaluation"):
        evaluate()

    assert torch.equal(weight, before)
    assert weight.requires_grad


def test_they_are_saved_as_they_are_evaluated():
    """In the parameters' dtype: what is read from a checkpoint is what the run has evaluated."""
    built = model()
    built.parts[0].to(torch.bfloat16)
    average = torch.randn(2, 3)
    weights = EvaluationWeights(built, [("ema", Owner(weight=average))])

    ((key, saved),) = weights.to_save().items()
    with weights.in_place():
        evaluated = built.parameters["weight"].detach().clone()

    assert key == "evaluation.weight"
    assert saved.dtype == torch.bfloat16
    assert torch.equal(saved, evaluated)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"wait": torch.zeros(2, 3)}, "ema: evaluation_weights has 'wait', and the model has no such parameter"),
        ({"weight": torch.zeros(3, 2)}, r"a tensor \(\(3, 2\), 'whole on each rank'\) for weight, which is \(\(2, 3\)"),
        ({"weight": torch.zeros(2, 3).long()}, "a torch.int64 for weight, which must be a tensor of floating-point"),
        ({"weight": 0.5}, "a float for weight, which must be a tensor of floating-point numbers. This is a bug in ema"),
    ],
)
def test_what_is_no_average_of_a_parameter_is_refused(given, sentence):
    with pytest.raises(PluginError, match=sentence):
        EvaluationWeights(model(), [("ema", Owner(**given))]).by_name()


def test_one_owner_alone_may_have_those_of_a_parameter():
    owners = [("muon", Owner(weight=torch.zeros(2, 3))), ("ema", Owner(bias=torch.zeros(2), weight=torch.zeros(2, 3)))]

    with pytest.raises(ConfigError, match="muon and ema both have weights to be evaluated"):
        EvaluationWeights(model(), owners).by_name()


def test_tensors_of_a_callback_are_tensors():
    class Counting(Callback):
        def tensors(self):
            return {"count": 3}

    with pytest.raises(PluginError, match=r"tensors\(\) has a int as 'count', which is no tensor"):
        tensors_of([("acme", Counting())])
