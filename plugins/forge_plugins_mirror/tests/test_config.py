"""``checkpoint.mirror``: a place that cannot be is refused with what to do."""

import sys

import pytest

from forge_core.errors import ConfigError
from forge_core.job import dump_job, load_job
from forge_core.registry.discovery import discover

JOB = """
[model]
name = "transformer"
dim = 16
n_layers = 1
n_heads = 2
[data]
name = "text_files"
path = "."
[train]
steps = 10
seq_len = 8
[optimizer]
name = "adamw"
lr = 1e-3
"""


@pytest.fixture
def load(tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    return lambda *settings: load_job(tmp_path / "job.toml", settings, catalog=discover())


@pytest.fixture
def complaint(load):
    def complain(*settings):
        with pytest.raises(ConfigError) as refusal:
            load(*settings)
        return str(refusal.value)

    return complain


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["mirror=runs"], "checkpoint.mirror: 'runs' is run.dir, where the checkpoints are already"),
        (["mirror=file://"], "checkpoint.mirror: 'file://' names no folder"),
        (["mirror=~no-such-user/x"], "'~no-such-user/x' begins with a user whom this machine does not have"),
        (["mirror=memry://x"], "fsspec knows no file system of the name 'memry'; did you mean 'memory'?"),
        (["mirror=ftp://me:hunter2@host/x"], "'ftp://me:***@host/x' has credentials in it, which would be written"),
        (["mirror=ftp://me:hunter2@host/x"], "set FSSPEC_FTP_USERNAME and FSSPEC_FTP_PASSWORD in the environment"),
        (["mirror=s3://KEY:se/cret@bucket/x"], "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the"),
        (["mirror=oss://bucket/x"], "needs a package that is not installed: Install ossfs"),
    ],
)
def test_a_place_that_cannot_be_is_refused(complaint, settings, said):
    assert said in complaint(*[f"checkpoint.{setting}" for setting in settings])


def test_a_name_that_fsspec_takes_for_a_pattern_is_refused_where_fsspec_removes(load, complaint):
    for letter in "*?[":
        said = complaint("checkpoint.mirror=memory://x", f"run.name=exp{letter}1")
        assert f"checkpoint.mirror: 'memory://x/exp{letter}1' has '{letter}' in it" in said

    assert load("checkpoint.mirror=/far", "run.name=exp[1]").run.name == "exp[1]"


def test_a_mirror_without_fsspec_is_refused_with_what_to_install(complaint, monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.registry", None)

    assert "needs the package fsspec, which is not installed: pip install fsspec" in complaint("checkpoint.mirror=x")


def test_a_mirror_may_be_any_path_or_any_url_whose_package_is_there(load):
    for mirror in (
        "/scratch/runs",
        "~/runs",
        "far",
        "file:///scratch/runs",
        "memory://runs",
        "simplecache::memory://x",
        "ftp://[::1]/runs",
    ):
        assert load(f"checkpoint.mirror={mirror}").checkpoint.mirror.config.url == mirror


def test_a_string_and_its_table_are_the_same_and_a_string_stays_one(load, tmp_path):
    short = load("checkpoint.mirror=/far")
    table = load('checkpoint.mirror={name="fsspec",url="/far"}')

    assert short == table
    assert 'mirror = "/far"' in dump_job(short)
    (tmp_path / "again.toml").write_text(dump_job(table))
    assert load_job(tmp_path / "again.toml", catalog=discover()).checkpoint == short.checkpoint
