"""``forge vlm upcycle``, and warm starts of every modality: image weights that begin as those of text."""

from __future__ import annotations

import json

import pytest
import torch
from small_vlm import entries, images

from forge_core.checkpoint.store import open_checkpoint
from forge_core.cli import main
from forge_core.registry.discovery import discover
from forge_plugins_moe.feed_forward import MoE
from forge_plugins_vlm.tasks.shapes import write_shapes
from forge_plugins_weights.loading import load_model

TEXT = """
[run]
name = "text"
dir = "{folder}/runs"
device = "cpu"
[model]
name = "transformer"
dim = 16
n_layers = 2
n_heads = 2
max_seq_len = 32
feed_forward = {{ name = "mlp", hidden_dim = 24 }}
[data]
name = "image_text"
path = "{folder}/shapes/train.json"
format = "llava"
token_grid = [2, 2]
processor = {{ name = "square", size = 16 }}
tokenizer = {{ name = "tokenizer_file", path = "{folder}/shapes/tokenizer.json" }}
[train]
steps = 2
seq_len = 16
batch_size = 4
precision = "fp32"
[optimizer]
name = "adamw"
lr = 1e-2
[eval]
interval = 0
"""
ENCODER = 'model.encoder={name="conv_vit", size=[16, 16], patch=8, dim=16, n_layers=1, n_heads=2}'
DECODER = 'dim=16, n_layers=2, n_heads=2, max_seq_len=32, feed_forward={name="mlp", hidden_dim=24}'
MODEL = f'model={{name="vision_language", {DECODER}, {ENCODER.removeprefix("model.")}}}'
RENAMED = ("attention", "attention_norm", "feed_forward", "feed_forward_norm")
CAPTIONS = (
    'data={{name="text_files", path="{folder}/shapes", pattern="captions.txt", tokenizer={{name="tokenizer_file", '
)
CAPTIONS += 'path="{folder}/shapes/tokenizer.json"}}}}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs ``text``, ``joint``, ``adapted``, and ``seed``, a moma of one expert for each modality."""
    found = tmp_path_factory.mktemp("upcycle")
    write_shapes(found / "shapes", train=96, held_out=1, seed=0)
    (found / "job.toml").write_text(TEXT.format(folder=found))
    assert main(["run", str(found / "job.toml"), CAPTIONS.format(folder=found)]) == 0
    assert main(["run", str(found / "job.toml"), "run.name=joint", MODEL]) == 0
    lora = ["run.name=adapted", "train.steps=1", "parallel.passes.lora.rank=2"]
    assert main(["run", str(found / "job.toml"), CAPTIONS.format(folder=found), *lora]) == 0
    assert main(["run", str(found / "job.toml"), "run.name=seed", MODEL, "model.fusion.name=moma"]) == 0
    return found


def upcycled(folder, run, out, *arguments):
    command = ["vlm", "upcycle", str(folder / "runs" / run), "--out", str(out), *arguments]
    assert main(command) == 0
    return loaded(out / "checkpoint")


def loaded(checkpoint):
    return load_model(open_checkpoint(checkpoint), discover, torch.device("cpu"), torch.float32).model.eval()


def newest(folder, run):
    return folder / "runs" / run / "checkpoints" / "step_00000002"


def batch():
    given = entries("joint_decoder", "tItt")
    length = given["image_slots"].shape[1]
    return {**given, "tokens": torch.arange(2, 2 + length)[None], "pixels": images(1)}


