"""Stages of training: groups of parameters by name, what is frozen costs nothing and stays, and resumes at a border."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from small_vlm import FUSIONS, entries, images

import fork_server
from forge_core.checkpoint.store import open_checkpoint
from forge_core.cli import main
from forge_core.config.builder import ComponentBuilder
from forge_core.contracts.phase_plan import KnownParameters
from forge_core.errors import ExitCode
from forge_core.job import load_job
from forge_core.registry.discovery import discover
from forge_core.run.run import run_job
from forge_core.train.build import build_on_meta
from forge_plugins_optim.phases import Phases
from forge_plugins_vlm.tasks.shapes import write_shapes

JOB = """
[run]
name = "stages"
dir = "{folder}/runs"
device = "cpu"
[model]
name = "vision_language"
dim = 16
n_layers = 2
n_heads = 2
max_seq_len = 32
encoder = {{ name = "conv_vit", size = [16, 16], patch = 8, dim = 16, n_layers = 2, n_heads = 2 }}
connector = {{ name = "linear" }}
[data]
name = "image_text"
path = "{folder}/shapes/train.json"
format = "llava"
token_grid = [2, 2]
processor = {{ name = "square", size = 16 }}
tokenizer = {{ name = "tokenizer_file", path = "{folder}/shapes/tokenizer.json" }}
[train]
steps = 8
seq_len = 16
batch_size = 4
precision = "fp32"
[optimizer]
name = "adamw"
lr = 1e-2
weight_decay = 0.1
[metrics]
interval = 1
[checkpoint]
interval = 1
[eval]
interval = 0
[[phases]]
at = 1
train = ["@connector"]
[[phases]]
at = 4
lr_scale = {{ "@encoder" = 0.5 }}
[[phases]]
at = 7
train = ["@decoder"]
"""
FROZEN = {4: ("encoder", "decoder"), 7: (), 9: ("vision",)}
"""By the step after a phase: the groups that its updates leave."""
SELDOM = "checkpoint.interval=3"
"""For runs of which no other checkpoints are read than the last one, and that of step 3."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Four pictures with captions, and a job."""
    found = tmp_path_factory.mktemp("stages")
    write_shapes(found / "shapes", train=4, held_out=1, seed=0)
    (found / "job.toml").write_text(JOB.format(folder=found))
    return found


def train(folder, *overrides):
    """Train to the end; returns the lines of metrics and the run's directory."""
    if "--nproc" in overrides:
        command = [sys.executable, "-m", "forge_core", "run", str(folder / "job.toml"), *overrides]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = fork_server.run(command, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
    else:
        catalog = discover()
        job = load_job(folder / "job.toml", overrides, catalog=catalog, world_size=1)
        assert run_job(job, catalog) is ExitCode.COMPLETED
    name = next((one.partition("=")[2] for one in overrides if one.startswith("run.name=")), "stages")
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], folder / "runs" / name


@pytest.fixture(scope="module")
def straight(folder):
    return train(folder)


def checkpoint(run, step):
    return run / "checkpoints" / f"step_{step:08d}"


def weights(run, step):
    found = open_checkpoint(checkpoint(run, step))
    return {key: found.read(key) for key in found.saved_tensors()}


def curve(lines):
    return [(line["step"], line["loss"], line["grad_norm"], line["lr"]) for line in lines if "loss" in line]


def known(of, **keys):
    build = ComponentBuilder(discover(()))
    table = {"name": "vision_language", "dim": 16, "n_layers": 2, "n_heads": 2, **FUSIONS[of], **keys}
    with torch.device("meta"):
        return KnownParameters.of(build(build.resolve("model", table), vocab_size=31))


@pytest.mark.parametrize("fusion", FUSIONS)
def test_groups_cover_the_model_and_the_decoder_is_that_of_text(fusion):
    found = known(fusion, newline=True)
    groups = found.aliases
    own = {"cross_attention": ("cross_attention",), "mixture_of_transformers": ("image",), "moma": ("image",)}
    others = frozenset().union(*(groups[one] for one in own.get(fusion, ())))

    assert groups["vision"] == groups["encoder"] | groups["connector"]
    assert "vision.newline" in groups["connector"]
    assert groups["decoder"] | groups["vision"] | others == found.sizes.keys()
    assert not groups["decoder"] & others
    assert {"embed.weight", "blocks.1.attention.q.weight"} <= groups["decoder"]
    assert groups["embeddings"] == {"embed.weight"}
    if fusion != "moma":
        text = {name for name in known("joint_decoder").sizes if not name.startswith("vision.")}
        assert groups["decoder"] == text


