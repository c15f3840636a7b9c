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


MIXTURE = JOB.replace(
    """name = "text_files"
path = "corpus"
workers = 0
shuffle = false
""",
    """name = "mixture"

[[data.sources]]
name = "first"
weight = 1
source = { name = "text_files", path = "corpus" }

[[data.sources]]
name = "second"
weight = 2

[data.sources.source]
name = "text_files"
path = "other"
""",
)


@pytest.mark.parametrize("key", ["shuffle = true", "workers = 1", "prefetch = 4"])
def test_keys_of_a_source_within_another_are_refused_by_their_line(load, key):
    name = key.partition(" ")[0]
    text = MIXTURE.replace("\n[train]", f"{key}\n\n[train]")
    line = text.splitlines().index(key) + 1

    with pytest.raises(
        ConfigError, match=rf"job\.toml:{line}: data\.sources\[1\]\.source\.{name}: has no effect: the so"
    ):
        load(text)


def test_shuffle_is_refused_where_the_source_says_itself_what_stands_where(load):
    with pytest.raises(ConfigError, match=r"data\.shuffle: has no effect: 'mixture' says itself what stands where"):
        load(MIXTURE, "data.shuffle=true")
    assert load(MIXTURE, "data.workers=2", "train.data_seed=3").data.config.workers == 2


def test_a_resolved_mixture_leaves_them_out_at_every_depth_and_can_be_read_again(load):
    job = load(MIXTURE)

    written = dump_job(job)

    data = tomllib.loads(written)["data"]
    assert "shuffle" not in data
    assert "workers" in data
    assert not any({"shuffle", "workers", "prefetch"} & one["source"].keys() for one in data["sources"])
    assert load(written) == job
