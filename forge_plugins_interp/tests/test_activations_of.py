"""The data source ``activations_of``: the values of a store, without one."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import fork_server
from forge_core.cli import main
from forge_core.config.builder import ComponentBuilder
from forge_core.errors import ConfigError
from forge_core.registry.discovery import discover
from forge_plugins_interp.autoencoders.config import ActivationsOfConfig
from forge_plugins_interp.autoencoders.model_source import ActivationsOf
from forge_plugins_interp.store import Store
from forge_testing.json_output import json_of

SAE = """
[run]
name = "sae"
[model]
name = "topk_sae"
width = 32
latents = 64
k = 4
[data]
name = "activations_of"
run = "runs/tiny"
site = "blocks.0.resid_post"
[train]
steps = 12
seq_len = 32
global_batch_size = 4
batch_size = 2
precision = "fp32"
[optimizer]
name = "adamw"
lr = 1e-3
[scheduler]
name = "constant"
[loss]
name = "own"
[eval]
interval = 0
[[evaluations]]
name = "autoencoder"
samples = 8
[checkpoint]
interval = 100
[metrics]
interval = 1
"""


@pytest.fixture(scope="module")
def folder(run):
    folder = run.parent.parent
    (folder / "sae.toml").write_text(SAE)
    return folder


def source(run, split="train", seq_len=32, **keys):
    config = ActivationsOfConfig(run=str(run), **{"site": "blocks.0.resid_post", **keys})
    return ActivationsOf(config, seq_len=seq_len, split=split, build=ComponentBuilder(discover()), seed=42)


def forge(folder, *arguments, code=0):
    command = [sys.executable, "-m", "forge_core", *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = fork_server.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def losses(folder, name):
    lines = map(json.loads, (folder / "runs" / name / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.mark.parametrize("site", ["blocks.0.resid_post", "blocks.1.z"])
def test_rows_are_those_of_a_store(run, tmp_path, site):
    assert (
        main(
            ["extract", str(run), "--sites", f"{site},blocks.1.mlp_out", "--samples", "5", "--out", f"{tmp_path}/acts"]
        )
        == 0
    )
    store = Store(tmp_path / "acts")

    found = source(run, "validation", site=site, target_site="blocks.1.mlp_out")
    batch = found.read(np.arange(5))

    for number, (entry, name) in enumerate((("activation", site), ("target_activation", "blocks.1.mlp_out"))):
        expected = store.array(name).flatten(1)
        values = torch.from_numpy(batch[entry] * batch["scales"][0, number]).flatten(0, 1)
        assert torch.allclose(values, expected, atol=1e-5), entry
        assert found.entries()[entry].sizes[-1] == expected.shape[1]
    assert (batch["positions"] == np.arange(32)).all()


def test_rows_are_scaled_to_the_root_of_their_width(run):
    found = source(run)
    rows = found.read(np.arange(len(found)))["activation"].reshape(-1, 32)

    assert np.linalg.norm(rows, axis=1).mean() == pytest.approx(32**0.5, rel=0.02)
    assert source(run, scale=False).scales == [1.0]


def test_padding_is_no_row(run, tmp_path):
    lines = [json.dumps({"prompt": "line", "completion": f" {number}" * (1 + number % 3)}) for number in range(6)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    table = {"name": "prompt_completion", "path": str(tmp_path / "pairs.jsonl"), "tokenizer": "bytes"}
    inputs = ComponentBuilder(discover()).resolve("data_source", table)

    batch = source(run, "all", inputs=inputs).read(np.arange(2))

    is_padding = batch["positions"] == -1
    assert is_padding.any()
    assert (batch["activation"][is_padding] == 0).all()
    assert (np.abs(batch["activation"][~is_padding]).sum(-1) > 0).all()


def test_data_of_another_vocabulary_are_refused(run):
    inputs = ComponentBuilder(discover()).resolve(
        "data_source", {"name": "synthetic", "vocab_size": 1000, "order": 1, "validation": 16}
    )

    with pytest.raises(ConfigError, match="inputs: they have a vocabulary of 1000, and the model one of 257"):
        source(run, "all", inputs=inputs)


def test_threads_read_the_same_and_leave_no_hook(run):
    found = source(run)
    indices = [np.arange(start, start + 2) for start in range(0, 16, 2)]
    alone = [found.read(one)["activation"] for one in indices]

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda one: found.read(one)["activation"], indices))

    assert all(np.array_equal(one, other) for one, other in zip(alone, together, strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in found._model.modules())


def test_layers_behind_the_site_are_not_computed(run):
    found = source(run)
    calls = []
    found._model.blocks["1"].register_forward_hook(lambda *_: calls.append(1))

    found.read(np.arange(2))

    assert not calls


def test_a_run_resumes_exactly_and_two_ranks_learn_the_same(folder, monkeypatch):
    forge(folder, "run", "sae.toml", "run.name=straight")
    forge(folder, "run", "sae.toml", "run.name=resumed", "train.steps=6")
    forge(folder, "run", "sae.toml", "run.name=resumed")
    forge(folder, "run", "sae.toml", "run.name=two", "--nproc", "2")

    straight = losses(folder, "straight")
    assert losses(folder, "resumed") == straight
    assert losses(folder, "two") == {step: pytest.approx(loss, rel=1e-4) for step, loss in straight.items()}
    assert straight[12] < straight[1]
    shown = forge(folder, "autoencoder", "recover", "runs/tiny", "runs/straight", "--site", "blocks.0.resid_post")
    assert "recovered" in shown
    monkeypatch.chdir(folder)
    told = json_of("autoencoder", "recover", "runs/tiny", "runs/straight", "--site", "blocks.0.resid_post")
    assert f"recovered {told['recovered']:.4f}, KL {told['kl']:.4f}" in shown


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["data.site=blocks.0.resid"],
            "data: site: site 'blocks.0.resid': the model has none of that name; did you mean",
        ),
        (["data.site=blocks.*.z"], "data: site = 'blocks.*.z': means 2 sites; name one of them"),
        (["data.run=runs/no"], "data: there is no directory runs/no; give a run's directory"),
        (["train.seq_len=128"], "train.seq_len = 128: the model of runs/tiny takes 64"),
        (["model.width=33"], "model.width: 33 is not the width of the site, which is 32"),
        (["data.target_site=blocks.1.z"], "reads one site; leave data.target_site out"),
        (
            ["data.inputs={name='synthetic', vocab_size=1000, order=1}"],
            "synthetic has no end, so that samples cannot be read by their numbers",
        ),
    ],
)
def test_bad_input_is_a_sentence(folder, settings, message):
    assert message in " ".join(forge(folder, "run", "sae.toml", "run.name=bad", *settings, code=2).split())
