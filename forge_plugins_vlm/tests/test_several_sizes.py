"""Tiles of several sizes in one batch: each row is what it is alone, in every fusion."""

from __future__ import annotations

import math
from itertools import permutations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from small_vlm import FUSIONS

from forge_core.contracts.batch import Entry
from forge_core.data.stream import SampleStream
from forge_core.errors import ConfigError
from forge_plugins_data.mixed_entries import mixed_entries
from forge_plugins_data.mixture_parts import MixtureParts, Part
from forge_plugins_vlm.data.page import page_of
from forge_plugins_vlm.vision import VisionTower

SMALL, LARGE = (16, 16), (32, 24)
ENCODERS = {
    "conv_vit": {"name": "conv_vit", "size": [16, 16], "any_size": True, "patch": 8, "dim": 16, "n_layers": 1}
    | {"n_heads": 2},
    "siglip2_naflex": {
        "name": "siglip2_naflex",
        "architecture": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 8}
        | {"intermediate_size": 32, "num_patches": 16},
    },
}
KEYS = {"encoded_sizes": [SMALL, LARGE], "encoder": ENCODERS["conv_vit"]}
JOINT = {"bidirectional": {"fusion": {"name": "joint_decoder", "bidirectional": True}},
         "rotated in two dimensions": {"fusion": {"name": "joint_decoder", "mrope_sections": [2, 1, 1]}},
         "with an end of rows": {"newline": True}}  # fmt: skip


def row(size, model, *, places, seed, n_tiles=2, length=40):
    """A row with text, two images of a size, and text again."""
    config = model.config
    each = math.prod(config.connector.config.grid(config.encoder.config.grid(*size)))
    rng = torch.Generator().manual_seed(seed)
    slots, ends, at = torch.full((1, length), -1), torch.zeros(1, length, dtype=torch.int64), 3
    for tile in range(n_tiles):
        long = each if places else 1
        if places:
            slots[0, at : at + long] = torch.arange(tile * each, (tile + 1) * each)
        ends[0, at:] = tile + 1
        at += long
        if config.newline and places:
            slots[0, at] = -2
            at += 1
        at += 2
    bounds = torch.stack((torch.zeros_like(ends), (ends - 1).clamp(min=0), ends), dim=-1)
    return {
        "tokens": torch.randint(0, 31, (1, length), generator=rng),
        "pixels": torch.randint(0, 256, (1, n_tiles, 3, *size), dtype=torch.uint8, generator=rng),
        "image_slots": slots,
        "image_range": bounds,
    }


def together(rows):
    """One batch, as a mixture gives it: filled up with what must not matter."""
    batch = {name: torch.cat([one[name] for one in rows]) for name in rows[0] if name != "pixels"}
    pixels = torch.full((len(rows), max(one["pixels"].shape[1] for one in rows), 3, 32, 24), 99, dtype=torch.uint8)
    for number, one in enumerate(rows):
        _, n, _, height, width = one["pixels"].shape
        pixels[number, :n, :, :height, :width] = one["pixels"][0]
    sizes = torch.tensor([one["pixels"].shape[-2:] if one["image_range"].any() else (0, 0) for one in rows])
    return {**batch, "pixels": pixels, "pixels_sizes": sizes}


