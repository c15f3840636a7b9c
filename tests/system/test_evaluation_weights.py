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
from forge_core.loading import load_model
from forge_core.registry.discovery import discover
from parity_matrix.cells import CELLS
from parity_matrix.launch import JOB, Launcher, Work

pytestmark = pytest.mark.slow
SCHEDULE_FREE = 'optimizer={name="schedule_free_adamw", lr=1e-2}'
OFTEN = [SCHEDULE_FREE, "scheduler.name=constant", "eval.interval=2"]
LAYOUTS = ("fsdp2", "tp2", "pp2-1f1b")
RESUMED = [("plain", "fsdp2"), ("fsdp2", "tp2"), ("fsdp2", "fsdp2")]


def layout_of(name):
    return (1, []) if name == "plain" else (CELLS[name].ranks, [*CELLS[name].layout])


def work(name, layout, *settings, **more):
    ranks, words = layout_of(layout)
    return Work(name, ranks, [*OFTEN, *words, *settings], **more)


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    return Launcher(tmp_path_factory.mktemp("averages"))


@pytest.fixture(scope="module")
def said(launcher):
    """All runs of this file, in one launch; the words of rank 0."""
    works = [work(name, name, "checkpoint.interval=5") for name in ("plain", *LAYOUTS)]
    works += [work(f"{name}-unevaluated", name, "eval.interval=0") for name in ("plain", "fsdp2")]
    works += [work(f"{writer}-to-{reader}", reader, "train.steps=14", resumes=writer) for writer, reader in RESUMED]
    works += [work(f"longer-{name}", name, "train.steps=14") for name in ("plain", "fsdp2")]
    return launcher.launch(works)


def trained(launcher, name):
    return {line["step"]: line["loss"] for line in launcher.metrics(name) if "loss" in line}


def evaluated(launcher, name):
    return {line["step"]: line["eval/loss"] for line in launcher.metrics(name) if "eval/loss" in line}


def evaluate(launcher, name, capsys, *arguments):
    """The loss that ``forge eval`` finds in one process."""
    assert main(["eval", str(launcher.run_dir(name)), "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)["eval/loss"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_evaluates_the_averages_of_one_process(launcher, said, layout):
    found, expected = evaluated(launcher, layout), evaluated(launcher, "plain")

    assert [*found] == [2, 4, 6, 8, 10]
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["plain", "fsdp2"])
def test_training_does_not_notice_that_it_is_evaluated(launcher, said, name):
    """Bit for bit. FSDP keeps the root's parameters gathered after an evaluation, with the values of then."""
    assert trained(launcher, name) == trained(launcher, f"{name}-unevaluated")


@pytest.mark.parametrize("name", ["plain", *LAYOUTS])
def test_a_checkpoint_is_evaluated_with_the_averages_that_its_run_has_evaluated(
    launcher, said, name, capsys, monkeypatch
):
    monkeypatch.chdir(launcher.run_dir(name).parent.parent)  # where its data are
    in_run = evaluated(launcher, name)[10]

    by_default = evaluate(launcher, name, capsys)
    averages = evaluate(launcher, name, capsys, "--weights", "evaluation")
    training = evaluate(launcher, name, capsys, "--weights=training")

    assert by_default == pytest.approx(in_run, rel=1e-6)
    assert averages == by_default
    assert abs(training - in_run) > 1e-3


@pytest.mark.parametrize("name", ["fsdp2", "tp2"])
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

    assert loss(averaged) == pytest.approx(evaluated(launcher, name)[10], rel=1e-6)
    assert not math.isclose(loss(trained_ones), loss(averaged), rel_tol=1e-3)


def test_several_processes_read_them_too(launcher, said, monkeypatch):
    monkeypatch.chdir(launcher.run_dir("tp2").parent.parent)
    command = [sys.executable, "-m", "forge_core", "eval", str(launcher.run_dir("tp2")), "--nproc", "2", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = {}
    for weights in ("evaluation", "training"):
        done = fork_server.run(
            [*command, "--weights", weights], env=environment, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr
        found[weights] = json.loads(done.stdout)["eval/loss"]

    assert found["evaluation"] == pytest.approx(evaluated(launcher, "tp2")[10], rel=1e-6)
    assert abs(found["training"] - found["evaluation"]) > 1e-3


def test_sampling_reads_them_too(launcher, said, monkeypatch, capsys):
    """It would go on with other words: the likeliest ones of two models."""
    monkeypatch.chdir(launcher.run_dir("fsdp2").parent.parent)
    texts = {}
    for weights in ([], ["--weights=evaluation"], ["--weights=training"]):
        arguments = ["generate", str(launcher.run_dir("fsdp2")), "--prompt=line 1", "--temperature=0"]
        assert main([*arguments, "--max-new-tokens=40", *weights]) == 0
        texts["".join(weights)] = capsys.readouterr().out

    assert texts[""] == texts["--weights=evaluation"] != texts["--weights=training"]


def test_a_run_may_begin_with_averages(launcher, said, monkeypatch, capsys):
    """Their first evaluation, with a learning rate of next to nothing, is the last one of theirs."""
    monkeypatch.chdir(launcher.run_dir("fsdp2").parent.parent)
    load = f'checkpoint.load={{path="{launcher.run_dir("fsdp2")}", include=["evaluation.*"]}}'
    settings = [
        "run.name=begun",
        "callbacks=[]",
        load,
        "scheduler.warmup_steps=0",
        "optimizer.lr=1e-30",
        "train.steps=1",
        "eval.interval=1",
    ]

    assert main(["run", str(JOB), *settings]) == 0

    assert evaluated(launcher, "begun")[1] == pytest.approx(evaluated(launcher, "fsdp2")[10], rel=1e-6)


@pytest.mark.parametrize(("writer", "reader"), RESUMED)
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(launcher, said, writer, reader):
    name = f"{writer}-to-{reader}"
    of_one = "longer-fsdp2" if writer == reader else "longer-plain"
    for values in (trained, evaluated):
        found = {step: loss for step, loss in values(launcher, name).items() if step > 10}
        expected = {step: loss for step, loss in values(launcher, of_one).items() if step > 10}
        if writer == reader:
            assert found == expected
        else:
            assert found == pytest.approx(expected, rel=1e-5)
