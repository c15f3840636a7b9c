"""The package, its fusions and its image processors pass their contracts' kits."""

from __future__ import annotations

from typing import Any

import torch
from small_vlm import EXPERTS

from forge_plugins_vlm.testing.fusion import FusionConformance
from forge_plugins_vlm.testing.image_processor import ImageProcessorConformance
from forge_testing.package import PluginConformance


class TestPlugin(PluginConformance):
    dist = "forge-plugins-vlm"


class TestJointDecoder(FusionConformance):
    component = "joint_decoder"


class TestCrossAttention(FusionConformance):
    component = "cross_attention"
    config = {"layers": [1]}

    def open_gates(self, model: Any) -> None:
        for name, gate in model.named_parameters():
            if name.endswith("_gate.weight"):
                torch.nn.init.constant_(gate, 0.5)


class TestCrossAttentionInPlace(TestCrossAttention):
    config = {"layers": [1], "place": "replace", "attend": "all_previous"}


class TestCrossAttentionOfOtherHeads(TestCrossAttention):
    config = {"layers": [1], "n_heads": 4, "n_kv_heads": 1}


class TestMixtureOfTransformers(FusionConformance):
    component = "mixture_of_transformers"


class TestMoMa(FusionConformance):
    component = "moma"
    config = {"image": EXPERTS}
    model_keys = {"feed_forward": EXPERTS}


class TestSquare(ImageProcessorConformance):
    component = "square"
    config = {"size": 16}


class TestCroppedSquare(ImageProcessorConformance):
    component = "square"
    config = {"size": 16, "fit": "crop"}


class TestPaddedSquare(ImageProcessorConformance):
    component = "square"
    config = {"size": 16, "fit": "pad", "resample": "bilinear"}


class TestAnyres(ImageProcessorConformance):
    component = "anyres"
    config = {"size": 16}


class TestTiles(ImageProcessorConformance):
    component = "tiles"
    config = {"size": 16, "longest": 3}


class TestNaflex(ImageProcessorConformance):
    component = "naflex"
    config = {"size": 64, "patch": 4, "max_patches": 40}
    grids = ((16, 16), (8, 8))
