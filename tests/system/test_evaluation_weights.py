"""Averages are evaluated in place of trained weights: by the run, by ``forge eval``, and from a checkpoint alone."""

import json
import math
import os
import sys

import numpy as np
import pytest
import torch
from torch import nn

import fork_server
from forge_core.checkpoint.store import find_checkpoint
from forge_core.cli import main
from forge_core.config.builder import ComponentBuilder
from forge_core.registry.discovery import discover
from forge_plugins_optim.config import EMAConfig
from forge_plugins_weights.loading import load_model
from parity_matrix.cells import CELLS
from parity_matrix.launch import JOB, Launcher, Work

pytestmark = pytest.mark.slow
SCHEDULE_FREE = 'optimizer={name="schedule_free_adamw", lr=3e-3}'
EMA = 'callbacks=[{name="parity_probe"}, {name="ema", decay=0.7, warm_up=true}]'
"""Of a decay with which averages and weights are far from each other after a few steps."""
KINDS = {"schedule-free": SCHEDULE_FREE, "ema": EMA}
STEPS, MORE = 4, 6
"""Of a run, and of one that goes on with it; it is evaluated at every second."""
OFTEN = ["scheduler.name=constant", "eval.interval=2", f"train.steps={STEPS}", "model.n_layers=2"]
LAYOUTS = ("fsdp2", "tp2", "pp2-1f1b")
RESUMED = [("plain", "fsdp2"), ("fsdp2", "tp2"), ("fsdp2", "fsdp2"), ("tp2", "pp2-1f1b")]
BY_DAY = {
    *("schedule-free-plain", "schedule-free-fsdp2", "schedule-free-pp2-1f1b"),
    *("ema-plain", "ema-fsdp2", "ema-tp2"),
    *("schedule-free-fsdp2-unevaluated", "ema-plain-unevaluated"),
    *("schedule-free-plain-to-fsdp2", "schedule-free-longer-plain", "ema-fsdp2-to-fsdp2", "ema-longer-fsdp2"),
}
"""Runs: of each kind one process and two layouts, so that each layout is there once, and one that is resumed."""


def by_day_or_night(names):
    """For ``parametrize``: runs by their names."""
    return [pytest.param(name, marks=[] if name in BY_DAY else pytest.mark.nightly) for name in names]


def work(kind, name, layout, *settings, resumes=None):
    ranks, words = (1, []) if layout == "plain" else (CELLS[layout].ranks, CELLS[layout].layout)
    before = None if resumes is None else f"{kind}-{resumes}"
    return Work(f"{kind}-{name}", ranks, [*OFTEN, KINDS[kind], *words, *settings], resumes=before)


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    return Launcher(tmp_path_factory.mktemp("averages"))


@pytest.fixture(scope="module")
def said(request, launcher):
    """All runs of this file, or those of the day, in one launch; the words of rank 0."""
    works = []
    for kind in KINDS:
        works += [work(kind, name, name, "checkpoint.interval=2") for name in ("plain", *LAYOUTS)]
        works += [work(kind, f"{name}-unevaluated", name, "eval.interval=0") for name in ("plain", "fsdp2")]
        works += [
            work(kind, f"{writer}-to-{reader}", reader, f"train.steps={MORE}", resumes=writer)
            for writer, reader in RESUMED
        ]
        works += [work(kind, f"longer-{name}", name, f"train.steps={MORE}") for name in ("plain", "fsdp2")]
    items = [item for item in request.session.items if item.path == request.path]
    is_night = any(item.get_closest_marker("nightly") for item in items)
    return launcher.launch([work for work in works if is_night or work.name in BY_DAY])


def trained(launcher, name):
    return {line["step"]: line["loss"] for line in launcher.metrics(name) if "loss" in line}


def evaluated(launcher, name):
    return {line["step"]: line["eval/loss"] for line in launcher.metrics(name) if "eval/loss" in line}


