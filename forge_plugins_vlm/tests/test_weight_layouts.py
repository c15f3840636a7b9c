"""``forge convert``: vision-language models of ``transformers`` become checkpoints and back, and compute the same."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

from forge_core.checkpoint.store import open_checkpoint
from forge_core.cli import main
from forge_core.loading import load_model
from forge_core.registry.discovery import discover
from forge_plugins_vlm.encoders.pixels import normalise
from forge_plugins_vlm.images.anyres import Anyres
from forge_plugins_vlm.images.config import AnyresConfig

TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 192,
}
VISION = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "patch_size": 8,
    "image_size": 32,
}
IMAGE = 5
HALF = ([0.5] * 3, [0.5] * 3)
CLIP = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])


def llava(text=None, vision=None, **keys):
    text, vision = text or transformers.LlamaConfig(**TEXT), vision or transformers.CLIPVisionConfig(**VISION)
    return transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=IMAGE, **keys)


def llava_next(text=None, vision=None, **keys):
    text, vision = text or transformers.LlamaConfig(**TEXT), vision or transformers.CLIPVisionConfig(**VISION)
    grids = {"image_grid_pinpoints": [[32, 64], [64, 32], [64, 64], [96, 32], [32, 96]]}
    return transformers.LlavaNextConfig(
        text_config=text, vision_config=vision, image_token_index=IMAGE, **{**grids, **keys}
    )


def siglip():
    return transformers.SiglipVisionConfig(**VISION)


MODELS: dict[str, Any] = {
    "llava": llava,
    "llava of mistral": lambda: llava(transformers.MistralConfig(**TEXT, sliding_window=None)),
    "llava of a tied qwen2": lambda: llava(transformers.Qwen2Config(**TEXT, tie_word_embeddings=True)),
    "llava with class tokens": lambda: llava(vision_feature_select_strategy="full", vision_feature_layer=2),
    "llava of siglip": lambda: llava(
        vision=siglip(), vision_feature_select_strategy="full", multimodal_projector_bias=False
    ),
    "llava of all of siglip": lambda: llava(
        vision=siglip(), vision_feature_select_strategy="full", vision_feature_layer=-1
    ),
    "llava_next": llava_next,
    "llava_next of siglip": lambda: llava_next(vision=siglip(), vision_feature_select_strategy="full"),
    "idefics3": lambda: transformers.Idefics3Config(
        text_config=transformers.LlamaConfig(**TEXT), vision_config=VISION, image_token_id=IMAGE, scale_factor=2
    ),
    "smolvlm": lambda: transformers.SmolVLMConfig(
        text_config=transformers.LlamaConfig(**TEXT), vision_config=VISION, image_token_id=IMAGE, scale_factor=4
    ),
}


def made(kind, folder, **saving):
    """A model with random weights in a folder as downloaded."""
    torch.manual_seed(0)
    config = MODELS[kind]()
    model = transformers.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and gates too
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder, **saving)
    words = {"<image>" if number == IMAGE else f"w{number}": number for number in range(64)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w1"}')
    (folder / "preprocessor_config.json").write_text('{"image_mean": [0.5, 0.5, 0.5]}')
    return model.eval()


def loaded(path):
    return load_model(open_checkpoint(path), discover, torch.device("cpu"), None).model.eval()


def row(*parts):
    """Tokens, slots and ranges of one row: ``(slots, tiles)`` is an image, and a number so many tokens of text."""
    tokens, slots, seen, tile = [], [], [], 0
    for part in parts:
        if isinstance(part, int):
            tokens += [7 + (3 * n) % 50 for n in range(part)]
            slots += [-1] * part
            seen += [(0, 0, tile)] * part
            continue
        own, n_tiles = part
        tokens += [IMAGE] * len(own)
        slots += own
        tile += n_tiles
        seen += [(0, 0, tile)] * len(own)
    return torch.tensor([tokens]), {"image_slots": torch.tensor([slots]), "image_range": torch.tensor([seen])}


def pictures(n_tiles):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (1, n_tiles, 3, 32, 32), dtype=torch.uint8, generator=generator)


@torch.no_grad()
def both(kind, theirs, ours):
    """Logits of both models, for two images among text in a row, and one without any."""
    n_tokens = ours.vision.tokens_of_tile(32, 32)
    pixels = pictures(2)
    mean, deviation = CLIP if ours.config.encoder.name == "clip" else HALF
    normalised = normalise(pixels[0], mean, deviation, torch.float32)
    images = [(list(range(number * n_tokens, (number + 1) * n_tokens)), 1) for number in range(2)]
    given: dict[str, Any] = {"pixel_values": normalised}
    if kind.startswith(("idefics3", "smolvlm")):
        given = {"pixel_values": normalised[None]}
    if kind.startswith("llava_next"):  # each as two tiles at least: a base, and a grid
        given, pixels, images = anyres_pair(ours, mean, deviation)
    tokens, entered = row(3, images[0], 4, images[1], 5)
    text = torch.arange(8, 20)[None]
    return [
        (ours(tokens, pixels=pixels, **entered), theirs(input_ids=tokens, **given).logits),
        (ours(text), theirs(input_ids=text).logits),
    ]


def anyres_pair(ours, mean, deviation):
    """A wide picture and a high one, as our processor gives them and as ``transformers`` wants them."""
    processor = Anyres(AnyresConfig(size=32))
    grid = ours.config.encoder.config.grid(32, 32)
    images, tiles, sizes, first = [], [], [], 0
    for number, size in enumerate(((20, 50), (75, 30))):
        noise = np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)
        made = processor(Image.fromarray(noise), grid)
        n_tokens = grid[0] * grid[1]
        images.append(([slot if slot == -2 else int(slot) + first * n_tokens for slot in made.slots], len(made.tiles)))
        tiles.append(torch.from_numpy(made.tiles))
        sizes.append(size)
        first += len(made.tiles)
    most = max(map(len, tiles))
    normalised = [normalise(one, mean, deviation, torch.float32) for one in tiles]
    padded = [torch.cat((one, one.new_zeros(most - len(one), *one.shape[1:]))) for one in normalised]
    given = {"pixel_values": torch.stack(padded), "image_sizes": torch.tensor(sizes)}
    return given, torch.cat(tiles)[None], images


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_goes_there_and_back_and_computes_the_same(kind, tmp_path, capfd):
    model = made(kind, tmp_path / "hf", max_shard_size="20KB")  # several files

    assert main(["convert", str(tmp_path / "hf"), "--to", "forge", "--out", str(tmp_path / "ours")]) == 0
    assert "parameters" in capfd.readouterr().out
    for ours, theirs in both(kind, model, loaded(tmp_path / "ours" / "checkpoint")):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)

    source = str(tmp_path / "ours" / "checkpoint")
    assert main(["convert", source, "--to", "huggingface", "--out", str(tmp_path / "back")]) == 0
    back, accounts = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path / "back", output_loading_info=True
    )
    assert {key: len(value) for key, value in accounts.items() if value} == {}
    for ours, theirs in both(kind, back.eval(), loaded(tmp_path / "ours" / "checkpoint")):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert json.loads((tmp_path / "back" / "preprocessor_config.json").read_text())["image_mean"] == [0.5] * 3
    assert back.config.image_token_id == IMAGE

    assert main(["convert", str(tmp_path / "back"), "--to", "forge", "--out", str(tmp_path / "again")]) == 0
    one, other = (loaded(tmp_path / name / "checkpoint").state_dict() for name in ("ours", "again"))
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
