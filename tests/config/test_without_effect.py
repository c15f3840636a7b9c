"""Keys that would do nothing are refused where they are given, and are not written into resolved jobs."""

import tomllib

import pytest

from forge_core.errors import ConfigError
from forge_core.job import dump_job, load_job
from forge_core.registry.discovery import discover

JOB = """
[model]
name = "transformer"
dim = 32
n_layers = 2
n_heads = 4

[data]
name = "text_files"
path = "corpus"
workers = 0
shuffle = false

[train]
steps = 10
seq_len = 32

[optimizer]
name = "adamw"
lr = 1e-3

[eval]
interval = 5
data = { name = "text_files", path = "held-out" }
"""


@pytest.fixture
def load(tmp_path):
    catalog = discover()

    def load(text, *overrides):
        path = tmp_path / "job.toml"
        path.write_text(text)
        return load_job(path, overrides, catalog=catalog)

    return load


def test_a_resolved_job_leaves_them_out_and_can_be_read_again(load):
    job = load(JOB)

    written = dump_job(job)

    table = tomllib.loads(written)
    assert "prefetch" not in table["data"]
    assert not {"shuffle", "workers", "prefetch"} & table["eval"]["data"].keys()
    assert table["eval"]["data"]["path"] == "held-out"
    assert load(written) == job


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("data.prefetch=4", "data.prefetch"),
        ("train.data_seed=1", "train.data_seed"),
        ("eval.data.shuffle=true", "eval.data.shuffle"),
        ("eval.data.workers=1", "eval.data.workers"),
        ("eval.data.prefetch=4", "eval.data.prefetch"),
    ],
)
def test_they_are_refused_even_where_they_say_what_is_the_default(load, override, key):
    with pytest.raises(ConfigError, match=rf"{key}: has no effect"):
        load(JOB, override)


def test_they_may_be_given_where_they_have_an_effect(load):
    job = load(JOB, "data.workers=2", "data.prefetch=8", "data.shuffle=true", "train.data_seed=1")

    assert job.data.config.prefetch == 8
    assert tomllib.loads(dump_job(job))["data"]["prefetch"] == 8