def evaluate(launcher, name, capsys, *arguments):
    """The loss that ``forge eval`` finds in one process."""
    assert main(["eval", str(launcher.run_dir(name)), "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)["eval/loss"]


@pytest.mark.parametrize("name", by_day_or_night(f"{kind}-{layout}" for kind in KINDS for layout in LAYOUTS))
def test_every_layout_evaluates_the_averages_of_one_process(launcher, said, name):
    kind = next(kind for kind in KINDS if name.startswith(kind))
    found, expected = evaluated(launcher, name), evaluated(launcher, f"{kind}-plain")

    assert [*found] == [2, STEPS]
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "name", by_day_or_night(f"{kind}-{layout}-unevaluated" for kind in KINDS for layout in ("plain", "fsdp2"))
)
def test_training_does_not_notice_that_it_is_evaluated(launcher, said, name):
    """Bit for bit. FSDP keeps the root's parameters gathered after an evaluation, with the values of then."""
    assert trained(launcher, name.removesuffix("-unevaluated")) == trained(launcher, name)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("schedule-free-pp2-1f1b", "ema-tp2") else pytest.mark.nightly)
        for name in (f"{kind}-{layout}" for kind in KINDS for layout in ("plain", *LAYOUTS))
    ],
)
def test_a_checkpoint_is_evaluated_with_the_averages_that_its_run_has_evaluated(
    launcher, said, name, capsys, monkeypatch
):
    monkeypatch.chdir(launcher.run_dir(name).parent.parent)  # where its data are
    in_run = evaluated(launcher, name)[STEPS]

    by_default = evaluate(launcher, name, capsys)
    averages = evaluate(launcher, name, capsys, "--weights", "evaluation")
    training = evaluate(launcher, name, capsys, "--weights=training")

    assert by_default == pytest.approx(in_run, rel=1e-6)
    assert averages == by_default
    assert abs(training - in_run) > 1e-3


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("schedule-free-fsdp2", "ema-tp2") else pytest.mark.nightly)
        for name in (f"{kind}-{layout}" for kind in KINDS for layout in ("fsdp2", "tp2"))
    ],
)
def test_a_model_that_is_loaded_has_them(launcher, said, name, monkeypatch):
    """Its loss on the held-out data is that of the run; what a model is exported from is this one."""
    monkeypatch.chdir(launcher.run_dir(name).parent.parent)
    checkpoint = find_checkpoint(launcher.run_dir(name), print)
    averaged, trained_ones = (
        load_model(checkpoint, lambda disabled: discover(), torch.device("cpu"), None, weights)
        for weights in (None, "training")
    )

    def loss(loaded):
        job = loaded.job
        source = ComponentBuilder(discover())(job.data, seq_len=job.train.seq_len, split="validation")
        batch = source.read(np.arange(len(source)))
        tokens, targets = (torch.as_tensor(batch[key]).long() for key in ("tokens", "targets"))
        with torch.no_grad():
            logits = loaded.model.eval()(tokens)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100).item()

    assert loss(averaged) == pytest.approx(evaluated(launcher, name)[STEPS], rel=1e-6)
    assert not math.isclose(loss(trained_ones), loss(averaged), rel_tol=1e-3)


