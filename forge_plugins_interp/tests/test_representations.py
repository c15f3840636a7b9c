"""The evaluation ``representations``: the same in every layout, and after a resume."""

from __future__ import annotations

import json
import os
import sys

import pytest

import fork_server
from forge_core.cli import main

EVALUATION = """
[[evaluations]]
name = "representations"
interval = 2
samples = 7
sites = ["embed", "blocks.*.resid_post"]
metric = { name = "cka", debiased = false }
[checkpoint]
interval = 2
"""


def train(folder, name, *more):
    command = [sys.executable, "-m", "forge_core", "run", "job.toml", f"run.name={name}", *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = fork_server.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = map(json.loads, (folder / "runs" / name / "metrics.jsonl").read_text().splitlines())
    prefix = "eval/representations/"
    found = {
        line["step"]: {key.removeprefix(prefix): value for key, value in line.items() if key.startswith(prefix)}
        for line in lines
    }
    return {step: values for step, values in found.items() if values}


@pytest.fixture(scope="module")
def folder(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("representations")
    text = (run.parent.parent / "job.toml").read_text().replace(f"{run.parent}", f"{folder}/runs")
    (folder / "job.toml").write_text(text.replace("steps = 2", "steps = 6") + EVALUATION)
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    return train(folder, "alone")


def test_layers_are_compared_with_the_first_evaluation(alone):
    assert list(alone) == [2, 4, 6]
    assert set(alone[2]) == {"embed", "blocks.0.resid_post", "blocks.1.resid_post"}
    assert all(value == pytest.approx(1, abs=1e-6) for value in alone[2].values())
    assert max(alone[step][site] for step in (4, 6) for site in alone[2]) < 1 - 1e-4


def test_a_site_that_the_model_lacks_is_refused_before_the_first_step(folder, capsys):
    given = [str(folder / "job.toml"), "run.name=wrong", "evaluations.0.label=layers", "evaluations.0.interval=0"]

    assert main(["run", *given, "--dry-run", "evaluations.0.sites=['embed', 'blocks.*.resid_pots']"]) == 2

    said = capsys.readouterr().err
    assert "evaluations layers: site 'blocks.*.resid_pots': the model has none of that name; did you mean" in said


def test_data_with_too_few_samples_are_refused_before_the_first_step(folder, capsys):
    """It ended the run after its last step."""
    (folder / "few").mkdir(exist_ok=True)
    (folder / "few" / "a.txt").write_text("few " * 12)
    given = [str(folder / "job.toml"), "run.name=few", "evaluations.0.metric={name='cka'}", "train.seq_len=16"]
    data = f'evaluations.0.data={{name="text_files", path="{folder}/few", pattern="*.txt"}}'

    assert main(["run", *given, "--dry-run", data]) == 2

    assert "evaluations representations: cka needs at least 4 samples, and its data have 3" in capsys.readouterr().err


def test_a_site_that_the_model_lacks_is_refused_before_anything_is_measured(folder, alone, capsys):
    assert main(["eval", str(folder / "runs" / "alone"), "evaluations.0.sites=['embed', 'blocks.*.resid_pots']"]) == 2

    assert "evaluations representations: site 'blocks.*.resid_pots': the model has none" in capsys.readouterr().err


def test_a_site_that_one_stage_alone_refuses_is_refused_by_all(folder):
    """The other one waited for it in the next evaluation."""
    layout = ["--nproc", "2", "parallel.pp=2", "train.grad_accumulation=2", "run.first_step_timeout=20"]
    hidden = '{name="representations", sites=["blocks.0.attn_head_out"]}'
    more = [
        f'evaluations=[{hidden}, {{name="representations", label="b", sites=["embed"]}}]',
        "parallel.passes.lora={}",
    ]
    command = [sys.executable, "-m", "forge_core", "run", "job.toml", "run.name=hidden", "--dry-run", *layout, *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = fork_server.run(command, cwd=folder, env=environment, capture_output=True, text=True)

    assert done.returncode == 2, done.stderr
    assert "evaluations representations: site blocks.0.attn_head_out: an adapter adds to" in done.stderr


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(["parallel.dp_shard=2", "train.batch_size=1"], marks=pytest.mark.nightly),
        pytest.param(["parallel.tp=2"], marks=pytest.mark.nightly),
        ["parallel.pp=2", "train.grad_accumulation=2", "train.batch_size=1"],
    ],
    ids=["fsdp2", "tp2", "pp2"],
)
def test_every_layout_gives_the_same(folder, alone, layout, request):
    found = train(folder, request.node.callspec.id, "--nproc", "2", *layout)

    assert list(found) == list(alone)
    for step, values in alone.items():
        assert found[step] == pytest.approx(values, abs=1e-4), step


def test_a_resumed_run_compares_with_the_same_values(folder, alone):
    train(folder, "resumed", "train.steps=4", "scheduler={name='constant'}")
    found = train(folder, "resumed")

    assert found[6] == pytest.approx(alone[6], abs=1e-6)


def test_other_sites_need_another_label(folder, alone):
    command = [sys.executable, "-m", "forge_core", "run", "job.toml", "run.name=alone", "train.steps=8"]
    other = ['evaluations=[{name="representations", sites=["embed"], interval=2}]']
    done = fork_server.run([*command, *other], cwd=folder, capture_output=True, text=True)

    assert done.returncode == 2
    assert "the first evaluation of this run had other sites (blocks.0.resid_post)" in done.stderr
