"""While a run trains, its checkpoints are written as folders of Hugging Face."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

import fork_server
from forge_core.checkpoint.store import open_checkpoint
from forge_core.cli import main
from forge_core.registry.discovery import discover
from forge_core.train.trainer import Trainer
from forge_plugins_hf import export_process
from forge_plugins_hf.export import _held
from forge_plugins_hf.export_process import ExportProcess
from forge_plugins_weights.loading import load_model
from forge_testing.callback import CallbackConformance
from parity_matrix.launch import Launcher, Work
from small_disk import small_disk

JOB = """
[model]
name = "transformer"
dim = 16
n_layers = 2
n_heads = 2
[data]
name = "text_files"
path = "a.txt"
tokenizer = "bytes"
[train]
steps = 6
seq_len = 16
precision = "fp32"
[optimizer]
name = "adamw"
lr = 1e-2
[checkpoint]
interval = 3
[run]
name = "r"
device = "cpu"
[[callbacks]]
name = "export"
"""
SETTINGS = [*("train.steps=3", "train.seq_len=16", "train.precision=fp32", "train.batch_size=2", "run.device=cpu")]
SETTINGS += ["data.name=text_files", "data.path=a.txt", "data.tokenizer=bytes", "optimizer.lr=1e-2", "eval.interval=0"]


@pytest.mark.usefixtures("forked_exports")
class TestExport(CallbackConformance):
    component = "forge-plugins-hf:export"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("".join(f"{n} and {n * n}. " for n in range(600)))
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path


@pytest.fixture
def forked_exports(monkeypatch):
    """Each export is ``forge convert`` in a fork; what stands between it and the run starts Python twice."""

    def start(command, *, env, **options):
        assert command[1:3] == ["-m", export_process.__name__]
        env = {name: value for name, value in env.items() if name != "CUDA_VISIBLE_DEVICES"}
        return fork_server.Popen(command[4:], env=env, **options)

    monkeypatch.setattr(export_process, "subprocess", SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL))


def told(run, *names):
    lines = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [(line["event"], line["step"]) for line in lines if line["event"] in names]


def exported(run):
    return [step for _, step in told(run, "exported")]


@torch.no_grad()
def refuse_difference(export, checkpoint):
    """transformers computes of the export what ours does of the checkpoint."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    ours = load_model(open_checkpoint(checkpoint), lambda _: discover(), torch.device("cpu"), None).model
    tokens = torch.arange(16)[None]
    torch.testing.assert_close(theirs(tokens).logits, ours(tokens), rtol=1e-5, atol=1e-5)


def content(path):
    return {one.name: one.read_bytes() for one in path.iterdir()}


@pytest.mark.usefixtures("forked_exports")
def test_each_checkpoint_becomes_a_folder_that_transformers_reads(folder, capfd):
    assert main(["run", "job.toml", "train.steps=3"]) == 0
    assert "exported runs/r/exports/step_00000003" in capfd.readouterr().out
    assert main(["run", "job.toml"]) == 0
    assert main(["run", "job.toml"]) == 0  # it is complete

    run = folder / "runs/r"
    assert exported(run) == [3, 6]
    assert sorted(one.name for one in (run / "exports").iterdir()) == ["step_00000003", "step_00000006"]
    for step in ("step_00000003", "step_00000006"):
        refuse_difference(run / "exports" / step, run / "checkpoints" / step)
    assert main(["convert", "runs/r", "--to", "huggingface", "--out", "again"]) == 0
    assert content(run / "exports" / "step_00000006") == content(folder / "again")
    assert not (run / ".exporting").exists()