@torch.no_grad()
@pytest.mark.parametrize("keys", [*FUSIONS, *JOINT])
def test_each_row_is_what_it_is_alone_in_every_fusion(make_model, keys):
    model = make_model(keys, **KEYS, **JOINT.get(keys, {})).eval()
    places = keys != "cross_attention"
    rows = [row(size, model, places=places, seed=seed) for seed, size in enumerate((LARGE, SMALL, LARGE, SMALL))]
    rows.append({**row(SMALL, model, places=places, seed=9, n_tiles=0), "pixels": torch.zeros(1, 1, 3, *SMALL).byte()})

    found = model(**together(rows))

    for number, one in enumerate(rows):
        torch.testing.assert_close(found[number : number + 1], model(**one), rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize(
    "connector",
    [
        {"name": "average_pool"},
        {"name": "average_pool", "window": 3},
        {"name": "attention_pool", "n_heads": 2},
        {"name": "pixel_shuffle"},
        {"name": "resampler", "n_tokens": 3, "n_heads": 2},
    ],
    ids=lambda one: "-".join(map(str, one.values())),
)
def test_tokens_of_all_encoders_and_connectors_that_take_both_sizes_are_those_of_each_alone(
    make_model, encoder, connector
):
    if encoder == "siglip2_naflex":
        pytest.importorskip("transformers")
    sizes = [(16, 16), (32, 32)]
    model = make_model(encoder=ENCODERS[encoder], connector=connector, encoded_sizes=sizes).eval()
    tower: VisionTower = model.vision
    own = [torch.randint(0, 256, (1, 2, 3, *size), dtype=torch.uint8) for size in sizes]
    pixels = torch.full((2, 2, 3, 32, 32), 99, dtype=torch.uint8)
    pixels[0, :, :, :16, :16], pixels[1] = own[0], own[1]

    found = tower(pixels, pixels_sizes=torch.tensor(sizes))

    for number, one in enumerate(own):
        alone = tower(one)[0]
        torch.testing.assert_close(found[number, : len(alone)], alone, rtol=1e-5, atol=1e-5)
        assert (found[number, len(alone) :] == 0).all()


def calls_of_encoder(tower):
    """The tiles of each call from here on."""
    calls = []
    tower.encoder.register_forward_pre_hook(lambda _, inputs: calls.append(tuple(inputs[0].shape)))
    return calls


@torch.no_grad()
def test_rows_of_several_sizes_cost_one_call_of_the_encoder_for_each_size(make_model):
    model = make_model(**KEYS).eval()
    rows = [row(size, model, places=True, seed=seed) for seed, size in enumerate((LARGE, SMALL, LARGE, SMALL, LARGE))]
    calls = calls_of_encoder(model.vision)

    found = model(**together(rows))

    assert calls == [(10, 3, *SMALL), (10, 3, *LARGE)]
    alone = [model(**one) for one in rows]
    assert len(calls) == 2 + len(rows)
    torch.testing.assert_close(found, torch.cat(alone), rtol=1e-6, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("encoder", ENCODERS)
def test_rows_with_different_numbers_of_tiles_cost_one_call_of_the_encoder(make_model, encoder):
    """As of ``anyres`` and ``tiles``; padded ones, as of ``naflex``, where the encoder takes them."""
    if encoder == "siglip2_naflex":
        pytest.importorskip("transformers")
    tower: VisionTower = make_model(encoder=ENCODERS[encoder], freeze_encoder=True).vision.eval()
    numbers, size = (1, 5, 3), (32, 32)
    rng = torch.Generator().manual_seed(0)
    pixels = torch.zeros(3, 5, 3, *size, dtype=torch.uint8)
    sizes = torch.zeros(3, 5, 2, dtype=torch.int64)
    for number, n_tiles in enumerate(numbers):
        for tile in range(n_tiles):
            high, wide = (8 * (1 + (number + tile) % 4), 32) if encoder == "siglip2_naflex" else size
            pixels[number, tile, :, :high, :wide] = torch.randint(0, 256, (3, high, wide), generator=rng)
            sizes[number, tile] = torch.tensor((high, wide))
    own = {"tile_sizes": sizes} if encoder == "siglip2_naflex" else {}
    calls = calls_of_encoder(tower)

    found = tower(pixels, **own)

    assert calls == [(15, 3, *size)]
    each = found.shape[1] // 5
    for number, n_tiles in enumerate(numbers):
        here = {name: one[number : number + 1, :n_tiles] for name, one in own.items()}
        alone = tower(pixels[number : number + 1, :n_tiles], **here)
        torch.testing.assert_close(found[number : number + 1, : n_tiles * each], alone, rtol=1e-6, atol=1e-6)


def test_gradients_of_a_batch_are_the_sum_of_those_of_its_rows(make_model):
    model = make_model(**KEYS)
    rows = [row(size, model, places=True, seed=seed) for seed, size in enumerate((LARGE, SMALL))]

    model(**together(rows)).square().sum().backward()
    found = {name: one.grad.clone() for name, one in model.named_parameters()}
    model.zero_grad()
    for one in rows:
        model(**one).square().sum().backward()

    for name, one in model.named_parameters():
        torch.testing.assert_close(found[name], one.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_entries_that_sources_state_alike_are_as_they_were_and_others_have_the_larger_size():
    def pixels(*sizes):
        return {"pixels": Entry(dims=("sample", "tile", "channel", "height", "width"), sizes=sizes, absent=0)}

    one, other = pixels(None, 1, 3, 16, 40), pixels(None, 5, 3, 32, 24)

    assert mixed_entries([one, {}, one]) == one
    mixed = mixed_entries([one, other])
    assert mixed["pixels"].sizes == (None, 5, 3, 32, 40)
    assert mixed["pixels_sizes"] == Entry(dims=("sample", "side"), sizes=(None, 2), absent=0)
    unknown = pixels(None, None, 3, None, None)
    assert [*mixed_entries([one, unknown])] == ["pixels"]
    assert all("pixels_sizes" in mixed_entries(parts) for parts in permutations([one, unknown, other]))


def test_pictures_of_several_sizes_of_which_one_is_not_known_are_refused():
    class Pictures:
        vocab_size, tokenizer = 31, None

        def __init__(self, *sizes):
            self.fingerprint, self._sizes = str(sizes), sizes

        def __len__(self):
            return 4

        def entries(self):
            dims = ("sample", "tile", "channel", "height", "width")
            return {"pixels": Entry(dims=dims, sizes=(None, 1, 3, *self._sizes), dtype="uint8", absent=0)}

        def read(self, indices):
            tokens = np.zeros((len(indices), 4), np.int64)
            height, width = (size or 8 for size in self._sizes)
            return {
                "tokens": tokens,
                "targets": tokens,
                "pixels": np.zeros((len(indices), 1, 3, height, width), np.uint8),
            }

    def mixed(*sizes):
        parts = [Part(SimpleNamespace(name=str(n), loss_weight=1.0), Pictures(*one), 0) for n, one in enumerate(sizes)]
        return MixtureParts.of(parts, tuple(part.name for part in parts))

    assert "pixels_sizes" in mixed((8, 8), (16, 16)).entries
    with pytest.raises(ConfigError, match="sources give pixels of several sizes, and one does not say which"):
        mixed((8, 8), (None, None), (16, 16))


@pytest.fixture
def mixture(tmp_path, build, tokenizer_path):
    """Pictures of two sizes, and text."""
    tokenizer = {"name": "tokenizer_file", "path": str(tokenizer_path)}
    parts = []
    for size, grid in ((8, [1, 2]), (16, [2, 2])):
        folder = tmp_path / str(size)
        folder.mkdir()
        for number in range(8):
            Image.new("RGB", (8, 8), (size, number, 200)).save(folder / f"{number}.png")
            (folder / f"{number}.txt").write_text("a red circle")
        own = {"name": "image_text", "path": str(folder), "format": "captions", "token_grid": grid}
        source = {**own, "processor": {"name": "square", "size": size}, "tokenizer": tokenizer}
        parts.append({"name": f"of-{size}", "weight": 1.0, "source": source})
    (tmp_path / "text.txt").write_text("a red circle " * 200)
    text = {"name": "text_files", "path": str(tmp_path / "text.txt"), "tokenizer": tokenizer}
    parts.append({"name": "text", "weight": 1.0, "source": text})
    use = build.resolve("data_source", {"name": "mixture", "sources": parts})
    return use, build(use, seq_len=16, split="train", seed=0, samples_per_step=4)


def test_a_mixture_fills_up_smaller_tiles_and_says_what_each_sample_s_are(mixture):
    use, source = mixture
    batch = SampleStream(source, 0, True).read(np.arange(12))

    assert batch["pixels"].shape == (12, 1, 3, 16, 16)
    np.testing.assert_array_equal(batch["pixels_sizes"][:, 0], np.array([8, 16, 0])[batch["source"]])
    of_8 = batch["pixels"][batch["source"] == 0]
    assert (of_8[..., :8, :8].reshape(len(of_8), 3, -1)[:, 0] == 8).all()
    assert (of_8[..., 8:, :] == 0).all()
    alone = source.read_at(np.flatnonzero(batch["source"] == 0)[:2])
    assert alone["pixels"].shape == (2, 1, 3, 16, 16)  # what a rank has does not depend on which samples it gets
    stated = use.config.entries()
    assert stated["pixels"].sizes[-2:] == (16, 16)
    assert "pixels_sizes" in stated


def test_a_page_shows_each_tile_in_its_own_size(mixture, tmp_path):
    _, source = mixture

    page = page_of("a step", [], source.read_at(np.arange(12)), source.tokenizer, source.names)

    assert page.count("tile 0, 8 × 8") == page.count("tile 0, 16 × 16") == 4
