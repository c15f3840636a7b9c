"""``forge convert``: vision-language models of ``transformers`` become checkpoints and back, and compute the same."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file
from small_vlm import SMALL, entries
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from forge_core.checkpoint.store import open_checkpoint
from forge_core.cli import main
from forge_core.errors import ConfigError
from forge_core.job import load_job
from forge_core.registry.discovery import discover
from forge_plugins_hf.layouts import layout_of_architecture, layout_of_model
from forge_plugins_inference.generation import generate
from forge_plugins_vlm.encoders.pixels import normalise
from forge_plugins_vlm.images.anyres import Anyres
from forge_plugins_vlm.images.config import AnyresConfig
from forge_plugins_weights.loading import load_model

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
NO_IDS = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": None}
HALF = ([0.5] * 3, [0.5] * 3)
ARCHITECTURES = [f"{one}ForConditionalGeneration" for one in ("Idefics3", "Llava", "LlavaNext", "Mllama", "SmolVLM")]
FIRST = torch.arange(3)
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
        vision=siglip(),
        vision_feature_select_strategy="full",
        multimodal_projector_bias=False,
        projector_hidden_act="relu",
    ),
    "llava of all of siglip": lambda: llava(
        vision=siglip(), vision_feature_select_strategy="full", vision_feature_layer=-1
    ),
    "llava_next": llava_next,
    "llava_next of siglip": lambda: llava_next(
        vision=siglip(), vision_feature_select_strategy="full", projector_hidden_act="silu"
    ),
    "idefics3": lambda: transformers.Idefics3Config(
        text_config=transformers.LlamaConfig(**TEXT), vision_config=VISION, image_token_id=IMAGE, scale_factor=2
    ),
    "smolvlm": lambda: transformers.SmolVLMConfig(
        text_config=transformers.LlamaConfig(**TEXT), vision_config=VISION, image_token_id=IMAGE, scale_factor=4
    ),
    "mllama": lambda: transformers.MllamaConfig(
        text_config=TEXT | {"num_hidden_layers": 3, "cross_attention_layers": [0, 2], **NO_IDS},
        vision_config={
            **{key: value for key, value in VISION.items() if key != "num_attention_heads"},
            "attention_heads": 4,
            "num_global_layers": 2,
            "intermediate_layers_indices": [0, 2],
            "vision_output_dim": 72,
        },
        image_token_index=64,
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
    image = getattr(config, "image_token_index", IMAGE)
    words = {"<image>" if number == image else f"w{number}": number for number in range(65 if image == 64 else 64)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w1"}')
    (folder / "preprocessor_config.json").write_text(json.dumps({"do_resize": True}))
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
    n_tokens = math.prod(ours._token_grid(32, 32))
    pixels = pictures(2)
    if kind == "mllama":
        return both_by_cross_attention(theirs, ours)
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


def both_by_cross_attention(theirs, ours, layout="ItttIItttItt"):
    """The same for images that text looks at: one that text sees, then two together, then one again."""
    given, pixels = entries("cross_attention", layout), pictures(layout.count("I"))
    tokens = torch.arange(8, 8 + len(layout))[None]
    tokens[0, [sign == "I" for sign in layout]] = theirs.config.image_token_index
    seen = torch.zeros(1, len(layout), layout.count("I"), 4)
    for place, (_, first, end) in enumerate(given["image_range"][0].tolist()):
        seen[0, place, first:end, 0] = 1  # of the four parts of a picture, the others are empty
    normalised = normalise(pixels[0], *CLIP, torch.float32)
    text = torch.arange(8, 20)[None]
    return [
        (
            ours(tokens, pixels=pixels, **given),
            theirs(
                input_ids=tokens,
                pixel_values=torch.nn.functional.pad(normalised[None, :, None], (0,) * 7 + (3,)),
                aspect_ratio_ids=torch.ones(1, len(normalised), dtype=torch.int64),
                aspect_ratio_mask=torch.tensor([[[1, 0, 0, 0]] * len(normalised)]),
                cross_attention_mask=seen,
            ).logits,
        ),
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
    assert json.loads((tmp_path / "back" / "preprocessor_config.json").read_text()) == {"do_resize": True}
    assert back.config.image_token_id == model.config.image_token_id

    assert main(["convert", str(tmp_path / "back"), "--to", "forge", "--out", str(tmp_path / "again")]) == 0
    one, other = (loaded(tmp_path / name / "checkpoint").state_dict() for name in ("ours", "again"))
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.fixture
def converted(tmp_path):
    """A LLaVA in a folder ``hf``, and its checkpoint."""
    made("llava", tmp_path / "hf")
    assert main(["convert", str(tmp_path / "hf"), "--to", "forge", "--out", str(tmp_path / "ours")]) == 0
    return tmp_path / "ours" / "checkpoint"


@torch.no_grad()
def test_text_before_the_first_image_gets_nothing_of_it_as_in_the_code_of_llama(tmp_path):
    theirs = made("mllama", tmp_path / "hf")
    assert main(["convert", str(tmp_path / "hf"), "--to", "forge", "--out", str(tmp_path / "ours")]) == 0
    ours = loaded(tmp_path / "ours" / "checkpoint")
    (found, expected), _ = both_by_cross_attention(theirs, ours, "tttItttIt")
    assert not torch.allclose(found, expected, atol=1e-3)  # there, it attends to all images, those behind it too

    for layer in theirs.model.language_model.layers:
        if hasattr(layer, "cross_attn"):  # full_text_row_masked_out_mask is of attention, too
            layer.cross_attn.register_forward_hook(lambda _, __, given: (given[0].index_fill(1, FIRST, 0.0), given[1]))
    (found, expected), _ = both_by_cross_attention(theirs, ours, "tttItttIt")
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_what_a_run_needs_to_know_of_the_data_is_written_down(converted):
    job = load_job(converted.parent / "train.toml", catalog=discover)

    assert job.data.name == "image_text"
    assert (job.data.config.placeholder, job.data.config.token_grid) == ("<image>", (4, 4))
    assert job.data.config.processor.config.size == 32
    assert [*job.model.config.check(job)] == []


@pytest.mark.parametrize("kind", ["llava_next", "idefics3", "mllama"])
def test_data_of_other_architectures_suit_their_models(kind, tmp_path):
    made(kind, tmp_path / "hf")
    out = ["--to", "forge", "--out", str(tmp_path / "ours"), "--config-only"]
    assert main(["convert", str(tmp_path / "hf"), *out]) == 0

    job = load_job(tmp_path / "ours" / "train.toml", catalog=discover)
    assert [*job.model.config.check(job)] == []
    assert job.data.config.one_token_an_image == (kind == "mllama")
    assert job.data.config.processor.config.has_newlines == (kind == "llava_next")


@pytest.mark.parametrize(("number", "filter_"), [(2, "bilinear"), (1, "lanczos"), (0, "bicubic")])
def test_pictures_of_converted_data_are_resized_by_the_filter_of_their_processor(number, filter_, tmp_path):
    """The family's own filter was written. Forge has no nearest one (0), and keeps that of the family."""
    made("llava", tmp_path / "hf")
    (tmp_path / "hf" / "preprocessor_config.json").write_text(json.dumps({"resample": number}))
    out = ["--to", "forge", "--out", str(tmp_path / "ours"), "--config-only"]
    assert main(["convert", str(tmp_path / "hf"), *out]) == 0

    assert load_job(tmp_path / "ours" / "train.toml", catalog=discover).data.config.processor.config.resample == filter_


