"""The list of steps that asks a GPU can be tried out without one."""

import importlib
import json
import os
import re
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fork_server

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu.py"
without_a_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to ask")


@pytest.fixture
def gpu(monkeypatch):
    """The script and what it is made of, as modules."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    before = set(sys.modules)
    yield SimpleNamespace(script=importlib.import_module("gpu"), steps=importlib.import_module("gpu_steps.step"))
    for name in sys.modules.keys() - before:
        if name.partition(".")[0] in ("gpu", "gpu_steps", "train_gpu"):
            del sys.modules[name]


BY_DAY = ("device", "experts")
"""More of them ask the stand-in for a GPU by day, in ``tests/stand_in_gpu``; all of them are by night."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "is_by_day", [pytest.param(True, marks=pytest.mark.slow), pytest.param(False, marks=pytest.mark.nightly)]
)
def test_the_list_works_on_a_cpu(gpu, monkeypatch, capfd, tmp_path, is_by_day):
    monkeypatch.setattr(gpu.script, "Popen", fork_server.Popen)
    options = Namespace(minutes=14, device="cpu", tiny=True, out=tmp_path / "answers.jsonl")
    steps = [step for step in gpu.script.STEPS if step.name in BY_DAY or not is_by_day]

    code = gpu.script.run_all(steps, options)

    said = capfd.readouterr().out
    assert code == 0, said
    names = [step.name for step in steps]
    rows = re.findall(r"^\| (\S+) \| (\w+)[^|]* \| ([^|]*) \| [\d.]+ \|$", said, re.M)
    assert [name for name, _, _ in rows] == names, said
    assert {verdict for _, verdict, _ in rows} == {"ok"}, said
    answers = [json.loads(line) for line in options.out.read_text().splitlines()]
    assert [(one["step"], one["verdict"]) for one in answers] == [(name, "ok") for name in names]
    assert all(one["figures"] and one["machine"]["device"] == "cpu" for one in answers)
    assert all(one["machine"]["torch"] == torch.__version__ and "commit" in one["machine"] for one in answers)


def test_it_lists_its_steps_and_does_those_that_are_asked_for(gpu, monkeypatch, capfd):
    """The step is a fork, which has Triton imported as this process has: no kernel runs in it."""

    def start(command, *, env, **options):
        return fork_server.Popen(command, env={**os.environ}, **options)

    def ask(*arguments):
        monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--tiny", *arguments])
        gpu.script.main()

    monkeypatch.setattr(gpu.script, "Popen", start)

    ask("--list")
    listed = capfd.readouterr().out
    with pytest.raises(SystemExit) as left:
        ask("--only", "device", "--minutes", "2")
    done = capfd.readouterr().out

    assert listed.splitlines()[0].startswith("device ")
    assert (left.value.code, done.count("\n| device | ")) == (0, 1), done


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--only", "documnts"], "--only documnts: there is no such step; did you mean documents?"),
        (["--minutes", "0.01"], "--minutes 0.01 are too few for any step: the shortest takes 10 s"),
        (["--only", "8b", "--minutes", "0.5"], "--minutes 0.5 are too few for any step: the shortest takes 60 s"),
        (["--device", "cpu"], "--device cpu takes --tiny: the other sizes are for a GPU"),
        pytest.param([], "torch sees no CUDA GPU here; --device cpu --tiny tries the list out", marks=without_a_gpu),
    ],
)
def test_what_cannot_be_asked_is_told(gpu, monkeypatch, capsys, arguments, sentence):
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])

    with pytest.raises(SystemExit) as left:
        gpu.script.main()

    assert left.value.code == 2
    assert sentence in capsys.readouterr().err


def test_an_answer_that_must_not_be_keeps_its_figures(gpu):
    def off(setting):
        return gpu.steps.must({"the loss is off by 0.5": True, "it is not finite": False}, {"loss": 0.5})

    answer = gpu.script.answer(
        gpu.steps.Step(name="off", asks="", seconds=1, run=off), Namespace(device="cpu", tiny=True)
    )

    assert answer == {"verdict": "failed", "reason": "the loss is off by 0.5", "figures": {"loss": 0.5}}
    assert gpu.script.row({"step": "off", **answer}) == "| off | failed: the loss is off by 0.5 | loss 0.5 |  |"


@pytest.mark.parametrize(
    ("gib", "has_bf16", "sentence"),
    [
        (139.8, True, ""),
        (79.2, True, "takes 105 GiB, and this GPU has 79.2"),
        (139.8, False, "computes in bf16, which this GPU does not have"),
    ],
)
def test_a_gpu_that_cannot_answer_is_told_why(gpu, gib, has_bf16, sentence):
    (step,) = [step for step in gpu.script.STEPS if step.name == "8b"]

    assert step.refusal(gib, has_bf16=has_bf16) == sentence


def test_a_step_that_ends_badly_or_never_leaves_the_others_their_turn(gpu, monkeypatch, capfd):
    bodies = {
        "breaks": "raise SystemExit('a | b')",
        "hangs": "import time; time.sleep(600)",
        "works": """print('{"verdict": "ok"}')""",
    }
    steps = [gpu.steps.Step(name=name, asks="", seconds=1, run=lambda setting: {}) for name in bodies]
    monkeypatch.setattr(gpu.script, "command_of", lambda step, options: [sys.executable, "-c", bodies[step.name]])
    monkeypatch.setattr(gpu.script, "PATIENCE", 5)

    code = gpu.script.run_all(steps, Namespace(minutes=5, device="cuda", tiny=False, out=None))

    rows = capfd.readouterr().out.splitlines()[2:]
    assert code == 1
    assert rows[0].startswith(r"| breaks | failed: exit code 1: a \| b |")
    assert rows[1].startswith("| hangs | failed: not done after 5 s |")
    assert rows[2].startswith("| works | ok |")


def test_a_step_for_which_no_time_is_left_is_not_begun(gpu, capfd):
    steps = [gpu.steps.Step(name="long", asks="", seconds=600, run=lambda setting: {})]

    assert gpu.script.run_all(steps, Namespace(minutes=1, device="cuda", tiny=False, out=None)) == 0

    assert "| long | skipped: takes 600 s, and 60 s are left |" in capfd.readouterr().out