@pytest.mark.usefixtures("forked_exports")
def test_adapters_are_folded_in_and_the_architecture_stays(folder):
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.Qwen2Config(
        **shape, vocab_size=257, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=None
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained("hf")
    assert main(["convert", "hf", "--to", "forge", "--out", "config", "--config-only"]) == 0
    more = ["parallel.passes.lora.rank=2", "callbacks=[{name='export'}]"]

    assert main(["run", "config/train.toml", *SETTINGS, *more]) == 0

    export = folder / "runs/config/exports/step_00000003"
    assert json.loads((export / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]
    assert not [name for name in content(export) if "adapter" in name]
    refuse_difference(export, folder / "runs/config/checkpoints/step_00000003")


@pytest.mark.nightly
def test_an_export_that_is_slower_than_saving_leaves_out_those_between(folder, capfd):
    """The first is exported though its checkpoint is removed meanwhile."""
    callback = "callbacks=[{name='export', keep_last=1, dtype='bf16', path='out'}]"

    assert main(["run", "job.toml", "checkpoint.interval=1", "checkpoint.keep_last=1", callback]) == 0

    run = folder / "runs/r"
    assert exported(run) == [1, 6]
    assert told(run, "export_skipped") == [("export_skipped", step) for step in range(2, 6)]
    assert "step 2 is not exported: the export before it takes too long" in capfd.readouterr().out
    assert told(run, "export_failed") == []
    assert not (run / "checkpoints" / "step_00000001").exists()
    for _ in range(100):  # removed beside what goes on
        if [one.name for one in (folder / "out/r").iterdir()] == ["step_00000006"]:
            break
        time.sleep(0.05)
    assert [one.name for one in (folder / "out/r").iterdir()] == ["step_00000006"]
    assert json.loads((folder / "out/r/step_00000006/config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.usefixtures("forked_exports")
def test_only_steps_of_the_interval_and_the_last_one_are_exported(folder, capfd):
    assert main(["run", "job.toml", "checkpoint.interval=2", "callbacks=[{name='export', interval=4}]"]) == 0
    assert exported(folder / "runs/r") == [4, 6]

    assert main(["validate", "job.toml", "callbacks=[{name='export', interval=4}]"]) == 2
    assert "must be a multiple of checkpoint.interval = 3, got 4" in capfd.readouterr().err


def test_what_a_kill_has_left_undone_is_done_by_the_next_start(folder, request):
    run = folder / "runs/r"
    long = ["train.steps=100000", "checkpoint.interval=50000"]
    long += ["checkpoint.powers_of_two_from=3", "checkpoint.powers_of_two_until=3"]
    process = fork_server.Popen(
        [sys.executable, "-m", "forge_core", "run", "job.toml", *long],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not list((run / ".exporting").glob("step_00000003.*/manifest.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not (run / "exports" / "step_00000003").exists()
    while [*processes_about(folder)] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [*processes_about(folder)] == []  # it does not outlive the run
    (run / "exports").mkdir(exist_ok=True)
    (run / "exports" / ".step_00000003.partial").mkdir(exist_ok=True)

    request.getfixturevalue("forked_exports")  # from here on: whose process was not to outlive the run was a real one
    assert main(["run", "job.toml"]) == 0

    assert exported(run) == [3, 6]
    assert sorted(one.name for one in (run / "exports").iterdir()) == ["step_00000003", "step_00000006"]
    refuse_difference(run / "exports/step_00000003", run / "checkpoints/step_00000003")


def processes_about(folder):
    """Those of forge convert with a path in this folder."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if "convert" in words and any(word.startswith(str(folder)) for word in words):
            yield words


@pytest.mark.nightly
def test_a_run_that_is_told_to_leave_does_not_wait_for_an_export(folder, capfd, monkeypatch):
    train_step = Trainer._train_step

    def step(self, *given):
        self.run.requests.stop = "SIGTERM"
        return train_step(self, *given)

    run = folder / "runs/r"
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_train_step", step)
        with pytest.raises(SystemExit) as left:
            main(["run", "job.toml"])
    assert left.value.code == 3
    (stopped_at,) = [step for _, step in told(run, "preempted")]
    assert f"the export of step {stopped_at} is not finished; the next start of the run does it again" in (
        capfd.readouterr().out
    )
    assert [*(run / "exports").iterdir()] == []

    assert main(["run", "job.toml", "checkpoint.interval=0"]) == 0

    assert exported(run) == [stopped_at, 6]


@pytest.mark.usefixtures("forked_exports")
def test_a_checkpoint_that_takes_the_place_of_another_is_exported_again(folder):
    assert main(["run", "job.toml"]) == 0
    before = content(folder / "runs/r/exports/step_00000006")

    assert main(["run", "job.toml", "--resume", "never", "train.seed=1"]) == 0

    run = folder / "runs/r"
    assert exported(run) == [3, 6, 3, 6]
    assert content(run / "exports/step_00000006")["model.safetensors"] != before["model.safetensors"]
    refuse_difference(run / "exports/step_00000006", run / "checkpoints/step_00000006")


def test_a_place_that_cannot_be_written_to_is_said_and_the_run_goes_on(folder, capfd):
    assert main(["run", "job.toml", "callbacks=[{name='export', path='a.txt'}]"]) == 0

    said = capfd.readouterr().out
    assert "exporting step 3 failed: cannot write a.txt/r: Not a directory" in said
    assert told(folder / "runs/r", "export_failed") == [("export_failed", 3), ("export_failed", 6)]
    assert [*(folder / "runs/r").glob(".exporting/step_*")] == []


def test_a_step_that_is_held_twice_loses_neither(tmp_path):
    checkpoint = tmp_path / "checkpoints" / "step_00000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / "weights").write_text("before")
    run = SimpleNamespace(run_dir=tmp_path)
    first = _held(checkpoint, run)
    (checkpoint / "weights").unlink()
    (checkpoint / "weights").write_text("after going back")

    second = _held(checkpoint, run)
    shutil.rmtree(checkpoint)

    assert [(one / "weights").read_text() for one in (first, second)] == ["before", "after going back"]


def test_a_process_that_says_much_comes_to_its_end(tmp_path, monkeypatch):
    said = "import sys; sys.stderr.write('a warning ' * 100_000 + 'error: the end'); sys.exit(2)"
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{said}"\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))

    process = ExportProcess(tmp_path / "checkpoint", tmp_path / "out", [])
    deadline = time.monotonic() + 60
    while process.is_running and time.monotonic() < deadline:
        time.sleep(0.01)

    assert process.problem() == "the end"


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", "64k") as path:
        yield path


@pytest.mark.usefixtures("forked_exports")
def test_a_full_disk_is_said_and_the_run_goes_on(folder, disk, capfd):
    assert main(["run", "job.toml", f"callbacks=[{{name='export', path='{disk}'}}]", "model.dim=64"]) == 0

    said = capfd.readouterr().out
    assert "exporting step 6 failed: " in said
    assert "free, and the model needs" in said
    assert ("export_failed", 6) in told(folder / "runs/r", "export_failed")
    assert [*(disk / "r").iterdir()] == []


def test_a_model_that_has_no_form_there_is_refused_at_the_start(folder, capfd):
    for command in ("validate", "run"):
        assert main([command, "job.toml", 'model.norm="layernorm"', "model.norm_placement=both"]) == 2
        said = capfd.readouterr().err
        assert "callbacks[0]: this model has no form in Hugging Face's format" in said
        assert 'only norm = "rmsnorm" has a Hugging Face form' in said
    assert not (folder / "runs").exists()


@pytest.mark.slow
def test_ranks_that_share_a_model_export_it_as_one_does(tmp_path):
    launcher = Launcher(tmp_path)
    settings = ["callbacks=[{name='export'}]", "train.steps=4", "eval.interval=0", "checkpoint.interval=4"]
    settings += ["train.batch_size=1", "train.grad_accumulation=2", "parallel.pp=2"]

    launcher.launch([Work("pp2-fsdp2", 4, settings)])

    launcher.metrics("pp2-fsdp2")
    run = launcher.run_dir("pp2-fsdp2")
    assert exported(run) == [4]
    refuse_difference(run / "exports/step_00000004", run / "checkpoints/step_00000004")
