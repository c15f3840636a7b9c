"""``forge trace``: two runs of one job part where they do, and nowhere else."""

from __future__ import annotations

import csv
import os
import sys

import pytest
import torch

import fork_server
from forge_core.cli import main
from forge_core.config.builder import ComponentBuilder
from forge_core.errors import ConfigError
from forge_core.registry.discovery import discover
from forge_plugins_interp.fingerprint import Fingerprint, difference
from forge_plugins_interp.trace_comparison import read_trace

FAULT = """
from forge_core.api import Component, hookimpl

FORGE_API = "1.1"


@hookimpl
def forge_callbacks():
    yield Component(name="fault", summary="a fault", factory="faulty.callback:Fault", config="faulty.config:Config")
"""
CALLBACK = """
from forge_core.contracts.callback import Callback


class Fault(Callback):
    '''Of one tensor-parallel rank, the gradient at one layer is too large.'''

    def __init__(self, config, /): ...

    def run_start(self, run):
        if run.rank == 1:
            output = run.parts[0].blocks["1"].attention.o
            output.register_full_backward_pre_hook(lambda module, gradients: (gradients[0] * 1.05,))
"""
CONFIG = """
import attrs


@attrs.frozen(kw_only=True)
class Config:
    pass
"""


@pytest.fixture(scope="module")
def job(run):
    """A file of the job of ``run``, of four microbatches a step."""
    path = run.parent.parent / "traced.toml"
    text = (run.parent.parent / "job.toml").read_text()
    text = text.replace("batch_size = 2", "batch_size = 1\ngrad_accumulation = 4")
    path.write_text(text.replace("steps = 2", "steps = 6"))
    return path


def trace(job, out, *more, path=""):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(path)}
    command = [sys.executable, "-m", "forge_core", "trace", str(job), "--out", str(out), *more]
    done = fork_server.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def alone(job, tmp_path_factory):
    return trace(job, tmp_path_factory.mktemp("trace") / "alone")


def test_a_trace_has_everything_of_a_step_in_the_order_of_computation(alone):
    lines = [line for line in read_trace(alone) if line["step"] == 2]

    kinds = list(dict.fromkeys(line["kind"] for line in lines))
    assert kinds == ["site", "site_gradient", "gradient", "update"]
    sites = [line["name"] for line in lines if line["kind"] == "site"]
    assert sites.index("embed") < sites.index("blocks.0.z") < sites.index("blocks.1.z") < sites.index("logits")
    assert [line["name"] for line in lines if line["kind"] == "site_gradient"] == sites[::-1]
    updates = {line["name"]: line for line in lines if line["kind"] == "update"}
    assert updates["blocks.1.attention.q.weight"]["shape"] == [32, 32]
    assert {line["step"] for line in read_trace(alone)} == {1, 2, 3}
    elements = {line["name"]: line["elements"] for line in lines if line["kind"] == "site"}
    assert elements["blocks.0.resid_post"] == 4 * 32 * 32  # all samples of the step


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(["parallel.tp=2"], marks=pytest.mark.nightly),
        pytest.param(["train.grad_accumulation=2"], marks=pytest.mark.nightly),
        ["parallel.cp=2"],
        [
            *("parallel.pp=2", "parallel.passes.pipeline.schedule=custom", "train.batch_size=2"),
            *("train.grad_accumulation=2", 'parallel.passes.pipeline.actions=["1F0 1F1 1B1 1B0", "0F0 0F1 0B1 0B0"]'),
        ],
        pytest.param(
            ["parallel.tp=2", 'parallel.passes.activation_checkpointing.mode="full"'], marks=pytest.mark.nightly
        ),
    ],
    ids=["tp2", "fsdp2", "cp2", "pp2 reversed", "tp2 recomputed"],
)
def test_layouts_agree(job, alone, tmp_path, capsys, layout):
    other = trace(job, tmp_path / "other", "--nproc", "2", *layout)

    assert main(["trace", "--compare", str(alone), str(other), "--tolerance", "1e-4"]) == 0
    assert "things of 3 steps agree to 0.0001" in capsys.readouterr().out
    of_alone, of_other = ([(line["kind"], line["name"]) for line in read_trace(one)] for one in (alone, other))
    hidden = "logits" if "parallel.tp=2" in layout else ""  # each rank has them of a part of the vocabulary
    assert of_other == [one for one in of_alone if one[1] != hidden], "in the order of computation"


