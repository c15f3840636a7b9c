"""Encoders of ``transformers`` against its own models, with tiny random configurations and no network."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.clip.configuration_clip import CLIPVisionConfig
from transformers.models.clip.modeling_clip import CLIPVisionModel
from transformers.models.dinov2.configuration_dinov2 import Dinov2Config
from transformers.models.dinov2.modeling_dinov2 import Dinov2Model
from transformers.models.siglip.configuration_siglip import SiglipVisionConfig
from transformers.models.siglip.modeling_siglip import SiglipVisionModel
from transformers.models.siglip2.configuration_siglip2 import Siglip2VisionConfig
from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionModel

from forge_core.config.builder import ComponentBuilder
from forge_core.errors import ConfigError
from forge_core.registry.discovery import discover
from forge_core.train.initialisation import SeededInitializer
from forge_plugins_vlm.encoders.naflex import as_patches, resizing
from forge_plugins_vlm.testing.vision_encoder import VisionEncoderConformance
from forge_testing.module_state import build_on_meta, materialise

BUILD = ComponentBuilder(discover())

SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "patch_size": 8}
SQUARE = {**SMALL, "image_size": 32}
WITH_MLP = {**SQUARE, "intermediate_size": 48}
FLEXIBLE = {**SMALL, "num_patches": 16, "intermediate_size": 48}
ARCHITECTURES = {
    "siglip": WITH_MLP,
    "siglip2": WITH_MLP,
    "clip": WITH_MLP,
    "dinov2": SQUARE,
    "siglip2_naflex": FLEXIBLE,
}
MODELS = {
    "siglip": (SiglipVisionModel, SiglipVisionConfig),
    "siglip2": (SiglipVisionModel, SiglipVisionConfig),
    "clip": (CLIPVisionModel, CLIPVisionConfig),
    "dinov2": (Dinov2Model, Dinov2Config),
    "siglip2_naflex": (Siglip2VisionModel, Siglip2VisionConfig),
}
FIXED = ("siglip", "siglip2", "clip", "dinov2")


class TestSiglip(VisionEncoderConformance):
    component = "forge-plugins-vlm:siglip"
    config = {"architecture": WITH_MLP}


class TestSiglipSecondLast(VisionEncoderConformance):
    component = "forge-plugins-vlm:siglip"
    config = {"architecture": WITH_MLP, "feature_layer": -2, "size": [24, 48]}


class TestSiglip2(VisionEncoderConformance):
    component = "forge-plugins-vlm:siglip2"
    config = {"architecture": WITH_MLP}


class TestClip(VisionEncoderConformance):
    component = "forge-plugins-vlm:clip"
    config = {"architecture": WITH_MLP, "size": [40, 24]}


class TestClipWithItsClassToken(VisionEncoderConformance):
    component = "forge-plugins-vlm:clip"
    config = {"architecture": WITH_MLP, "cls": "keep"}


class TestDinov2(VisionEncoderConformance):
    component = "forge-plugins-vlm:dinov2"
    config = {"architecture": SQUARE, "size": [32, 16]}


class TestGatedDinov2(VisionEncoderConformance):
    component = "forge-plugins-vlm:dinov2"
    config = {"architecture": {**SQUARE, "use_swiglu_ffn": True}}


class TestNaFlex(VisionEncoderConformance):
    component = "forge-plugins-vlm:siglip2_naflex"
    config = {"architecture": FLEXIBLE}
    tile_sizes = ((24, 40), (16, 16), (48, 8))


class TestConcatenated(VisionEncoderConformance):
    component = "forge-plugins-vlm:concatenated"
    config = {
        "parts": [
            {"encoder": {"name": "dinov2", "architecture": SQUARE}},
            {"encoder": {"name": "siglip", "architecture": WITH_MLP}},
        ]
    }


class TestConcatenatedWithPadding(VisionEncoderConformance):
    component = "forge-plugins-vlm:concatenated"
    config = {
        "parts": [
            {"encoder": {"name": "conv_vit", "any_size": True}},
            {"encoder": {"name": "siglip2_naflex", "architecture": FLEXIBLE}},
        ]
    }
    tile_sizes = ((32, 24), (8, 40))


def resolve(name, **keys):
    return BUILD.resolve("vision_encoder", {"name": name, **keys})


def encoder(name, seed=0, **keys):
    use = resolve(name, **keys)
    module = build_on_meta(lambda: BUILD(use))
    materialise(module)
    module.init_weights(SeededInitializer(seed), "encoder.")
    return module.eval()


def theirs(name, **keys):
    """A model of ``transformers``, no tensor of which is 0 or 1 everywhere."""
    model, configuration = MODELS[name]
    made = model(configuration(**{**ARCHITECTURES[name], **keys})).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return made


@pytest.fixture
def saved(tmp_path):
    """Saves a model of ``transformers``, and gives it with its folder."""

    def save(name, **keys):
        model = theirs(name, **keys)
        model.save_pretrained(tmp_path)
        return model, tmp_path

    return save


def pictures(*shape, seed=0):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def normalised(pixels, name):
    usual = resolve(name, architecture=ARCHITECTURES[name]).config.usual
    mean, deviation = (torch.tensor(numbers)[:, None, None] for numbers in (usual.mean, usual.deviation))
    return (pixels / 255 - mean) / deviation


def close(first, second):
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)


def without_class(name, hidden):
    return hidden[:, 1:] if name in ("clip", "dinov2") else hidden


def edit(path, **keys):
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


@pytest.mark.parametrize("name", FIXED)
def test_a_saved_folder_gives_the_features_of_the_model_that_was_saved(name, saved):
    model, folder = saved(name)
    pixels = pictures(2, 3, 32, 32)

    expected = model(normalised(pixels, name)).last_hidden_state

    close(encoder(name, path=str(folder))(pixels), without_class(name, expected))


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("layer", [-2, -3])
def test_a_feature_layer_is_the_hidden_state_that_transformers_numbers_so(name, layer, saved):
    model, folder = saved(name)
    pixels = pictures(2, 3, 32, 32)

    hidden = model(normalised(pixels, name), output_hidden_states=True).hidden_states[layer]

    ours = encoder(name, path=str(folder), feature_layer=layer)
    close(ours(pixels), without_class(name, hidden))
    assert len(ours.units()) == 4 + layer


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("size", [(24, 48), (64, 32)])
def test_positions_of_other_sizes_are_interpolated_as_transformers_does(name, size, saved):
    model, folder = saved(name)
    pixels = pictures(2, 3, *size)
    further = {} if name == "dinov2" else {"interpolate_pos_encoding": True}

    expected = model(normalised(pixels, name), **further).last_hidden_state

    close(encoder(name, path=str(folder), size=list(size))(pixels), without_class(name, expected))


@pytest.mark.parametrize("name", ["clip", "dinov2"])
def test_a_class_token_is_kept_as_the_first_feature_of_one_row(name, saved):
    model, folder = saved(name)
    pixels = pictures(2, 3, 32, 32)
    ours = encoder(name, path=str(folder), cls="keep")

    close(ours(pixels), model(normalised(pixels, name)).last_hidden_state)
    assert ours.config.grid(32, 32) == (1, 17)


def test_a_gated_dinov2_is_read_from_its_file(saved):
    model, folder = saved("dinov2", use_swiglu_ffn=True)
    pixels = pictures(2, 3, 32, 32)

    close(encoder("dinov2", path=str(folder))(pixels), model(normalised(pixels, "dinov2")).last_hidden_state[:, 1:])


def test_naflex_gives_the_features_of_transformers_for_each_picture(saved):
    model, folder = saved("siglip2_naflex")
    canvas, sizes = pictures(4, 3, 48, 40), torch.tensor([[48, 40], [24, 40], [8, 16], [32, 32]])
    ours = encoder("siglip2_naflex", path=str(folder))(canvas, sizes).view(4, 6, 5, 32)

    for tile, (height, width) in enumerate(sizes.tolist()):
        patches = as_patches(normalised(canvas[tile : tile + 1, :, :height, :width], "siglip2_naflex"), 8)
        padded = torch.nn.functional.pad(patches, (0, 0, 0, 30 - patches.shape[1]))
        mask = (torch.arange(30) < patches.shape[1]).long()[None]
        shape = torch.tensor([[height // 8, width // 8]])
        expected = model(padded, pixel_attention_mask=mask, spatial_shapes=shape).last_hidden_state
        picture = ours[tile, : height // 8, : width // 8].flatten(0, 1)
        close(picture, expected[0, : patches.shape[1]])
        assert not ours[tile, height // 8 :].any()
        assert not ours[tile, :, width // 8 :].any()


def test_patches_are_cut_as_the_processor_of_transformers_cuts_them():
    from transformers.models.siglip2.image_processing_pil_siglip2 import convert_image_to_patches

    picture = torch.rand(3, 24, 40)

    theirs_are = convert_image_to_patches(picture.numpy(), 8)

    assert torch.equal(as_patches(picture[None], 8)[0], torch.as_tensor(theirs_are))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 9, 16])
def test_resizing_has_the_weights_of_interpolation_with_antialiasing(length):
    table = torch.rand(1, 1, 4, 4)

    expected = torch.nn.functional.interpolate(table, size=(length, 4), mode="bilinear", antialias=True)

    torch.testing.assert_close(resizing(torch.tensor([length]), 16, 4)[0, :length] @ table[0, 0], expected[0, 0])


def test_a_tile_without_a_picture_has_features_of_0_and_finite_gradients():
    ours = encoder("siglip2_naflex", architecture=FLEXIBLE)

    features = ours(pictures(2, 3, 16, 24), torch.tensor([[16, 24], [0, 0]]))
    features.square().sum().backward()

    assert not features[1].any()
    assert all(parameter.grad.isfinite().all() for parameter in ours.parameters())


def test_a_whole_siglip_has_the_tower_that_its_vision_model_has(tmp_path):
    """The layout of a download: a configuration with both towers, and names with ``vision_model`` before them."""
    model = theirs("siglip")
    tensors = {f"vision_model.{name}": tensor.clone() for name, tensor in model.state_dict().items()}
    save_file({**tensors, "text_model.head.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    tower = {"model_type": "siglip_vision_model", **WITH_MLP}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "siglip", "vision_config": tower}))
    pixels = pictures(1, 3, 32, 32)

    close(encoder("siglip", path=str(tmp_path))(pixels), model(normalised(pixels, "siglip")).last_hidden_state)


def test_weights_in_several_files_are_found(saved):
    model, folder = saved("siglip")
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    pixels = pictures(1, 3, 32, 32)

    close(encoder("siglip", path=str(folder))(pixels), model(normalised(pixels, "siglip")).last_hidden_state)


def test_a_configuration_without_weights_is_built_by_seed_alone():
    first, same, other = (encoder("siglip", seed=seed, architecture=WITH_MLP) for seed in (0, 0, 1))

    assert torch.equal(first.layers[0].mlp.fc1.weight, same.layers[0].mlp.fc1.weight)
    assert not torch.equal(first.layers[0].mlp.fc1.weight, other.layers[0].mlp.fc1.weight)


def test_mean_deviation_and_filter_are_those_of_the_folder(saved):
    model, folder = saved("siglip")
    said = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "resample": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(said))
    pixels = pictures(1, 3, 32, 32)
    mean, deviation = (torch.tensor(said[key])[:, None, None] for key in ("image_mean", "image_std"))

    ours = encoder("siglip", path=str(folder))

    close(ours(pixels), model((pixels / 255 - mean) / deviation).last_hidden_state)
    assert ours.normalisation.resample == "bilinear"
    assert resolve("siglip", architecture=WITH_MLP).config.normalisation.resample == "bicubic"


@pytest.mark.parametrize(
    ("name", "keys", "size"),
    [
        ("siglip", {}, (32, 32)),
        ("clip", {"feature_layer": -2}, (32, 32)),
        ("dinov2", {}, (32, 32)),
        ("siglip2_naflex", {}, (24, 40)),
    ],
)
def test_flops_are_those_that_torch_counts(name, keys, size):
    ours = encoder(name, architecture=ARCHITECTURES[name], **keys)
    # it counts the products of the plain kernel alone
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        ours(pictures(1, 3, *size))
    counts = counter.get_flop_counts()["Global"]
    resizing_of_positions = 2 * 32 * (4 * 5 * 4 + 3 * 4 * 5) if name == "siglip2_naflex" else 0

    assert ours.config.flops(*size) == pytest.approx(sum(counts.values()) - resizing_of_positions, rel=1e-6)


def test_numbers_of_a_folder_are_known_without_torch_and_transformers(saved):
    _, folder = saved("siglip")
    program = """