@torch.no_grad()
@pytest.mark.parametrize("to", [("mixture_of_transformers",), ("moma", "--experts", "1")])
@pytest.mark.parametrize("run", ["text", "joint"])
def test_copies_for_each_modality_compute_what_the_run_did(folder, tmp_path, run, to):
    model = upcycled(folder, run, tmp_path / "out", "--to", *to, ENCODER)
    before = loaded(newest(folder, run))

    tokens = torch.arange(8)[None]
    assert torch.allclose(model(tokens), before(tokens), atol=1e-6)
    if run == "joint":
        assert torch.allclose(model(**batch()), before(**batch()), atol=1e-6)
        image = dict(model.named_parameters())
        image = next(one for name, one in image.items() if "image" in name and name.endswith("up.weight"))
        with torch.no_grad():
            image.zero_()
        assert not torch.allclose(model(**batch()), before(**batch()), atol=1e-6)
        assert torch.allclose(model(tokens), before(tokens), atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("run", ["text", "joint", "seed"])
def test_experts_of_each_modality_are_copies_of_its_layer(folder, tmp_path, run, capsys):
    model = upcycled(folder, run, tmp_path / "out", "--to", "moma", ENCODER)
    before = dict(loaded(newest(folder, run)).named_parameters())

    assert "4 experts for each modality in a layer" in capsys.readouterr().out
    for layer, block in model.blocks.items():
        for name in ("feed_forward", "image_feed_forward"):
            part = getattr(block, name)
            assert isinstance(part, MoE)
            there = name if run == "seed" else "feed_forward"
            dense = {matrix: before[f"blocks.{layer}.{there}.{matrix}.weight"] for matrix in ("up", "gate", "down")}
            assert part.experts.up.shape == (4, *dense["up"].shape)
            assert all(torch.equal(one, dense["up"]) for one in part.experts.up)
            assert all(torch.equal(one, dense["gate"]) for one in part.experts.gate)
            scale = part.experts.down[0] / dense["down"]
            assert torch.allclose(scale, scale.mean().expand_as(scale), rtol=1e-5)
            assert 1 < scale.mean() < 3  # the sigmoids of one expert a token add up to between 1/3 and 1
    own = dict(model.named_parameters())
    kept = [name for name in before if ".feed_forward." not in name and ".image_feed_forward." not in name]
    assert all(torch.equal(own[name], before[name]) for name in kept)


@pytest.mark.parametrize("to", ["moma", "mixture_of_transformers"])
def test_what_it_writes_is_a_run_that_trains(folder, tmp_path, to):
    upcycled(folder, "joint", tmp_path / "out", "--to", to, "train.steps=3")
    assert main(["run", str(tmp_path / "out" / "train.toml")]) == 0

    facts = json.loads((tmp_path / "out" / "loaded.json").read_text())
    assert facts["fresh"] == []
    assert (tmp_path / "out" / "checkpoints" / "step_00000003").exists()
    state = json.loads((tmp_path / "out" / "checkpoint" / "state.json").read_text())
    assert state["upcycled"]["fusion"] == to
    assert state["upcycled"]["source"] == str(newest(folder, "joint").resolve())


def test_the_same_seed_draws_the_same_encoder(folder, tmp_path):
    one, same, other = (
        upcycled(folder, "text", tmp_path / f"{index}", "--to", "moma", "--experts", "1", "--seed", seed)
        for index, seed in enumerate(("1", "1", "2"))
    )
    weights = [dict(model.named_parameters()) for model in (one, same, other)]
    name = next(name for name in weights[0] if name.startswith("vision.encoder.") and weights[0][name].ndim > 1)
    assert torch.equal(weights[0][name], weights[1][name])
    assert not torch.equal(weights[0][name], weights[2][name])


@pytest.mark.parametrize(
    ("run", "arguments", "sentence"),
    [
        ("joint", ["--to", "mixture_of_transformers", "--experts", "4"], "mixture_of_transformers has no experts"),
        ("seed", ["--to", "mixture_of_transformers"], "its model is forge-plugins-vlm:vision_language with moma; give"),
        ("joint", ["--to", "moma", "model.dim=32"], "of the new model"),
        ("joint", ["--to", "moma", "model.n_layers=3"], "the run has no blocks.2."),
        ("joint", ["--to", "moma", "model.n_layers=1"], "the new one has no blocks.1."),
        ("joint", ["--to", "moma", "--seed", "9" * 20], "'--seed': 99999999999999999999 is not in the range"),
        ("adapted", ["--to", "moma"], "was trained with the pass lora, whose parameters another model would lack"),
        ("nothing", ["--to", "moma"], "there is no directory "),
    ],
)
def test_what_does_not_fit_is_a_sentence(folder, tmp_path, capsys, run, arguments, sentence):
    command = ["vlm", "upcycle", str(folder / "runs" / run), "--out", str(tmp_path / "out"), *arguments]
    assert main(command) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_a_place_that_is_taken_is_refused(folder, tmp_path, capsys):
    upcycled(folder, "joint", tmp_path / "out", "--to", "mixture_of_transformers")
    command = ["vlm", "upcycle", str(folder / "runs/joint"), "--out", str(tmp_path / "out"), "--to", "moma"]
    assert main(command) == 2
    assert "exists already" in capsys.readouterr().err


def test_several_loads_begin_every_modality_with_text(folder, tmp_path):
    """As the docstring of the config has it, and the encoder of another run beside it."""
    text, joint = folder / "runs/text", folder / "runs/joint"
    rename = ", ".join(f'"blocks.*.{part}.*"="blocks.*.image.{part}.*"' for part in RENAMED)
    loads = [
        f'{{path="{text}"}}',
        f'{{path="{text}", include=["model.blocks.*"], rename={{{rename}}}}}',
        f'{{path="{joint}", include=["model.vision.*"]}}',
    ]
    settings = [f"checkpoint.load=[{', '.join(loads)}]", "checkpoint.powers_of_two_until=1", "train.steps=1"]
    fusion = [MODEL, "model.fusion.name=mixture_of_transformers"]
    where = [f"run.dir={tmp_path}", "run.name=warm"]
    assert main(["run", str(folder / "job.toml"), *where, *fusion, *settings]) == 0

    loads = json.loads((tmp_path / "warm/loaded.json").read_text())["loads"]
    assert loads[0]["fresh"] == []
    warm = loaded(tmp_path / "warm/checkpoints/step_00000000")
    before, tokens = loaded(newest(folder, "text")), torch.arange(8)[None]
    with torch.no_grad():
        assert torch.allclose(warm(tokens), before(tokens), atol=1e-6)
    for layer, block in warm.blocks.items():
        own = dict(block.image.named_parameters())
        assert all(torch.equal(one, before.blocks[layer].get_parameter(name)) for name, one in own.items())
    encoder = loaded(newest(folder, "joint")).vision.state_dict()
    assert all(torch.equal(one, encoder[name]) for name, one in warm.vision.state_dict().items())