@pytest.mark.parametrize(
    ("kind", "processor", "exactly"),
    [
        ("llava", CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=32), False),
        ("llava of siglip", SiglipImageProcessorPil(size={"height": 32, "width": 32}), True),
        ("idefics3", Idefics3ImageProcessorPil(do_image_splitting=False, max_image_size={"longest_edge": 32}), False),
        ("smolvlm", SmolVLMImageProcessorPil(do_image_splitting=False, max_image_size={"longest_edge": 32}), False),
        ("mllama", MllamaImageProcessorPil(size={"height": 32, "width": 32}), False),
    ],
)
def test_pictures_of_converted_data_are_resized_as_theirs(build, kind, processor, exactly, tmp_path):
    made(kind, tmp_path / "hf")
    assert (
        main(["convert", str(tmp_path / "hf"), "--to", "forge", "--out", str(tmp_path / "ours"), "--config-only"]) == 0
    )
    use = load_job(tmp_path / "ours" / "train.toml", catalog=discover).data.config.processor
    noise = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    picture = Image.fromarray(noise).resize((120, 80), Image.Resampling.BICUBIC)

    found = build(use)(picture, (1, 1)).tiles[0]

    assert use.config.resample == processor.resample.name.lower()
    if kind == "mllama":  # fills up what is no square, below
        return
    given = processor(picture, do_rescale=False, do_normalize=False, return_tensors="np")["pixel_values"]
    difference = np.abs(found - given.reshape(3, 32, 32).astype(int))
    assert difference.max() == 0 if exactly else difference.mean() < 2


