"""The tiny job of the system tests, for sweeps."""

import subprocess
from types import SimpleNamespace

import pytest

import fork_server
from forge_plugins_studies import processes


@pytest.fixture
def study(tmp_path, monkeypatch):
    """The path of a job that takes a second, in a folder of its own."""
    (tmp_path / "text").mkdir()
    for name in "ab":
        (tmp_path / "text" / f"{name}.txt").write_text(f"{name} quick brown fox jumps over the lazy dog. " * 200)
    config = tmp_path / "tiny.toml"
    config.write_text(TOML.format(folder=tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return config


@pytest.fixture
def forked_runs(monkeypatch):
    """Runs are forks, which do not notice that their parent dies."""

    def start(command, *, preexec_fn, **options):
        assert preexec_fn is not None
        return fork_server.Popen(command, **options)

    own = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT)
    monkeypatch.setattr(processes, "subprocess", own)


TOML = """
[run]
dir = "{folder}/runs"

[model]
name = "transformer"
dim = 16
n_layers = 1
n_heads = 2
max_seq_len = 32

[data]
name = "text_files"
path = "{folder}/text"
pattern = "*.txt"
validation = 0.2

[train]
steps = 4
seq_len = 32
batch_size = 2
precision = "fp32"

[optimizer]
name = "adamw"
lr = 1e-2

[eval]
interval = 4
batches = 1

[metrics]
interval = 1
"""
