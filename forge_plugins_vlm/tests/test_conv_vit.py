"""The encoder that is trained from nothing."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from forge_core.config.builder import ComponentBuilder
from forge_core.errors import ConfigError
from forge_core.registry.discovery import discover
from forge_core.train.initialisation import SeededInitializer
from forge_plugins_vlm.testing.vision_encoder import VisionEncoderConformance
from forge_testing.module_state import build_on_meta, materialise

BUILD = ComponentBuilder(discover())


class TestConvViT(VisionEncoderConformance):
    component = "forge-plugins-vlm:conv_vit"


class TestConvViTOfAnySize(VisionEncoderConformance):
    component = "forge-plugins-vlm:conv_vit"
    config = {"any_size": True, "patch": 4, "dim": 32}
    tile_sizes = ((16, 24), (32, 32), (8, 40))


def encoder(**keys):
    use = BUILD.resolve("vision_encoder", {"name": "conv_vit", **keys})
    module = build_on_meta(lambda: BUILD(use))
    materialise(module)
    module.init_weights(SeededInitializer(0), "encoder.")
    return module.eval()


def pictures(*shape, seed=0):
    return torch.randint(0, 256, (*shape,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_the_default_turns_pictures_of_32_pixels_into_16_features_of_width_64():
    assert encoder()(pictures(2, 3, 32, 32)).shape == (2, 16, 64)


def test_features_are_of_unit_scale_at_any_width():
    for dim in (32, 64, 256):
        features = encoder(dim=dim)(pictures(4, 3, 32, 32))
        assert 0.5 < features.std() < 2


def test_a_padded_picture_has_the_features_that_it_has_alone():
    model = encoder(any_size=True, size=(32, 48))
    with torch.no_grad():
        model.positions.zero_()  # else the grids have other positions
    canvas = pictures(2, 3, 32, 48)
    alone = model(canvas[:, :, :24, :40])

    padded = model(canvas, torch.tensor([[24, 40], [24, 40]])).view(2, 4, 6, 64)

    torch.testing.assert_close(padded[:, :3, :5].flatten(1, 2), alone)
    assert not padded[:, 3:].any()
    assert not padded[:, :, 5:].any()


def test_padding_leaks_nothing_of_a_picture_that_ends_within_a_patch():
    model, sizes = encoder(), torch.tensor([[19, 27]])
    canvas, other = pictures(1, 3, 32, 32), pictures(1, 3, 32, 32, seed=1)
    other[:, :, :19, :27] = canvas[:, :, :19, :27]

    assert torch.equal(model(canvas, sizes), model(other, sizes))


def test_a_tile_without_a_picture_has_finite_gradients():
    model = encoder()

    features = model(pictures(2, 3, 32, 32), torch.tensor([[32, 32], [0, 0]]))
    features.square().sum().backward()

    assert not features[1].any()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_positions_are_interpolated_for_other_grids():
    model = encoder(any_size=True)
    learned = model.positions.T.view(1, 64, 4, 4)

    expected = torch.nn.functional.interpolate(learned, size=(2, 3), mode="bilinear")[0].flatten(1).T

    torch.testing.assert_close(model._positions((2, 3)), expected)
    assert model(pictures(1, 3, 16, 24)).shape == (1, 6, 64)


def test_other_sizes_are_refused_with_what_is_taken():
    with pytest.raises(
        ValueError, match=r"takes tiles of 32 × 32 pixels \(size\), not 16 × 32, unless any_size = true"
    ):
        encoder()(pictures(1, 3, 16, 32))
    with pytest.raises(ValueError, match="multiples of patch = 8 pixels, and not of 20 × 32"):
        encoder(any_size=True)(pictures(1, 3, 20, 32))


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"patch": 6}, "patch: must be a power of two"),
        ({"size": [32, 36]}, "size: must be multiples of patch = 8, got"),
        ({"n_heads": 3}, "n_heads: must divide dim = 64, got 3"),
        ({"dim": 66, "n_heads": 2}, "dim: must be a multiple of patch / 2 = 4"),
    ],
)
def test_keys_that_do_not_fit_together_are_refused(keys, sentence):
    with pytest.raises(ConfigError, match=sentence):
        BUILD.resolve("vision_encoder", {"name": "conv_vit", **keys})


def test_flops_are_those_that_torch_counts():
    model = encoder(size=(32, 48))
    # it counts the products of the plain kernel alone
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(pictures(1, 3, 32, 48))

    assert model.config.flops(32, 48) == pytest.approx(counter.get_total_flops(), rel=1e-6)