def test_a_run_begins_with_a_folder_or_with_the_connector_of_one(converted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    part = ["--include", "model.vision.connector.*"]
    assert main(["convert", str(converted), "--to", "huggingface", "--out", "part", *part]) == 0
    assert {name.partition(".")[0] for name in load_file("part/model.safetensors")} == {"multi_modal_projector"}
    (tmp_path / "pictures").mkdir()
    for number in range(8):
        Image.new("RGB", (40, 32), (30 * number, 0, 0)).save(f"pictures/{number}.png")
        (tmp_path / "pictures" / f"{number}.txt").write_text("w8 w9")

    settings = ["data.path=pictures", "data.format=captions", "train.steps=1", "train.seq_len=32", "train.batch_size=2"]
    settings += ["train.precision=fp32", "run.device=cpu", "eval.interval=0", "checkpoint.powers_of_two_until=1"]
    for name in ("hf", "part"):
        assert main(["run", "ours/train.toml", *settings, f"checkpoint.load.path={name}", f"run.name={name}"]) == 0

    assert json.loads((tmp_path / "runs/hf/loaded.json").read_text())["fresh"] == []
    whole = loaded(tmp_path / "runs/hf/checkpoints/step_00000000").state_dict()
    begun = loaded(tmp_path / "runs/part/checkpoints/step_00000000").state_dict()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in loaded(converted).state_dict().items())
    same = {name for name, tensor in begun.items() if torch.equal(tensor, whole[name])}
    assert {name for name in same if "connector" in name} == {name for name in whole if "connector" in name}
    assert "head.weight" not in same

    assert main(["convert", "runs/hf", "--to", "huggingface", "--out", "trained"]) == 0
    transformers.LlavaForConditionalGeneration.from_pretrained("trained")
    assert Path("trained/preprocessor_config.json").read_bytes() == Path("hf/preprocessor_config.json").read_bytes()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's