@pytest.mark.parametrize("place", ["insert", "replace"])
def test_gates_are_a_group_within_the_layers_that_look(place):
    groups = known("cross_attention", fusion={"name": "cross_attention", "layers": [1], "place": place}).aliases
    layer = "blocks.1.looking" if place == "insert" else "blocks.1"

    assert groups["gates"] == {f"{layer}.{one}_gate.weight" for one in ("attention", "feed_forward")}
    assert groups["gates"] < groups["cross_attention"]


def test_of_groups_and_patterns_the_one_of_fewest_parameters_counts(folder):
    scales = '{"@decoder"=0.1, "blocks.0.*"=0.5, "@vision"=2.0, "@connector"=3.0, "*"=7.0}'
    job = load_job(folder / "job.toml", [f"phases=[{{at=1, lr_scale={scales}}}]"], catalog=discover(), world_size=1)
    model = KnownParameters.of(build_on_meta(job, 31, ComponentBuilder(discover(()))))
    found = Phases(job=job, parameters={}, known=model).at(1).scales

    assert found["blocks.0.attention.q.weight"] == 0.5
    assert found["blocks.1.attention.q.weight"] == found["embed.weight"] == 0.1
    assert found["vision.connector.layers.0.weight"] == 3.0
    assert {found[name] for name in model.aliases["encoder"]} == {2.0}


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        (
            'phases=[{at=2, train=["@conector"]}]',
            "which names @vision, @encoder, @connector, @decoder, @embeddings; did you mean '@connector'?",
        ),
        ('phases=[{at=2, lr_scale={"@gates"=10}}]', "phases[0].lr_scale: '@gates' is no group of parameters"),
        ('phases=[{at=2, train=["vision.encoderr.*"]}]', "means no parameter of this model; did you mean"),
        ("phases=[{at=2, lr_scale=0}]", "phases[0].lr_scale: it trains nothing"),
    ],
)
def test_a_stage_that_matches_or_trains_nothing_is_refused(folder, capsys, setting, sentence):
    assert main(["run", str(folder / "job.toml"), "run.name=refused", setting]) == 2
    assert sentence in capsys.readouterr().err.replace("\n", " ")
    assert not (folder / "runs/refused").exists()


@pytest.mark.parametrize(
    ("phase", "sentence"),
    [
        ('train=["@encoder"]', "train: '@encoder'"),
        ('train=["@encoder", "@connector"]', "train: '@encoder'"),
        ('train=["blocks.*", "vision.encoder.layers.0.*"]', "train: 'vision.encoder.layers.0.*'"),
        ('lr_scale={"@encoder"=10}', "lr_scale: '@encoder'"),
    ],
)
def test_a_stage_that_names_what_is_always_frozen_is_refused(folder, capsys, phase, sentence):
    settings = ["model.freeze_encoder=true", f"phases=[{{at=2, {phase}}}]"]
    assert main(["run", str(folder / "job.toml"), "run.name=refused", *settings]) == 2
    assert f"phases[0].{sentence} means parameters alone that a key such as" in capsys.readouterr().err
    assert not (folder / "runs/refused").exists()


def test_a_group_of_the_model_has_an_optimizer_of_its_own(folder):
    adamw = '{name="adamw", lr=1e-2}'
    groups = f'[{{patterns=["@connector"], optimizer={{name="sgd", lr=0.1, momentum=0.9}}}}, {{optimizer={adamw}}}]'
    setting = f'optimizer={{name="grouped", groups={groups}}}'
    _, run = train(folder, "run.name=grouped", setting, "train.steps=2", "phases=[]")

    state = {key for key in weights(run, 2) if key.startswith("optimizer.")}
    of_connector = {key for key in state if key.startswith("optimizer.vision.connector.layers.0.weight.")}
    assert any("momentum" in key for key in of_connector)
    assert not any("exp_avg" in key for key in of_connector)
    assert "optimizer.blocks.0.attention.q.weight.exp_avg" in state


