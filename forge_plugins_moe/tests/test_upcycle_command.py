"""``forge moe upcycle``: from a dense run's checkpoint to a sparse one that is trained."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

import fork_server
from forge_core.checkpoint.store import Checkpoint, open_checkpoint
from forge_core.cli import main
from forge_core.registry.discovery import discover
from forge_plugins_weights.loading import load_model

TOML = """
[run]
name = "dense"
dir = "{folder}/runs"

[model]
name = "transformer"
dim = 32
n_layers = 3
n_heads = 4
max_seq_len = 64
feed_forward = {{name = "mlp", hidden_dim = 48}}

[data]
name = "text_files"
path = "{folder}/text"
pattern = "*.txt"

[train]
steps = 4
seq_len = 32
batch_size = 2
precision = "fp32"

[optimizer]
name = "adamw"
lr = 1e-2

[metrics]
interval = 1
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With a dense run of four steps in ``runs/dense``."""
    folder: Path = tmp_path_factory.mktemp("upcycle")
    (folder / "text").mkdir()
    for i in range(4):
        (folder / "text" / f"{i}.txt").write_text("\n".join(f"line {j}: {(i * 7919 + j) % 997}" for j in range(200)))
    (folder / "dense.toml").write_text(TOML.format(folder=folder))
    assert main(["run", str(folder / "dense.toml")]) == 0
    return folder


@pytest.fixture(scope="module")
def sparse(folder) -> Path:
    out = folder / "runs" / "sparse"
    assert upcycle(folder, out) == 0
    return out


def upcycle(folder: Path, out: Path, *arguments: str) -> int:
    experts = () if "--experts" in arguments else ("--experts", "4")
    return main(["moe", "upcycle", str(folder / "runs" / "dense"), "--out", str(out), *experts, *arguments])


@torch.no_grad()
def logits(checkpoint: Path) -> torch.Tensor:
    model = load_model(open_checkpoint(checkpoint), lambda _: discover(), torch.device("cpu"), None).model.eval()
    return model(torch.arange(64).view(2, 32))


def tensors(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(path)
    entries = checkpoint.saved_tensors()
    found = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in entries.items()}
    checkpoint.load(found)
    return found


def steps(run: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--experts", "8", "--top-k", "4", "--granularity", "2", "model.feed_forward.router.name=sigmoid_topk"),
        ("model.feed_forward.first_dense=2", "--seed", "3"),
    ],
)
def test_the_sparse_checkpoint_has_the_logits_of_the_dense_one(folder, tmp_path, arguments, capsys):
    assert upcycle(folder, tmp_path / "out", *arguments) == 0

    said = capsys.readouterr().out
    assert "it computes what the dense model does" in said
    assert f"forge run {tmp_path / 'out' / 'train.toml'}" in said
    expected = logits(folder / "runs" / "dense" / "checkpoints" / "step_00000004")
    torch.testing.assert_close(logits(tmp_path / "out" / "checkpoint"), expected, atol=2e-6, rtol=0)


@pytest.fixture(scope="module")
def trained(sparse) -> Path:
    assert main(["run", str(sparse / "train.toml"), "checkpoint.powers_of_two_until=1"]) == 0
    return sparse


def test_one_command_trains_from_it(trained):
    begun, upcycled = tensors(trained / "checkpoints" / "step_00000000"), tensors(trained / "checkpoint")
    assert all(torch.equal(tensor, upcycled[key]) for key, tensor in begun.items())
    accounts = json.loads((trained / "loaded.json").read_text())
    assert accounts["fresh"] == accounts["without_a_place"] == accounts["left_out"] == []


@pytest.mark.slow
def test_it_can_be_trained_in_another_layout(trained):
    two = ["--nproc", "2", "parallel.ep=2", "train.batch_size=1", "run.name=two"]
    done = fork_server.run(
        [sys.executable, "-m", "forge_core", "run", str(trained / "train.toml"), *two],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    one, other = steps(trained), steps(trained.parent / "two")
    losses, others = ([line["loss"] for line in lines] for lines in (one, other))
    assert others[:2] == pytest.approx(losses[:2], rel=1e-5)
    # experts begin as copies: once they are updated, rounding may give a token another one of two that score alike
    assert others == pytest.approx(losses, rel=1e-3)


def test_a_run_resumed_from_it_goes_on_at_the_step_and_the_data_of_the_dense_one(sparse, folder):
    resume = [f"checkpoint.resume={sparse / 'checkpoint'}", "run.name=resumed", "train.steps=5"]
    assert main(["run", str(sparse / "checkpoint" / "job.toml"), *resume]) == 0
    assert main(["run", str(folder / "dense.toml"), "train.steps=5"]) == 0

    (line,) = steps(sparse.parent / "resumed")
    last = steps(folder / "runs" / "dense")[-1]
    assert line["step"] == last["step"] == 5
    assert line["loss"] == pytest.approx(last["loss"], rel=1e-5)


def test_where_the_weights_are_from_is_recorded(sparse, folder):
    facts = open_checkpoint(sparse / "checkpoint").state()["upcycled"]

    assert facts["source"] == str(folder / "runs" / "dense" / "checkpoints" / "step_00000004")
    assert {key: facts[key] for key in ("step", "granularity", "scale", "drop", "seed")} == {
        "step": 4,
        "granularity": 1,
        "scale": "down_only",
        "drop": 0.0,
        "seed": 0,
    }
    assert facts["layers"].keys() == {f"blocks.{layer}.feed_forward" for layer in range(3)}


def test_matrices_are_read_once_and_those_of_one_block_at_a_time(folder, tmp_path, monkeypatch):
    reads: list[set[str]] = []
    load = Checkpoint.load

    def recording(self, wanted):
        reads.append({key for key, tensor in wanted.items() if tensor.ndim > 1})
        load(self, wanted)

    monkeypatch.setattr(Checkpoint, "load", recording)
    assert upcycle(folder, tmp_path / "out") == 0

    parts = ["model.embed", *(f"model.blocks.{layer}" for layer in range(3)), "model.head"]
    assert all(any(all(key.startswith(part) for key in keys) for part in parts) for keys in reads)
    assert sorted(key for keys in reads for key in keys) == sorted({key for keys in reads for key in keys})


def test_of_a_run_with_averages_the_trained_weights_are_taken_and_that_is_said(folder, tmp_path, capsys):
    averaged = ["run.name=averaged", "callbacks=[{name='ema', decay=0.5}]"]
    assert main(["run", str(folder / "dense.toml"), *averaged]) == 0

    dense = str(folder / "runs" / "averaged")
    assert main(["moe", "upcycle", dense, "--out", str(tmp_path / "out"), "--experts", "4"]) == 0
    assert "note: it is made of the trained weights" in capsys.readouterr().out


def test_what_does_not_compute_the_same_is_said(folder, tmp_path, capsys):
    settings = ["model.feed_forward.router.order=softmax_topk", "model.window=4"]
    assert upcycle(folder, tmp_path / "out", "--drop", "0.5", *settings) == 0

    said = capsys.readouterr().out
    assert "from their mean; model.window: 0 -> 4\n" in said
    assert "does not compute what the dense model does: 50% of each expert's features start anew; the weights" in said


def test_settings_that_change_the_rest_of_the_model_are_named(folder, tmp_path, capsys):
    assert upcycle(folder, tmp_path / "out", "model.window=4", "model.feed_forward.first_dense=1") == 0

    said = capsys.readouterr().out
    assert "it computes what the dense model does, but for what these change: model.window: 0 -> 4\n" in said
    expected = logits(folder / "runs" / "dense" / "checkpoints" / "step_00000004")
    assert (logits(tmp_path / "out" / "checkpoint") - expected).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("parallel.passes.lora.rank=2", "was trained with the pass lora, whose parameters another model would lack"),
        ("model.feed_forward.bias=true", "blocks.0.feed_forward has biases in the dense model"),
    ],
)
def test_of_adapters_and_biases_no_experts_are_made(folder, tmp_path, setting, sentence, capsys):
    assert main(["run", str(folder / "dense.toml"), f"run.dir={tmp_path}", "train.steps=1", setting]) == 0

    assert main(["moe", "upcycle", str(tmp_path / "dense"), "--out", str(tmp_path / "out"), "--experts", "4"]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--granularity", "5"], "granularity = 5 does not divide the 48 hidden features"),
        (["--granularity", "2", "--top-k", "3"], "multiple of 2"),
        (["--experts", "6", "--granularity", "4", "--top-k", "4"], "6 experts are not whole copies"),
        (["--scale", "cbrt"], "scale = 'cbrt' has no effect with granularity = 1"),
        (["--drop", "nan"], "'drop' must be >= 0: nan"),
        (["--seed", "9" * 20], "'--seed': 99999999999999999999 is not in the range"),
        (["model.feed_forward.n_experts=8"], "model.feed_forward.n_experts=8: --experts 4 says how many"),
        (["model.tie_embeddings=true"], "the sparse one has no head.weight"),
        (
            ["--top-k", "1", "model.feed_forward.router.top_k=2"],
            "top_k=2: --top-k 1 says how many; leave one out",
        ),
        (["--top-k", "1", "--model.feed_forward.router.top_k", "2"], "--top-k 1 says how many; leave one out"),
        (["--top-k", "5"], "5 experts a token are more than the 4"),
        (["model.feed_forward.router.name=sofmax_topk"], "Did you mean 'softmax_topk'"),
        (["model.feed_forward.hidden_dim=32"], "leave out hidden_dim"),
        (["model.n_layers=4"], "the dense model has no blocks.3"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(folder, tmp_path, arguments, sentence, capsys):
    assert upcycle(folder, tmp_path / "out", *arguments) == 2

    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_is_there_already_and_what_is_sparse_already_are_refused(folder, sparse, tmp_path, capsys):
    assert upcycle(folder, sparse) == 2
    assert f"{sparse / 'checkpoint'} exists already" in capsys.readouterr().err

    assert main(["moe", "upcycle", str(sparse / "checkpoint"), "--out", str(tmp_path / "out"), "--experts", "4"]) == 2
    assert "experts can be made of 'mlp' alone" in capsys.readouterr().err
