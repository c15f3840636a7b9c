"""A crash of compiled code is seen, and ends no other work; one that comes again is a failure."""

import sys
from pathlib import Path

import pytest

from parity_matrix.launch import Launcher, Work

STEP = ["train.steps=1", "scheduler.warmup_steps=0", "eval.interval=0"]


@pytest.fixture
def crashing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Make a launcher whose processes crash while ``condition`` of the shell holds, in a folder of their own."""
    monkeypatch.setenv("FORGE_TEST_MACHINE", str(tmp_path))

    def make(condition: str) -> Launcher:
        python = tmp_path / "python"
        python.write_text(
            f'#!/bin/sh\nif {condition}; then : > crashed; kill -SEGV $$; fi\nexec {sys.executable} "$@"\n'
        )
        python.chmod(0o755)
        return Launcher(tmp_path / "runs", python)

    (tmp_path / "runs").mkdir()
    return make


def test_what_has_crashed_once_is_done_again_and_told(crashing, tmp_path):
    launcher = crashing("[ ! -e crashed ]")
    launcher.launch([Work("one", 1, STEP)])
    assert [line["step"] for line in launcher.metrics("one")] == [1]
    assert "exit code -11" in launcher.crashes["one"]
    assert (tmp_path / "crashes").read_text().startswith("one, done once more:\nrank 0, exit code -11")


def test_what_crashes_twice_has_failed(crashing):
    launcher = crashing("true")
    launcher.launch([Work("one", 1, STEP)])
    with pytest.raises(AssertionError, match="rank 0, exit code -11"):
        launcher.metrics("one")


def test_a_work_that_needs_one_that_failed_has_failed_by_that_wherever_it_stands(tmp_path):
    launcher = Launcher(tmp_path)
    launcher.launch([Work("one", 1, ["train.steps=0"]), Work("two", 1, STEP), Work("three", 1, STEP, resumes="one")])
    assert [line["step"] for line in launcher.metrics("two")] == [1]
    with pytest.raises(AssertionError, match=r"^one failed, which it needs: rank 0, exit code 1: "):
        launcher.metrics("three")