@pytest.mark.parametrize("kind", ["llava", "mllama", "smolvlm"])
def test_adapters_are_given_away_for_the_layers_that_transformers_has_in_memory(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made(kind, tmp_path / "hf")
    assert main(["convert", "hf", "--to", "forge", "--out", "ours", "--config-only"]) == 0
    (tmp_path / "pictures").mkdir()
    for number in range(4):
        Image.new("RGB", (40, 32), (30 * number, 0, 0)).save(f"pictures/{number}.png")
        (tmp_path / "pictures" / f"{number}.txt").write_text("w8 w9")
    settings = ["data.path=pictures", "data.format=captions", "train.steps=2", "train.seq_len=32", "train.batch_size=2"]
    settings += ["train.precision=fp32", "run.device=cpu", "eval.interval=0", "optimizer.lr=1e-2"]
    assert main(["run", "ours/train.toml", *settings, "parallel.passes.lora.rank=2", "run.name=tuned"]) == 0

    for to in ("huggingface", "peft"):
        assert main(["convert", "runs/tuned", "--to", to, "--out", to]) == 0

    base, folded = map(transformers.AutoModelForImageTextToText.from_pretrained, ("hf", "huggingface"))
    adapted = peft.PeftModel.from_pretrained(base, "peft")
    tokens = torch.arange(8, 20)[None]
    with torch.no_grad(), adapted.disable_adapter():
        before = base(tokens).logits
    with torch.no_grad():
        expected, found = folded(tokens).logits, adapted(tokens).logits
    assert (expected - before).abs().max() > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_part_of_a_model_is_no_model(converted, tmp_path, capfd):
    part = ["--to", "huggingface", "--out", str(tmp_path / "part"), "--include"]
    assert main(["convert", str(converted), *part, "model.vision.conector.*"]) == 2
    assert "--include model.vision.conector.* means none of the model's parameters" in capfd.readouterr().err
    assert main(["convert", str(converted), *part, "model.vision.connector.*"]) == 0
    assert "has model.vision.connector.* alone, which is no model" in refused(tmp_path / "part", capfd)


def refused(folder, capfd):
    out = folder.parent / "out"
    capfd.readouterr()
    code = main(["convert", str(folder), "--to", "forge", "--out", str(out)])
    said = capfd.readouterr().err
    assert code == 2, said
    assert not out.exists()
    return said


def changed(folder, keys):
    """Change ``config.json``; tables within it key by key."""
    table = json.loads((folder / "config.json").read_text())
    for key, value in keys.items():
        table[key] = {**table[key], **value} if isinstance(value, dict) and key in table else value
    (folder / "config.json").write_text(json.dumps(table))


@pytest.mark.parametrize(
    ("kind", "keys", "sentence"),
    [
        ("llava", {"architectures": ["LlavaForConditionalGenration"]}, "Did you mean LlavaForConditionalGeneration?"),
        (
            "llava",
            {"vision_config": {"model_type": "pixtral"}},
            "vision_config.model_type = 'pixtral' is not supported",
        ),
        ("llava", {"text_config": {"model_type": "qwen"}}, "text_config.model_type = 'qwen' is not supported; llama, "),
        ("llava", {"vision_feature_layer": [1, 2]}, "vision_feature_layer = [1, 2] is not supported"),
        ("llava", {"projector_hidden_act": "mish"}, "projector_hidden_act = 'mish' is not supported; gelu, gelu_py"),
        ("llava", {"vision_config": {"attention_dropout": 0.1}}, "vision_config.attention_dropout = 0.1 is not"),
        (
            "llava",
            {"vision_config": {"use_patches": 3}},
            "not supported by our model of this architecture: vision_config.",
        ),
        ("llava", {"text_config": {"attention_bias": True}}, "missing: language_model.model.layers.0.self_attn.k_proj"),
        ("llava", {"vision_config": {"num_hidden_layers": 5}}, "missing: vision_tower.vision_model.encoder.layers.3"),
        ("llava", {"vision_config": {"hidden_size": 32}}, "weights have other shapes than config.json says: "),
        ("llava of siglip", {"vision_feature_select_strategy": "default"}, "leaves out a patch of siglip_vision_model"),
        ("llava_next", {"image_grid_pinpoints": [[40, 32]]}, "image_grid_pinpoints of [40, 32] is not supported"),
        ("llava_next", {"vision_feature_select_strategy": "full"}, "features with a class token are no grid"),
        (
            "idefics3",
            {"vision_config": {"image_size": 200}},
            "with 25 patches along the side of a tile is not supported",
        ),
        ("llava", {"vision_config": {"patch_size": 0}}, "vision_config.patch_size = 0 is not supported; whole numbers"),
        ("idefics3", {"scale_factor": "2"}, "scale_factor = '2' is not supported; whole numbers from 1 are"),
        ("mllama", {"vision_config": {"image_size": [32, 32]}}, "vision_config.image_size = [32, 32] is not supported"),
        ("mllama", {"vision_config": {"vision_output_dim": 96}}, "vision_output_dim = 96 is not supported; only 72 is"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused_by_key(kind, keys, sentence, tmp_path, capfd):
    made(kind, tmp_path / "hf")
    changed(tmp_path / "hf", keys)

    assert sentence in refused(tmp_path / "hf", capfd)


def test_pixels_that_are_normalised_otherwise_are_refused(tmp_path, capfd):
    made("llava", tmp_path / "hf")
    (tmp_path / "hf" / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5, 0.5, 0.5]}))

    assert "image_mean = [0.5, 0.5, 0.5] and image_std = " in refused(tmp_path / "hf", capfd)


@pytest.mark.parametrize(
    ("keys", "reasons"),
    [
        ({}, ["LlavaForConditionalGeneration has an encoder clip or siglip, and model.encoder is", "further parts"]),
        (
            {"fusion": {"name": "mixture_of_transformers"}},
            ["LlavaForConditionalGeneration has the fusion joint_decoder"],
        ),
        (
            {"fusion": {"name": "joint_decoder", "mrope_sections": [2, 1, 1]}},
            [
                "LlavaForConditionalGeneration has the fusion joint_decoder without any of its keys",
                "Idefics3ForConditionalGeneration has the fusion joint_decoder without any of its keys",
            ],
        ),
        ({"connector": {"name": "resampler"}}, ["has a connector mlp of two matrices"]),
    ],
)
def test_a_model_that_has_no_form_there_is_refused_with_the_reason(keys, reasons, build):
    use = build.resolve("model", {"name": "vision_language", **SMALL, "connector": {"name": "mlp"}, **keys})

    with pytest.raises(ConfigError) as refusal:
        layout_of_model(use.config, 31, discover())

    for reason in reasons:
        assert reason in str(refusal.value)


@pytest.mark.parametrize(
    ("keys", "written"),
    [
        ({}, {"projector_hidden_act": "gelu"}),
        ({"activation": "gelu_tanh", "hidden_dim": 32}, {"projector_hidden_act": "gelu_pytorch_tanh"}),
        ({"hidden_dim": 40}, "has a connector of the decoder's width 32; connector.hidden_dim is 40"),
    ],
)
def test_the_projection_of_llava_is_written_or_refused(keys, written, build):
    layout = layout_of_architecture("LlavaForConditionalGeneration", discover())
    table = layout.model_table(llava().to_dict())
    config = build.resolve("model", {**table, "connector": {"name": "mlp", **keys}}).config

    if isinstance(written, dict):
        found = layout.config_json(config, 64)
        assert {key: found[key] for key in written} == written
        assert layout.model_table(found)["connector"].get("activation", "gelu") == keys.get("activation", "gelu")
        return
    with pytest.raises(ConfigError, match=re.escape(written)):
        layout.config_json(config, 64)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"window": 8}, "its decoder is none of these: LlamaForCausalLM: window = 8"),
        ({"attention_dropout": 0.1}, "has no dropout, and no biases"),
        ({"input_tokens": 0}, "has input_tokens = 8, and the model 0"),
        ({"encoder": {"name": "conv_vit"}}, "has an encoder mllama and a connector linear"),
        ({"fusion": {"gate_scale": 10.0}}, "has gates tanh(g); fusion.gate_scale is 10"),
        ({"fusion": {"gated": False}}, "has gates tanh(g); fusion.gated is false"),
        ({"fusion": {"n_kv_heads": 1}}, "looks at images with as many heads as at text; remove those of fusion"),
    ],
)
def test_what_llama_with_images_has_not_is_named(keys, reason, tmp_path, build):
    made("mllama", tmp_path / "hf")
    layout = layout_of_architecture("MllamaForConditionalGeneration", discover())
    table = layout.model_table(json.loads((tmp_path / "hf" / "config.json").read_text()))

    fusion = {**table["fusion"], **keys.get("fusion", {})}

    with pytest.raises(ConfigError, match=re.escape(reason)):
        layout.config_json(build.resolve("model", {**table, **keys, "fusion": fusion}).config, 72)


