"""``[checkpoint]``: what contradicts itself or would do nothing is refused with what to do."""

from __future__ import annotations

import sys

import pytest

from forge_core.job import job_table


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["powers_of_two_from=4"], "checkpoint.powers_of_two_from: has no effect without powers_of_two_until"),
        (["powers_of_two_from=8", "powers_of_two_until=4"], "8 is after powers_of_two_until = 4"),
        (["powers_of_two_from=11", "powers_of_two_until=12"], "11 is after the last step, train.steps = 10"),
        (["keep_every=4"], "checkpoint.keep_every: has no effect without keep_last"),
        (["keep_last=1", "keep_best=2"], "checkpoint.keep_best: nothing is evaluated"),
        (["keep_best=2", "best_is=highest"], "checkpoint.keep_best: has no effect without keep_last"),
        (["best_metric=eval/perplexity"], "checkpoint.best_metric: has no effect without keep_best"),
        (["best_metric=eval/accuracy"], '"eval/accuracy" is not allowed'),
        (["keep_last=0"], "checkpoint.keep_last"),
        (["interval=-1"], "checkpoint.interval"),
        (['load.path="x"', "resume=x"], "checkpoint.load: has no effect: checkpoint.resume = 'x' starts from a whole"),
        (['load.path="x"', "load.include=[]"], "checkpoint.load.include"),
        (["load={}"], "checkpoint.load.path: is required"),
        (["mirror_keep_last=2"], "checkpoint.mirror_keep_last: has no effect without mirror"),
        (["mirror=runs"], "checkpoint.mirror: 'runs' is run.dir, where the checkpoints are already"),
        (["mirror=file://"], "checkpoint.mirror: 'file://' names no folder"),
        (["mirror=memry://x"], "fsspec knows no file system of the name 'memry'; did you mean 'memory'?"),
        (["mirror=ftp://me:hunter2@host/x"], "'ftp://me:***@host/x' has credentials in it, which would be written"),
        (["mirror=ftp://me:hunter2@host/x"], "set FSSPEC_FTP_USERNAME and FSSPEC_FTP_PASSWORD in the environment"),
        (["mirror=s3://KEY:se/cret@bucket/x"], "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the"),
        (["mirror=oss://bucket/x"], "needs a package that is not installed: Install ossfs"),
    ],
)
def test_what_would_do_nothing_is_refused(complaint, settings, said):
    assert said in complaint(*[f"checkpoint.{setting}" for setting in settings])


@pytest.mark.parametrize(
    ("interval", "evaluated", "said"),
    [
        (10, 4, "checkpoint.interval = 10 must be a multiple of eval.interval = 4"),
        (0, 5, "the last checkpoint is the only one"),
    ],
)
def test_the_best_are_told_by_evaluations_at_the_same_steps(complaint, interval, evaluated, said):
    keep = ["checkpoint.keep_last=1", "checkpoint.keep_best=2"]

    assert said in complaint(*keep, f"checkpoint.interval={interval}", f"eval.interval={evaluated}")


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
    ):
        assert load(f"checkpoint.mirror={mirror}").checkpoint.mirror == mirror


def test_a_section_that_uses_everything_is_valid_and_comes_back_from_its_table(load):
    keys = "interval=10 minutes=5 powers_of_two_from=2 powers_of_two_until=8 keep_last=2 keep_every=4 keep_best=1"
    settings = [f"checkpoint.{key}" for key in keys.split()]

    load_keys = ['checkpoint.load.path="runs/x"', 'checkpoint.load.exclude=["model.head.*"]']
    job = load(*settings, "eval.interval=5", *load_keys)

    table = job_table(job)["checkpoint"]
    assert table["load"] == {"path": "runs/x", "include": ["model.*"], "exclude": ["model.head.*"]}
    assert table["best_metric"] == "eval/loss"
    assert "best_metric" not in job_table(load())["checkpoint"]
