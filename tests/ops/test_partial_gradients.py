"""Gradients that ranks have parts of are summed once per step, in fp32."""

import pytest
import torch
from torch import nn

from forge_core.ops import partial_gradients
from forge_core.ops.partial_gradients import PartialGradients

CPU = torch.device("cpu")


class ThreeRanks:
    """Each of which has the same."""

    degrees = {"tp": 3}

    def __init__(self):
        self.sent = []

    def sum_over(self, value, axes):
        assert axes == ("tp",)
        self.sent.append((value.dtype, value.numel()))
        return value.mul_(3)


@pytest.fixture
def norms():
    model = nn.ModuleDict({name: nn.LayerNorm(4) for name in "abcd"})
    for name in "abc":
        model[name].partial_gradients = {"weight": "tp"}
    model["c"].weight = model["a"].weight
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1.5)
    return model


def test_what_modules_name_is_summed_and_nothing_else(norms):
    ranks = ThreeRanks()

    PartialGradients.of([norms], ranks, CPU).sum()

    summed = {name for name, one in norms.named_parameters() if (one.grad == 4.5).all()}
    assert summed == {"a.weight", "b.weight"}
    assert all((one.grad == 1.5).all() for name, one in norms.named_parameters() if name not in summed)
    assert ranks.sent == [(torch.float32, 8)]


@pytest.mark.parametrize(("bucket", "sent"), [(3, [4, 4]), (7, [4, 4]), (8, [8])])
def test_few_gradients_are_sent_at_a_time(norms, monkeypatch, bucket, sent):
    monkeypatch.setattr(partial_gradients, "_BUCKET", bucket)
    ranks = ThreeRanks()

    PartialGradients.of([norms], ranks, CPU).sum()

    assert ranks.sent == [(torch.float32, n) for n in sent]
    assert (norms["b"].weight.grad == 4.5).all()


def test_gradients_in_bf16_are_added_in_fp32(norms):
    norms.to(torch.bfloat16)
    for parameter in norms.parameters():
        parameter.grad = torch.full_like(parameter, 1.5)
    ranks = ThreeRanks()

    PartialGradients.of([norms], ranks, CPU).sum()

    assert ranks.sent == [(torch.float32, 8)]
    assert norms["a"].weight.grad.dtype is torch.bfloat16
    assert (norms["a"].weight.grad == 4.5).all()


def test_a_parameter_without_a_gradient_is_left_out(norms):
    norms["b"].weight.grad = None
    ranks = ThreeRanks()

    PartialGradients.of([norms], ranks, CPU).sum()

    assert ranks.sent == [(torch.float32, 4)]

    norms["a"].weight.grad = None
    PartialGradients.of([norms], ranks, CPU).sum()

    assert ranks.sent == [(torch.float32, 4)], "there was nothing to send"


def test_nothing_is_sent_for_a_model_that_names_none():
    ranks = ThreeRanks()

    PartialGradients.of([nn.LayerNorm(4)], ranks, CPU).sum()

    assert ranks.sent == []
