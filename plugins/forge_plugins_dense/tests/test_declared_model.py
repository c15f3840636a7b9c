"""``DeclaredModel``, the base of models of one's own: what it declares follows from its modules."""

from __future__ import annotations

import pytest
from torch import nn

from forge_core.train.initialisation import SeededInitializer
from forge_plugins_dense.declared_model import DeclaredModel
from forge_testing.model import ModelConformance


class Bigram(DeclaredModel):
    def __init__(self, vocab_size):
        super().__init__(vocab_size)
        self.embed = nn.Embedding(vocab_size, 8)
        self.blocks = nn.ModuleDict({str(layer): nn.Linear(8, 8) for layer in range(2)})
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, vocab_size, bias=False)


class TestBigram(ModelConformance):
    def make(self, *, vocab_size):
        return Bigram(vocab_size)


def test_roles_initial_values_and_work_follow_from_the_modules():
    model = Bigram(11)
    model.init_weights(SeededInitializer(0))

    assert model.parameter_roles() == {
        "embed.weight": "embedding",
        **{f"blocks.{layer}.{name}": role for layer in "01" for name, role in (("weight", "matrix"), ("bias", "bias"))},
        "norm.weight": "norm",
        "norm.bias": "norm",
        "head.weight": "head",
    }
    assert model.flops_per_token(32) == 6 * (2 * 8 * 8 + 11 * 8)
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert values["norm.weight"].eq(1).all()
    assert not any(values[name].any() for name in ("norm.bias", "blocks.0.bias", "blocks.1.bias"))
    for name in ("embed.weight", "blocks.1.weight", "head.weight"):
        assert float(values[name].std()) == pytest.approx(0.02, rel=0.25)
