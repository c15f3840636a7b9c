"""The encoder ``mllama`` against the vision tower of ``transformers``, with a tiny random configuration."""

from __future__ import annotations

import pytest
import torch
from transformers.models.mllama.configuration_mllama import MllamaVisionConfig
from transformers.models.mllama.modeling_mllama import MllamaVisionModel

from forge_core.train.initialisation import SeededInitializer
from forge_plugins_vlm.encoders.pixels import normalise
from forge_plugins_vlm.testing.vision_encoder import VisionEncoderConformance

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_global_layers": 2,
    "attention_heads": 4,
    "patch_size": 8,
    "image_size": 32,
    "intermediate_size": 48,
    "intermediate_layers_indices": [2, 0],
}


class TestMllama(VisionEncoderConformance):
    component = "forge-plugins-vlm:mllama"
    config = {"architecture": SMALL}


class TestMllamaOfTwoParts(VisionEncoderConformance):
    component = "forge-plugins-vlm:mllama"
    config = {"architecture": SMALL, "size": [64, 32]}


@torch.no_grad()
@pytest.mark.parametrize("parts", [(1, 1), (1, 2), (2, 2), (3, 1)])
def test_features_are_those_of_transformers(build, parts):
    rows, columns = parts
    height, width = 32 * rows, 32 * columns
    use = build.resolve("vision_encoder", {"name": "mllama", "architecture": SMALL, "size": [height, width]})
    with torch.device("meta"):
        ours = build(use)
    ours.to_empty(device="cpu")
    ours.init_weights(SeededInitializer(0), "")
    generator = torch.Generator().manual_seed(1)
    for parameter in ours.parameters():  # gates too
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    theirs = MllamaVisionModel(MllamaVisionConfig(**SMALL, vision_output_dim=96)).eval()
    theirs.load_state_dict(
        {
            name.replace("global_layers", "global_transformer.layers")
            if name.startswith("global_")
            else name.replace("layers.", "transformer.layers.", 1)
            if name.startswith("layers.")
            else name: tensor
            for name, tensor in ours.state_dict().items()
        }
    )
    pixels = torch.randint(0, 256, (2, 3, height, width), dtype=torch.uint8, generator=generator)

    mean, deviation = use.config.normalisation.mean, use.config.normalisation.deviation
    cut = normalise(pixels, mean, deviation, torch.float32)
    there = [cut[:, :, 32 * r : 32 * r + 32, 32 * c : 32 * c + 32] for r in range(rows) for c in range(columns)]
    there += [torch.zeros_like(there[0])] * (4 - len(there))
    ratio = 1 + theirs.config.supported_aspect_ratios.index([rows, columns])
    expected = theirs(
        torch.stack(there, dim=1)[:, None],
        torch.full((2, 1), ratio),
        torch.tensor([[[int(number < rows * columns) for number in range(4)]]] * 2),
    ).last_hidden_state
    kept = expected[:, 0, : rows * columns].flatten(1, 2)
    torch.testing.assert_close(ours(pixels), kept, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"size": [96, 96]}, "size is 1 × 1, 1 × 2"),
        ({"size": [40, 32]}, "must be multiples of image_size = 32"),
    ],
)
def test_a_size_that_is_not_of_parts_is_refused(build, keys, sentence):
    config = build.resolve("vision_encoder", {"name": "mllama", "architecture": SMALL, **keys}).config

    with pytest.raises(ValueError, match=sentence):
        config.grid(*keys["size"])