def test_what_a_stage_freezes_stays_bit_for_bit_without_state(straight):
    _, run = straight
    before = weights(run, 1)
    groups = known("joint_decoder").aliases
    for step in range(2, 9):
        after = weights(run, step)
        frozen = next(names for end, names in FROZEN.items() if step < end)
        kept = frozenset().union(*(groups[one] for one in frozen))
        changed = {key.removeprefix("model.") for key in before if not torch.equal(before[key], after[key])}
        changed = {name for name in changed if not name.startswith("optimizer.")}
        assert changed == {name for name in changed if name not in kept}
        assert changed
        before = after
    assert not any(key.startswith("optimizer.vision.encoder.") for key in weights(run, 3))


def test_what_is_trained_is_told_at_each_change_and_after_a_resume(folder, straight):
    _, run = straight
    log = (run / "log.txt").read_text()
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    told = [one for one in events if one["event"] == "phase"]

    assert [one["step"] for one in told] == [1, 4, 7]
    assert [log.count(f"trained from step {step} on:") for step in range(1, 9)] == [1, 0, 0, 1, 0, 0, 1, 0]
    first = {one["name"]: one for one in told[0]["groups"]}
    assert first["@encoder"]["trained"] == 0
    assert first["@encoder"]["lr_scales"] is None
    assert (
        first["@connector"]["trained"] == first["@connector"]["parameters"] == first["all"]["trained"] == 272
    )  # 16 × 16 and a bias
    second = {one["name"]: one["lr_scales"] for one in told[1]["groups"]}
    assert second["@encoder"] == [0.5, 0.5]
    assert second["all"] == [0.5, 1.0]
    _, resumed = train(folder, "run.name=told", f"checkpoint.resume={checkpoint(run, 4)}", SELDOM)
    log = (resumed / "log.txt").read_text()
    assert [log.count(f"trained from step {step} on:") for step in range(1, 9)] == [0, 0, 0, 0, 1, 0, 1, 0]


@pytest.mark.parametrize("step", [3, 6, *(pytest.param(step, marks=pytest.mark.nightly) for step in (2, 4))])
def test_a_resume_at_the_border_of_stages_is_bit_identical(folder, straight, step):
    """After step 3 the encoder thaws, and after step 6 it is frozen again."""
    lines, run = straight
    again, resumed = train(folder, f"run.name=from-{step}", f"checkpoint.resume={checkpoint(run, step)}", SELDOM)

    assert curve(again) == curve(lines)[step:]
    wanted, found = weights(run, 8), weights(resumed, 8)
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[key], found[key]) for key in wanted)


LAYOUTS = {
    "fsdp": ("train.batch_size=2",),
    "pp": ("parallel.pp=2", "train.batch_size=2", "train.grad_accumulation=2"),
    "tp": ("parallel.tp=2",),
    "recomputed": ("train.batch_size=2", "parallel.passes.activation_checkpointing=true"),
}
BY_DAY = {"joint_decoder": ("tp",), "cross_attention": ("pp",)}


@pytest.mark.parametrize(
    ("fusion", "layout"),
    [
        pytest.param(fusion, layout, marks=[] if layout in names else pytest.mark.nightly)
        for fusion, names in BY_DAY.items()
        for layout in LAYOUTS
    ],
)
def test_stages_on_two_ranks_are_those_of_one(folder, straight, fusion, layout):
    keys = ['model.fusion={name="cross_attention"}', "data.one_token_an_image=true"]
    keys = keys if fusion == "cross_attention" else []
    name = f"run.name={fusion}-{layout}"
    alone, one = train(folder, f"{name}-one", *keys) if keys else straight
    lines, two = train(folder, "--nproc", "2", name, *LAYOUTS[layout], *keys)

    for found, wanted in zip(curve(lines), curve(alone), strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)
    frozen, thawed = weights(two, 3), weights(two, 4)
    assert all(torch.equal(frozen[key], tensor) for key, tensor in weights(two, 1).items() if ".encoder." in key)
    assert any(not torch.equal(frozen[key], thawed[key]) for key in frozen if "model.vision.encoder." in key)
    assert torch.equal(frozen["model.embed.weight"], weights(one, 3)["model.embed.weight"])


def test_stages_on_two_ranks_resume_at_a_border_bit_identical(folder):
    settings = ("train.batch_size=2", "train.precision=bf16", SELDOM)
    lines, run = train(folder, "--nproc", "2", "run.name=sharded", *settings)
    resume = f"checkpoint.resume={checkpoint(run, 3)}"
    again, resumed = train(folder, "--nproc", "2", "run.name=sharded-again", *settings, resume)

    assert curve(again) == curve(lines)[3:]
    wanted, found = weights(run, 8), weights(resumed, 8)
    assert all(torch.equal(wanted[key], found[key]) for key in wanted)