import sys
from forge_core.config.builder import ComponentBuilder
from forge_core.registry.discovery import discover
table = {"name": "siglip", "path": sys.argv[1], "feature_layer": -2}
config = ComponentBuilder(discover()).resolve("vision_encoder", table).config
print(config.dim, config.tile_size, config.grid(32, 32), config.depth, {"torch", "transformers"} & {*sys.modules})
"""

    done = subprocess.run([sys.executable, "-c", program, str(folder)], check=True, capture_output=True, text=True)

    assert done.stdout == "32 (32, 32) (4, 4) 2 set()\n"


def test_validation_says_what_is_wrong_with_a_folder_and_with_grids(tmp_path):
    def problems(name, **keys):
        return [*resolve(name, **keys).config.check(None)]

    assert problems("siglip", architecture=WITH_MLP) == []
    ((key, sentence),) = problems("siglip", path=str(tmp_path))
    assert key == "path"
    assert "config.json is not there" in sentence
    deep = problems("clip", architecture=WITH_MLP, feature_layer=-9)
    assert deep == [("feature_layer", "-9, and the encoder has 3 layers")]
    parts = [{"encoder": {"name": "conv_vit"}}, {"encoder": {"name": "dinov2", "architecture": {}}}]
    ((key, sentence),) = problems("concatenated", parts=parts)
    assert key == "parts"
    assert "takes tiles of 518 × 518 pixels, and not of 32 × 32" in sentence


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({}, "architecture: is not there, nor is path; give one of the two"),
        ({"path": "x", "architecture": {}}, "architecture: is given beside path; give one of the two"),
        ({"architecture": {"hidden_sizes": 3}}, "did you mean 'hidden_size'"),
        ({"architecture": {"num_attention_heads": 7}}, "must divide hidden_size = 768, got 7"),
        ({"architecture": {}, "feature_layer": 0}, "feature_layer: must be at most -1"),
        ({"architecture": {}, "size": [0, 32]}, "size: must be positive"),
    ],
)
def test_keys_that_do_not_fit_together_are_refused(keys, sentence):
    with pytest.raises(ConfigError, match=f"(?i){sentence}"):
        resolve("siglip", **keys)


def test_more_layers_from_the_end_than_there_are_are_refused():
    with pytest.raises(ConfigError, match="feature_layer = -4, and the encoder has 3 layers"):
        encoder("siglip", architecture=WITH_MLP, feature_layer=-4)


def test_other_tiles_are_refused_with_what_is_taken():
    with pytest.raises(ValueError, match=r"takes tiles of 32 × 32 pixels, and not of 16 × 32; set size = \[16, 32\]"):
        encoder("siglip", architecture=WITH_MLP)(pictures(1, 3, 16, 32))
    with pytest.raises(ValueError, match="multiples of patch_size = 8 pixels, and not of 12 × 16"):
        encoder("siglip2_naflex", architecture=FLEXIBLE)(pictures(1, 3, 12, 16))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hidden_size": 64}, r"model.safetensors: the tensor \S+ has the shape \[32.*asks for \[64"),
        ({"num_hidden_layers": 2}, "more layers than num_hidden_layers = 2"),
        ({"num_hidden_layers": 4}, r"no tensor encoder.layers.3\S+, which its config.json asks for"),
        (
            {"model_type": "clip_vision_model"},
            "a model of the type 'clip_vision_model', and not of siglip_vision_model",
        ),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1; encoders are without dropout"),
        ({"num_channels": 1}, "num_channels = 1; pictures have 3 channels"),
        ({"hidden_size": "wide"}, "config.json: hidden_size"),
    ],
)
def test_a_folder_that_does_not_fit_its_configuration_is_refused(change, sentence, saved):
    _, folder = saved("siglip")
    edit(folder / "config.json", **change)

    with pytest.raises(ConfigError, match=sentence):
        encoder("siglip", path=str(folder))


def test_a_folder_without_what_is_needed_is_refused(saved, tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere/config.json is not there; give the folder"):
        encoder("siglip", path=str(tmp_path / "nowhere"))
    _, folder = saved("siglip")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model.safetensors cannot be read.*download it again"):
        encoder("siglip", path=str(folder))
    save_file({"something.else": next(iter(tensors.values()))}, file)
    with pytest.raises(ConfigError, match=r"no tensor of its safetensors is named embeddings\.patch_embedding\.weight"):
        encoder("siglip", path=str(folder))
    file.unlink()
    with pytest.raises(ConfigError, match=r"has neither model.safetensors nor"):
        encoder("siglip", path=str(folder))


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"image_mean": [0.5]}, "image_mean must be three numbers"),
        ({"image_std": [0.5, 0, 0.5]}, "image_std must not be 0"),
        ({"resample": 9}, "resample must be a number of Pillow's filters, 0 to 5, got 9"),
        ({"rescale_factor": 1 / 127.5}, "pixels are rescaled by 1 / 255 here"),
    ],
)
def test_a_preprocessor_that_cannot_be_followed_is_refused(said, sentence, saved):
    _, folder = saved("siglip")
    (folder / "preprocessor_config.json").write_text(json.dumps(said))

    with pytest.raises(ConfigError, match=sentence):
        encoder("siglip", path=str(folder))


def test_a_missing_transformers_is_told_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.models.siglip.modeling_siglip", None)

    with pytest.raises(
        ConfigError, match=r"needs the package transformers.*pip install 'forge-plugins-vlm\[encoders\]'"
    ):
        encoder("siglip", architecture=WITH_MLP)


def test_encoders_of_different_grids_are_not_concatenated():
    parts = [
        {"encoder": {"name": "siglip", "architecture": WITH_MLP}},
        {"encoder": {"name": "siglip", "architecture": {**WITH_MLP, "patch_size": 16}}},
    ]

    with pytest.raises(
        ConfigError, match="siglip one of 4 × 4 features for a tile of 32 × 32 pixels, and siglip one of 2"
    ):
        encoder("concatenated", parts=parts)
    with pytest.raises(ConfigError, match="must have at least two encoders, got 1"):
        encoder("concatenated", parts=parts[:1])


def test_concatenated_features_are_those_of_each_encoder_side_by_side():
    parts = [{"encoder": {"name": name, "architecture": ARCHITECTURES[name]}} for name in ("dinov2", "siglip")]
    both, pixels = encoder("concatenated", parts=parts), pictures(2, 3, 32, 32)

    features = both(pixels)

    assert torch.equal(features, torch.cat([one(pixels) for one in both.encoders], dim=-1))
    assert both.units()[2:4] == ["encoders.0.layers.2", "encoders.1.layers.0"]
