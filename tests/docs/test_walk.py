"""The walk of the docs, word by word: real processes, the real text, every output compared with the page."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import fork_server
from doc_pages import commands, files, not_said

PAGE = "docs/walk.md"
pytestmark = pytest.mark.timeout(1200)  # three runs, on a machine of any speed

CTRL_C = "^C"
"""In an output: the reader presses it once the line before it is there."""


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a reader who has typed everything; in ``wrong.json`` what was not as the page says."""
    folder = tmp_path_factory.mktemp("walk")
    for name, text in files(PAGE).items():
        (folder / name).write_text(text, encoding="utf-8")
    wrong = []
    for command, shown in commands(PAGE):
        code, said = _type(command, shown, folder)
        missing = not_said([line for line in shown if line != CTRL_C], said)
        if missing or code != _expected(shown):
            wrong.append(f"{command}: exit code {code}; not said: {missing}; said:\n{said}")
    (folder / "wrong.json").write_text(json.dumps(wrong))
    return folder


def _type(command: str, shown: list[str], folder: Path) -> tuple[int, str]:
    words = shlex.split(command)
    module = ["-m", "forge_core"] if words[0] == "forge" else []
    presses_at = shown[shown.index(CTRL_C) - 1] if CTRL_C in shown else None
    said = []
    with fork_server.Popen(
        [sys.executable, *module, *words[1:]],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        for line in process.stdout:
            said.append(line)
            if presses_at is not None and not not_said([presses_at], line):
                process.send_signal(signal.SIGINT)
                presses_at = None
    return process.returncode, "".join(said)


def _expected(shown: list[str]) -> int:
    if any(line.startswith("error: ") for line in shown):
        return 2
    return 3 if CTRL_C in shown else 0


@pytest.mark.slow
def test_each_command_of_the_walk_says_what_the_page_shows(walk):
    wrong = json.loads((walk / "wrong.json").read_text())

    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_the_interrupted_run_of_the_walk_is_the_straight_one(walk):
    interrupted, straight = (_metrics(walk / "runs" / name) for name in ("walk", "straight"))

    kept = ("loss", "grad_norm", "lr", "tokens", "eval/loss")
    assert len(interrupted) == len(straight) == 13 + 6
    for one, other in zip(interrupted, straight, strict=True):
        assert {key: one.get(key) for key in ("step", *kept)} == {key: other.get(key) for key in ("step", *kept)}
    events = [json.loads(line)["event"] for line in (walk / "runs/walk/events.jsonl").read_text().splitlines()]
    assert [event for event in events if event != "saved"] == ["started", "stopped", "resumed", "completed"]


@pytest.mark.slow
def test_the_walk_begins_its_last_run_where_the_first_one_ended(walk):
    assert _metrics(walk / "runs/walk")[0]["loss"] > 5
    assert _metrics(walk / "runs/further")[0]["loss"] < 2.5


@pytest.mark.slow
def test_the_files_that_the_walk_ends_with_are_there(walk):
    for name in ("job.toml", "environment.json", "metrics.jsonl", "events.jsonl", "checkpoints/latest"):
        assert (walk / "runs/walk" / name).exists()
    report = (walk / "walk.html").read_text(encoding="utf-8")
    assert all(name in report for name in ("walk", "straight", "further"))


def _metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("shown", "said", "missing"),
    [
        (["loss 2.5", "…", "done in … s"], "loss 3.25\nx\ndone in 4.1 s", []),
        (["a", "b"], "b\na", ["b"]),
        (["600 steps"], "601 steps", ["600 steps"]),
        (["saved step_00000…"], "saved step_00000203", []),
        (["loss 2.5"], "loss two", ["loss 2.5"]),
    ],
)
def test_an_output_is_compared_line_by_line(shown, said, missing):
    assert not_said(shown, said) == missing
