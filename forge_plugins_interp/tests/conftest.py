from __future__ import annotations

import pytest

from forge_core.job import load_job
from forge_core.registry.discovery import discover
from forge_core.run.run import run_job

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
