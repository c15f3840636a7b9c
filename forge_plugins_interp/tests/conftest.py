from __future__ import annotations

import numpy as np
import pytest
import torch

from forge_core.job import load_job
from forge_core.registry.discovery import discover
from forge_core.run.run import run_job
from forge_plugins_interp.store import TOKENS, Manifest, StoredSite, write_index, write_shard

JOB = """
[run]
name = "tiny"
dir = "{folder}/runs"
[model]
name = "transformer"
dim = 32
n_layers = 2
n_heads = 4
n_kv_heads = 2
max_seq_len = 64
qk_norm = true
attention_softcap = 5.0
[data]
name = "text_files"
path = "{folder}"
pattern = "*.txt"
validation = 0.5
[train]
steps = 2
seq_len = 32
batch_size = 2
precision = "fp32"
[optimizer]
name = "adamw"
lr = 1e-2
[scheduler]
name = "constant"
"""


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """The directory of a run of two steps."""
    folder = tmp_path_factory.mktemp("interp")
    for file in range(4):
        lines = (f"line {i}: {(i * 7919 + file) % 97}" for i in range(100))
        (folder / f"{file}.txt").write_text("\n".join(lines))
    (folder / "job.toml").write_text(JOB.format(folder=folder))
    catalog = discover()
    job = load_job(folder / "job.toml", [], catalog=catalog, world_size=1)
    run_job(job, catalog)
    return folder / "runs" / "tiny"


IDS = np.array([f"s{i}" for i in range(40)])
"""Of the stimuli of ``store``."""


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Two layers with a row a sample, in another order than the recordings."""
    folder = tmp_path_factory.mktemp("score") / "acts"
    folder.mkdir()
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    layers = {"blocks.0.resid_post": random(40, 8).float(), "blocks.1.resid_post": random(40, 10, seed=1).bfloat16()}
    for site, values in layers.items():
        write_shard(folder, site, 0, {"values": values[order]})
    columns = {
        "stimulus_id": IDS[order.numpy()],
        "length": np.ones(40, np.int64),
        "kind": (order.numpy() % 2).astype(str),
    }
    write_index(folder, columns)
    sites = {
        site: StoredSite(dims=("sample", "width"), sizes=(values.shape[1],), dtype=str(values.dtype)[6:])
        for site, values in layers.items()
    }
    origin = {"run": "demo", "step": 4, "data": "abc"}
    Manifest(sites=sites, n_samples=40, shard_samples=40, origin=origin, complete=True).write(folder)
    return folder


@pytest.fixture(scope="module")
def store_of_tokens(tmp_path_factory):
    """Three samples in two shards, of 2, 1 and 3 tokens, of which the last three are not all; and a site with
    a row for each sample."""
    folder = tmp_path_factory.mktemp("tokens") / "acts"
    folder.mkdir()
    tokens, samples = random(6, 2, 4).float(), random(3, 5).float()
    for shard, (some, few) in enumerate(((tokens[:3], samples[:2]), (tokens[3:], samples[2:]))):
        write_shard(folder, "blocks.0.z", shard, {"values": some})
        write_shard(folder, "logits", shard, {"values": few})
    length, ids = torch.tensor([2, 1]), torch.arange(3)
    write_shard(folder, TOKENS, 0, {"values": ids, "length": length})
    write_shard(folder, TOKENS, 1, {"values": ids, "length": torch.tensor([3]), "position": torch.tensor([1, 4, 5])})
    write_index(folder, {"stimulus_id": np.array(["a", "b", "c"]), "length": np.array([2, 1, 3])})
    sites = {
        "blocks.0.z": StoredSite(dims=("token", "head", "head_width"), sizes=(2, 4), dtype="float32"),
        "logits": StoredSite(dims=("sample", "vocabulary"), sizes=(5,), dtype="float32"),
    }
    Manifest(sites=sites, n_samples=3, shard_samples=2, origin={"data": "d"}, complete=True).write(folder)
    return folder, tokens, samples