def test_a_fault_in_the_gradient_of_one_layer_is_found_by_name(job, alone, tmp_path, capsys):
    package, facts = tmp_path / "plugin" / "faulty", tmp_path / "plugin" / "faulty-1.0.dist-info"
    package.mkdir(parents=True)
    facts.mkdir()
    for name, text in {"__init__": "", "plugin": FAULT, "callback": CALLBACK, "config": CONFIG}.items():
        (package / f"{name}.py").write_text(text)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[forge.v1]\nfaulty = faulty.plugin\n")
    out = tmp_path / "faulty.png"

    fault = ["parallel.tp=2", 'callbacks=[{name="faulty:fault"}]']
    other = trace(job, tmp_path / "other", "--nproc", "2", "--steps", "1..2", *fault, path=package.parent)

    assert main(["trace", "--compare", str(alone), str(other), "--out", str(out)]) == 1
    assert "they part at step 1: the gradient at site blocks.1.z differs by" in capsys.readouterr().out
    assert out.read_bytes().startswith(b"\x89PNG")
    with out.with_suffix(".csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    first = [row for row in rows if row["step"] == "1"]
    assert all(float(row["difference"]) < 1e-5 for row in first if row["kind"] == "site" and row["name"] != "logits")
    parted = [row["name"] for row in first if row["kind"] == "gradient" and float(row["difference"]) > 1e-3]
    assert "head.weight" not in parted
    assert "blocks.0.attention.q.weight" in parted


def test_a_fingerprint_is_of_samples_in_any_order_and_parts():
    value = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0))
    whole = Fingerprint.of("site", value, 0)
    parts = Fingerprint.of("site", value[[4, 1, 3]], 0) + Fingerprint.of("site", value[[5, 0, 2]], 0)

    assert difference(whole.table(), parts.table()) < 1e-12
    assert whole.table()["norm"] == pytest.approx(float(value.double().norm()))
    assert whole.table()["mean"] == pytest.approx(float(value.double().mean()))
    swapped = Fingerprint.of("site", value.flip(1), 0)
    assert difference(whole.table(), swapped.table()) > 1e-2
    assert difference(whole.table(), Fingerprint.of("site", value[:, :4], 0).table()) == float("inf")
    broken = value.clone()
    broken[0, 0, 0] = float("nan")
    assert difference(whole.table(), Fingerprint.of("site", broken, 0).table()) == float("inf")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["JOB"], "--out is missing"),
        ([], "CONFIG is missing"),
        (["JOB", "--out", "x", "--steps", "a"], "--steps a: must be a step or two, such as 1..3"),
        (["JOB", "--out", "x", "--steps", "3..2"], "--steps 3..2: must count from 1, and not end before it begins"),
        (["JOB", "--out", "x", "--steps", "9"], "--steps: 9 is after the last step, train.steps = 6"),
        (["--compare", "nowhere", "other"], "nowhere has no trace.jsonl"),
        (["JOB", "--compare", "a", "b"], "traced.toml: has no effect with --compare"),
        (["--compare", "a", "b", "--huggingface", "f"], "--huggingface f: has no effect with --compare"),
        (["--compare", "a", "b", "--steps", "1..2"], "--steps 1..2: has no effect with --compare"),
        (["--compare", "a", "b", "--sites", "embed"], "--sites embed: has no effect with --compare"),
        (["--compare", "a", "b", "--nproc", "2"], "--nproc 2: has no effect with --compare"),
        (["JOB", "--out", "x", "--tolerance", "0"], "--tolerance 0: has no effect without --compare"),
        (["--compare", "a", "b", "--out", "a.pdf"], "--out a.pdf: must end with .csv or .png"),
    ],
)
def test_bad_input_is_a_sentence(job, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)

    assert main(["trace", *(str(job) if word == "JOB" else word for word in arguments)]) == 2

    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "x").exists()


def test_a_folder_with_files_in_it_is_kept(job, tmp_path, capsys):
    (tmp_path / "mine").write_text("mine")

    assert main(["trace", str(job), "--out", str(tmp_path)]) == 2

    assert "is a file or has files in it; give a folder that is empty or new" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_file_is_no_folder_of_a_trace_and_holds_none(job, tmp_path, capsys):
    (tmp_path / "mine").write_text("mine")

    assert main(["trace", str(job), "--out", str(tmp_path / "mine")]) == 2
    assert "mine: is a file or has files in it; give a folder that is empty or new" in capsys.readouterr().err
    assert main(["trace", str(job), "--out", str(tmp_path / "mine" / "trace")]) == 2
    assert "mine/trace: Not a directory" in capsys.readouterr().err


def test_a_file_is_no_folder_of_the_callback_either(job, tmp_path, capsys):
    """It was called a bug in Forge."""
    (tmp_path / "mine").write_text("mine")
    callback = f'callbacks=[{{name="trace", out="{tmp_path}/mine"}}]'

    assert main(["run", str(job), f"run.dir={tmp_path}/runs", callback]) == 2

    assert f"out = '{tmp_path}/mine': cannot write {tmp_path}/mine/trace.jsonl: File exists" in capsys.readouterr().err


def test_a_site_that_is_not_there_is_a_sentence(job, tmp_path):
    command = [
        sys.executable,
        "-m",
        "forge_core",
        "trace",
        str(job),
        "--out",
        str(tmp_path),
        "--sites",
        "blocks.0.resid",
    ]
    done = fork_server.run(command, capture_output=True, text=True)

    assert done.returncode == 2
    assert not tmp_path.exists()  # nothing is left of it
    assert "site 'blocks.0.resid': the model has none of that name; did you mean 'blocks.0.resid_pre'" in done.stderr


def test_steps_that_end_before_they_begin_are_refused_by_their_key():
    with pytest.raises(ConfigError, match=r"callback\.last: must not be before first = 3, got 2"):
        ComponentBuilder(discover()).resolve("callback", {"name": "trace", "out": "x", "first": 3, "last": 2})