def test_a_frozen_encoder_is_in_checkpoints_once(folder):
    settings = ("model.freeze_encoder=true", "phases=[]", 'checkpoint.frozen="once"', "train.steps=3")
    _, run = train(folder, "run.name=once", *settings)
    files = [checkpoint(run, step) / "frozen" / "__0_0.distcp" for step in (1, 2, 3)]

    assert len({one.stat().st_ino for one in files}) == 1
    first, last = weights(run, 1), weights(run, 3)
    assert sum(".encoder." in key for key in last) > 10
    assert all(torch.equal(first[key], last[key]) for key in last if ".encoder." in key)


def looked(model):
    """What the encoder and the connector give to what comes after them, and the gradients of a backward."""
    given = {}
    for part in ("encoder", "connector"):
        getattr(model.vision, part).register_forward_hook(
            lambda *call, part=part: given.__setitem__(part, call[-1]), always_call=True
        )
    batch = {**entries("joint_decoder", "tItt"), "pixels": images(1)}
    tokens = torch.zeros(batch["image_slots"].shape, dtype=torch.int64)
    model(tokens, **batch).sum().backward()
    return given


def test_a_frozen_encoder_keeps_nothing_until_it_is_thawed(make_model):
    model = make_model().train()
    encoder = {name for name, _ in model.named_parameters() if name.startswith("vision.encoder.")}
    model.set_frozen(encoder)
    model.train()
    given = looked(model)

    assert not model.vision.encoder.training
    assert not given["encoder"].requires_grad
    assert given["connector"].requires_grad
    assert all(one.grad is None for one in model.vision.encoder.parameters())
    assert all(one.grad is not None for one in model.vision.connector.parameters())

    model.set_frozen(())
    given = looked(model)
    assert model.vision.encoder.training
    assert given["encoder"].requires_grad
    assert all(one.grad is not None for one in model.vision.encoder.parameters())


def test_no_gradient_comes_to_a_frozen_connector_unless_the_encoder_needs_it(make_model):
    model = make_model().train()
    names = [name for name, _ in model.named_parameters()]
    model.set_frozen({name for name in names if name.startswith("vision.")})
    assert not looked(model)["connector"].requires_grad

    model.set_frozen({name for name in names if name.startswith("vision.connector.")})
    assert looked(model)["connector"].requires_grad
    assert all(one.grad is not None for one in model.vision.encoder.parameters())


def test_an_encoder_frozen_in_part_is_trained(make_model):
    model = make_model().train()
    model.set_frozen({next(name for name, _ in model.named_parameters() if name.startswith("vision.encoder."))})
    assert looked(model)["encoder"].requires_grad
    assert model.vision.encoder.training


@pytest.mark.slow
def test_the_demo_in_a_pipeline_of_shards_has_the_curve_of_one_process(tmp_path, monkeypatch):
    """The file itself and its warm start, with stages of five steps each."""
    configs = Path(__file__).parents[2] / "configs"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write_shapes(tmp_path / "shapes", train=512, held_out=1, seed=0)
    assert main(["run", str(configs / "vlm_text.toml"), "train.steps=5", "scheduler.warmup_steps=1"]) == 0
    stages = 'phases=[{at=1, train=["@vision"]}, {at=6, lr_scale={"@vision"=0.5}}]'
    short = ["train.steps=10", "scheduler.warmup_steps=2", "metrics.interval=1", "evaluations=[]", stages]
    sharded = ["--nproc", "4", "parallel.pp=2", "train.batch_size=4", "train.grad_accumulation=2"]
    curves = []
    for name, layout in (("one", ["train.batch_size=16"]), ("four", sharded)):
        job = ["run", str(configs / "vlm_demo.toml"), f"run.name={name}", *layout, *short]
        done = fork_server.run(
            [sys.executable, "-m", "forge_core", *job], capture_output=True, text=True, timeout=200, cwd=tmp_path
        )
        assert done.returncode == 0, done.stdout + done.stderr
        lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        curves.append([json.loads(line) for line in lines])

    for key in ("loss", "grad_norm"):
        one, four = ([line[key] for line in curve] for curve in curves)
        assert len(one) == 10
        assert four == pytest.approx(one, rel=1e-5), key
