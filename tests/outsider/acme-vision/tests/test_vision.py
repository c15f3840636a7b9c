import torch

from forge_plugins_vlm.testing.connector import ConnectorConformance
from forge_plugins_vlm.testing.fusion import FusionConformance
from forge_plugins_vlm.testing.image_processor import ImageProcessorConformance
from forge_plugins_vlm.testing.vision_encoder import VisionEncoderConformance
from forge_testing.package import PluginConformance


class TestPlugin(PluginConformance):
    dist = "acme-vision"


class TestPatchMixer(VisionEncoderConformance):
    component = "acme-vision:patch_mixer"


class TestRowPool(ConnectorConformance):
    component = "acme-vision:row_pool"


class TestHalves(ImageProcessorConformance):
    component = "acme-vision:halves"


class TestGatedPrefix(FusionConformance):
    component = "acme-vision:gated_prefix"

    def open_gates(self, model):
        for block in model.blocks.values():
            torch.nn.init.constant_(block.gate.bias, 0.7)


class TestGatedPrefixInSomeLayers(FusionConformance):
    component = "acme-vision:gated_prefix"
    config = {"from_layer": 1}
    model_keys = {"n_kv_heads": 1}

    def open_gates(self, model):
        torch.nn.init.constant_(model.blocks["1"].gate.bias, 0.7)