def test_a_token_that_the_head_has_not_may_be_forbidden(make_model):
    model = make_model("cross_attention", input_tokens=2).eval()

    [answer] = generate(model, [[3, 30, 4]], max_new_tokens=6, temperature=0.0, forbidden=[30, 29, 5])

    assert max(answer) < 29
    with torch.no_grad():
        assert model(torch.tensor([[3, 30]])).shape == (1, 2, 29)


def test_the_token_for_images_is_that_of_the_data_or_of_the_model_or_asked_for(converted):
    job = load_job(converted / "job.toml", catalog=discover)
    layout, table = layout_of_model(job.model.config, 64, discover())

    assert layout.with_data(table, job.data.config, {"<image>": 9})["image_token_index"] == 9
    assert layout.with_data(table, job.data.config, {})["image_token_index"] == IMAGE
    with pytest.raises(ConfigError, match="has to name the token that stands for an image"):
        layout.with_data({**table, "image_token_index": None}, job.data.config, {})


@pytest.mark.parametrize(
    ("architecture", "keys", "expected"),
    [
        (
            "LlavaForConditionalGeneration",  # llava-hf/llava-1.5-7b-hf
            {
                "image_token_index": 32000,
                "text_config": {"max_position_embeddings": 4096, "model_type": "llama", "rms_norm_eps": 1e-05}
                | {"vocab_size": 32064},
                "vision_config": {"hidden_size": 1024, "image_size": 336, "intermediate_size": 4096}
                | {"model_type": "clip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 24}
                | {"patch_size": 14, "projection_dim": 768, "vocab_size": 32000},
            },
            {"dim": 4096, "n_layers": 32, "vocab_size": 32064, "image_token": 32000},
        ),
        (
            "LlavaNextForConditionalGeneration",  # llava-hf/llava-v1.6-mistral-7b-hf
            {
                "image_token_index": 32000,
                "text_config": {"intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral"}
                | {"num_key_value_heads": 8, "rope_theta": 1e6, "sliding_window": None, "vocab_size": 32064},
                "vision_config": {"hidden_size": 1024, "image_size": 336, "intermediate_size": 4096}
                | {"model_type": "clip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 24}
                | {"patch_size": 14},
            },
            {"dim": 4096, "n_kv_heads": 8, "rope_theta": 1e6, "newline": True},
        ),
    ],
)
def test_keys_that_published_files_leave_out_are_filled_in(architecture, keys, expected, build):
    table = layout_of_architecture(architecture, discover()).model_table(keys)

    assert {key: table[key] for key in expected} == expected
    assert table["encoder"]["architecture"]["hidden_act"] == "quick_gelu"
    config = build.resolve("model", table).config
    assert config.encoder.config.depth == 23


def test_every_architecture_is_converted_here_and_in_the_table_of_the_docs():
    installed = discover()
    layouts = [layout_of_architecture(name, installed) for name in ARCHITECTURES]

    assert {
        transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config())].__name__ for config in MODELS.values()
    } == {name for layout in layouts for name in layout.architectures}
    page = (Path(__file__).parents[2] / "docs" / "published-models.md").read_text()
    assert sorted(re.findall(r"^\| `(\w+ForConditionalGeneration)`", page, re.M)) == sorted(ARCHITECTURES)