def test_several_processes_read_them_too(launcher, said, monkeypatch):
    monkeypatch.chdir(launcher.run_dir("ema-tp2").parent.parent)
    command = [sys.executable, "-m", "forge_core", "eval", str(launcher.run_dir("ema-tp2")), "--nproc", "2", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = {}
    for weights in ("evaluation", "training"):
        done = fork_server.run(
            [*command, "--weights", weights], env=environment, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr
        found[weights] = json.loads(done.stdout)["eval/loss"]

    assert found["evaluation"] == pytest.approx(evaluated(launcher, "ema-tp2")[STEPS], rel=1e-6)
    assert abs(found["training"] - found["evaluation"]) > 1e-3


def test_sampling_reads_them_too(launcher, said, monkeypatch, capsys):
    """It would go on with other words: the likeliest ones of two models."""
    monkeypatch.chdir(launcher.run_dir("schedule-free-fsdp2").parent.parent)
    texts = {}
    for weights in ([], ["--weights=evaluation"], ["--weights=training"]):
        arguments = ["generate", str(launcher.run_dir("schedule-free-fsdp2")), "--prompt=line 1", "--temperature=0"]
        assert main([*arguments, "--max-new-tokens=40", *weights]) == 0
        texts["".join(weights)] = capsys.readouterr().out

    assert texts[""] == texts["--weights=evaluation"] != texts["--weights=training"]


def test_a_run_may_begin_with_averages(launcher, said, monkeypatch, capsys):
    """Their first evaluation, with a learning rate of next to nothing, is the last one of theirs."""
    monkeypatch.chdir(launcher.run_dir("schedule-free-fsdp2").parent.parent)
    load = f'checkpoint.load={{path="{launcher.run_dir("schedule-free-fsdp2")}", include=["evaluation.*"]}}'
    settings = [
        "run.name=begun",
        "model.n_layers=2",
        "callbacks=[]",
        load,
        "scheduler.warmup_steps=0",
        "optimizer.lr=1e-30",
        "train.steps=1",
        "eval.interval=1",
    ]

    assert main(["run", str(JOB), *settings]) == 0

    assert evaluated(launcher, "begun")[1] == pytest.approx(evaluated(launcher, "schedule-free-fsdp2")[STEPS], rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "writer", "reader"),
    [
        pytest.param(kind, *pair, marks=[] if f"{kind}-{'-to-'.join(pair)}" in BY_DAY else pytest.mark.nightly)
        for kind in KINDS
        for pair in RESUMED
    ],
)
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(launcher, said, kind, writer, reader):
    found, expected = f"{kind}-{writer}-to-{reader}", f"{kind}-longer-{'fsdp2' if writer == reader else 'plain'}"

    for values in (trained, evaluated):
        one, other = (
            {step: loss for step, loss in values(launcher, name).items() if step > STEPS} for name in (found, expected)
        )
        assert one == (other if writer == reader else pytest.approx(other, rel=1e-5))


def test_the_average_of_a_resumed_run_is_the_same_bits(launcher, said):
    found, expected = launcher.saved("ema-fsdp2-to-fsdp2"), launcher.saved("ema-longer-fsdp2")

    averages = [key for key in expected if key.startswith("plugin.forge-plugins-optim.callback.ema.")]
    assert len(averages) == 1 + sum(key.startswith("evaluation.") for key in expected)
    for key in averages:
        assert torch.equal(found[key], expected[key])


def test_an_average_of_some_parameters_is_evaluated_with_the_others_as_they_are_trained(tiny, capsys):
    """Matrices alone have one; half of them are frozen at first, and are their own average until then."""
    groups = f'[{{roles=["matrix"], {SCHEDULE_FREE}}}, {{optimizer={{name="lion", lr=1e-3}}}}]'
    settings = [f'optimizer={{name="grouped", groups={groups}}}', "eval.interval=5", "checkpoint.interval=5"]
    frozen = 'phases=[{at=1, train=["embed.*", "head.*", "blocks.0.*"]}, {at=7}]'
    lines = tiny.completed("run.name=some", *settings, frozen)
    losses = [line["eval/loss"] for line in lines if "eval/loss" in line]

    assert len(losses) == 2
    for step, in_run in zip((5, 10), losses, strict=True):
        checkpoint = find_checkpoint(tiny.path("some") / "checkpoints" / f"step_{step:08d}", print)
        assert main(["eval", str(checkpoint.path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["eval/loss"] == in_run
        averaged = {key for key in checkpoint.saved_tensors() if key.startswith("evaluation.")}
        assert "evaluation.blocks.1.attention.q.weight" in averaged
        assert "evaluation.embed.weight" not in averaged


def test_two_averages_of_the_same_weights_are_refused_before_the_first_step(tiny, capfd, monkeypatch):
    """Also of components that validation knows nothing of."""
    monkeypatch.setattr(EMAConfig, "check", lambda self, job: iter(()))
    grouped = f"optimizer={{name='grouped', groups=[{{{SCHEDULE_FREE}}}]}}"
    both = [grouped, 'callbacks=[{name="ema"}]']

    assert main(["run", str(tiny.config), *both]) == 2

    said = capfd.readouterr().err
    assert "optimizer 'grouped' of forge-plugins-optim" in said
    assert "and plugin.forge-plugins-optim.callback.ema both have weights to be evaluated in place of embed." in said
    assert tiny.metrics() == []


def test_a_run_that_is_resumed_with_an_average_begins_it_there(tiny, capfd):
    tiny.completed("train.steps=4")
    average = 'callbacks=[{name="ema", decay=0.5}]'

    tiny.completed("train.steps=6", average)
    said = capfd.readouterr().out
    tiny.completed("train.steps=8")

    assert "tensors of callbacks that the checkpoint does not have, which begin anew: plugin.forge-plugins-" in said
    assert "tensors of callbacks that the checkpoint has alone; they are dropped: plugin." in capfd.readouterr().out
    saved = {step: find_checkpoint(tiny.path() / "checkpoints" / f"step_{step:08d}", print) for step in (6, 8)}
    keys = {step: {key.partition(".")[0] for key in one.saved_tensors()} for step, one in saved.items()}
    assert keys == {6: {"model", "optimizer", "evaluation", "plugin"}, 8: {"model", "optimizer"}}
    updates = {"plugin.forge-plugins-optim.callback.ema.updates": torch.zeros((), dtype=torch.int64)}
    saved[6].load(updates)
    assert [one.item() for one in updates.values()] == [2]
