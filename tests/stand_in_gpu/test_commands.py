"""``forge run`` and the commands that open its runs do on a GPU what they do on a CPU: by the stand-in."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

import fork_server

HERE = Path(__file__).parent
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
JOB = """
[run]
name = "whole"
[model]
name = "transformer"
dim = 32
n_layers = 2
n_heads = 4
max_seq_len = 32
[data]
name = "text_files"
path = "text"
pattern = "*.txt"
tokenizer = "bytes"
validation = 0.2
[train]
steps = 4
seq_len = 32
batch_size = 2
precision = "fp32"
[optimizer]
name = "adamw"
lr = 1e-3
[metrics]
interval = 1
[eval]
interval = 4
[checkpoint]
interval = 2
"""
TRAINED = (
    ["run", "job.toml"],
    ["run", "job.toml", "run.name=parts", "train.steps=2"],
    ["run", "job.toml", "run.name=parts"],
)
RUN, PROMPT = "runs/whole", ["--prompt", "line 5"]
COMMANDS = {
    "eval": ["eval", RUN, "--json"],
    "generate": ["generate", RUN, *PROMPT, "--temperature", "0", "--max-new-tokens", "4", "--json"],
    "attention": ["attention", RUN, *PROMPT, "--json"],
    "lens": ["lens", RUN, *PROMPT, "--json"],
    "lens attributes": ["lens", RUN, *PROMPT, "--attribute", "e", "--minus", "x", "--heads", "--json"],
    "patch": ["patch", RUN, "--clean", "line 5", "--corrupt", "lime 5", "--answers", "a,b", "--json"],
}


@pytest.fixture(scope="module")
def answers(stand_in, tmp_path_factory):
    """Of each command, on the GPU and on the CPU; of the trainings, their folder."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "text").mkdir()
    for number in range(20):
        (folder / "text" / f"{number}.txt").write_text("".join(f"line {number * n} of text\n" for n in range(20)))
    (folder / "job.toml").write_text(JOB)
    on_gpu = _type([*TRAINED, *COMMANDS.values()], folder, {**os.environ, **stand_in})
    on_cpu = _type(list(COMMANDS.values()), folder, dict(os.environ))
    trained, on_gpu = on_gpu[: len(TRAINED)], on_gpu[len(TRAINED) :]
    assert [answer["code"] for answer in trained] == [0, 0, 0]
    assert all("on cuda" in answer["said"] for answer in trained)
    return folder, dict(zip(COMMANDS, zip(on_gpu, on_cpu, strict=True), strict=True))


def _type(commands, folder, environment):
    file = folder / "commands.json"
    file.write_text(json.dumps(commands))
    ended = fork_server.run(
        [sys.executable, str(HERE / "commands.py"), str(file)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return [{**json.loads(line), "error": ended.stderr[-4000:]} for line in ended.stdout.splitlines()]


def test_a_run_that_is_resumed_goes_on_bit_for_bit(answers):
    folder, _ = answers
    whole, parts = (
        [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "parts")
    )
    losses = [{line["step"]: line["loss"] for line in lines if "loss" in line} for lines in (whole, parts)]

    assert losses[1] == losses[0]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_what_it_says_on_a_cpu(answers, command):
    on_gpu, on_cpu = answers[1][command]

    assert on_gpu["code"] == on_cpu["code"] == 0, on_gpu["error"]
    for said, expected in zip(_values(on_gpu), _values(on_cpu), strict=True):
        assert said == (pytest.approx(expected, rel=1e-3, abs=1e-5) if isinstance(expected, float) else expected)


def _values(answer):
    """All that the JSON says, in its order: one document, or one a line."""
    left, text = [], answer["said"].strip()
    while text:
        document, end = json.JSONDecoder().raw_decode(text)
        left.append(document)
        text = text[end:].strip()
    assert left
    while left:
        first = left.pop(0)
        if isinstance(first, dict):
            left = [*first.keys(), *first.values(), *left]
        elif isinstance(first, list):
            left = [*first, *left]
        else:
            yield first
