"""The norms of each layer against those of whole tensors, in float64."""

from typing import ClassVar

import pytest
import torch

from forge_core.train.initialisation import SeededInitializer
from forge_plugins_monitor.layer_norms import layer_of, norms_by_layer
from forge_testing.callback import CallbackConformance
from forge_testing.small_model import SmallModel


def by_layer(tensors) -> dict[str, float]:
    squares = {}
    for name, tensor in tensors.items():
        layer = layer_of(name)
        squares[layer] = squares.get(layer, 0.0) + tensor.double().square().sum().item()
    return {layer: square**0.5 for layer, square in squares.items()}


class TestLayerNorms(CallbackConformance):
    component = "forge-plugins-monitor:layer_norms"
    steps = 1

    def test_reports_norms_of_weights_and_how_far_the_update_moves_them(self, tmp_path) -> None:
        model = SmallModel()
        model.init_weights(SeededInitializer(0))
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        _, run = self.start(tmp_path)

        run.go()

        reported = {name: value.item() for values in run.reports for name, value in values.items()}
        weights = by_layer(before)
        moved = by_layer({name: p.detach() - before[name] for name, p in run.model.named_parameters()})
        assert len(weights) > 3
        for layer, norm in weights.items():
            assert reported[f"weight_norm/{layer}"] == pytest.approx(norm, rel=1e-5)
            assert reported[f"update_ratio/{layer}"] == pytest.approx(moved[layer] / norm, rel=1e-3)
            assert reported[f"gradient_norm/{layer}"] > 0
        assert len(reported) == 3 * len(weights)


class TestLayerNormsWithoutUpdates(CallbackConformance):
    component = "forge-plugins-monitor:layer_norms"
    config: ClassVar = {"updates": False}

    def test_copies_no_weights(self, tmp_path) -> None:
        _, run = self.start(tmp_path)

        run.go()

        assert not any(name.startswith("update_ratio/") for values in run.reports for name in values)


def test_a_layer_of_zeros_has_the_norm_zero() -> None:
    tensors = {"embed.weight": torch.ones(2, 2), "blocks.0.mlp.up": torch.zeros(3), "blocks.0.norm": torch.zeros(3)}

    assert norms_by_layer(tensors, torch.device("cpu")) == {"embed": torch.tensor(2.0), "blocks.0": torch.tensor(0.0)}


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("blocks.3.attention.q.weight", "blocks.3"),
        ("blocks.12.feed_forward.experts.0.up", "blocks.12"),
        ("vision.blocks.0.norm.weight", "vision.blocks.0"),
        ("embed.weight", "embed"),
        ("norm.weight", "norm"),
    ],
)
def test_a_parameter_belongs_to_its_block_or_to_its_module(name, layer) -> None:
    assert layer_of(name) == layer
