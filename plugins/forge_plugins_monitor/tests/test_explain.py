"""``forge explain``: why a run stopped, what it has lost, and what to type next."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import time
from pathlib import Path
from typing import Any

import attrs
import pytest

from forge_core.cli import main
from forge_core.distributed.process_identity import Process
from forge_core.errors import ExitCode
from forge_plugins_monitor.run_states.explanation import ENDS, REGULAR, TROUBLE, explain, in_words

ROOT = Path(__file__).resolve().parents[3]
STARTED = {"event": "started", "step": 0, "checkpoint": None, "passed_over": []}
JOB = "[train]\nsteps = 1000\nbatch_size = 8\n[optimizer]\nlr = 4e-4\n"


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """A run that has logged 812 of 1000 steps, half a second each, and saved after 800."""
    monkeypatch.chdir(tmp_path)
    run = Path("runs/x")
    (run / "checkpoints/step_00000800").mkdir(parents=True)
    (run / "checkpoints/step_00000800/manifest.json").write_text("{}")
    (run / "job.toml").write_text(JOB)
    (run / "environment.json").write_text(json.dumps({"command": "forge run c.toml --nproc 4", "world_size": 4}))
    (run / "metrics.jsonl").write_text(json.dumps({"step": 812, "loss": 1.0, "step_seconds": 0.5}) + "\n")
    (run / "log.txt").write_text("a line\nstep 812/1000\n")
    return run


def tell(run: Path, *events: dict[str, Any], age: float = 3600) -> None:
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    for file in run.iterdir():
        os.utime(file, (time.time() - age,) * 2)


def failed(error: str, exit_code: int, step: int = 812) -> dict[str, Any]:
    return {"event": "failed", "step": step, "error": error, "exit_code": exit_code}


LOST = "The newest checkpoint is of step 800: 12 steps (6 s) are lost."
KEPT = "Nothing is lost: the newest checkpoint is of step 800."


@pytest.mark.parametrize(
    ("end", "why", "lost", "following"),
    [
        (
            {"event": "completed", "step": 1000},
            "has reached its end, step 1000 of 1000 (exit code 0)",
            "",
            "for its curves: forge report runs/x",
        ),
        (
            failed("KeyError: 'image'", 1),
            "failed at step 812 of 1000: KeyError: 'image' (exit code 1)",
            LOST,
            "which shows where, if it comes again: forge run c.toml --nproc 4 --debug",
        ),
        (
            failed("OutOfMemoryError: CUDA out of memory.", 1),
            "failed at step 812 of 1000: the memory of the GPU was full: CUDA out of memory (exit code 1)",
            LOST,
            (
                "with half the microbatch, and the same batch: "
                "forge run c.toml --nproc 4 train.batch_size=4 train.grad_accumulation=2"
            ),
        ),
        (
            failed("SaveError: cannot write: no space left", 1),
            "failed at step 812 of 1000: a checkpoint could not be written: cannot write: no space left (exit code 1)",
            LOST,
            "when there is room on the disk: forge run c.toml --nproc 4",
        ),
        (
            failed("LeaseLostError: another attempt has taken over", 1),
            "failed at step 812 of 1000: another start has taken it over: another attempt has taken over (exit code 1)",
            LOST,
            "to see what the other start does: forge runs -f runs/x",
        ),
        (
            failed("ConfigError: data.path: there is no such file", 2),
            (
                "failed at step 812 of 1000: the configuration, the data or a plugin is wrong: data.path: there is no "
                "such file (exit code 2)"
            ),
            LOST,
            "when that is mended: forge run c.toml --nproc 4",
        ),
        (
            {"event": "preempted", "step": 800, "reason": "SIGUSR1"},
            (
                "was stopped at step 812 of 1000 by SIGUSR1, with which schedulers tell of the end of a job's time; it "
                "has saved (exit code 3)"
            ),
            KEPT,
            "to go on from there: forge run c.toml --nproc 4",
        ),
        (
            {"event": "preempted", "step": 800, "reason": "the time limit"},
            "was stopped at step 812 of 1000 by the clock, as its time was over; it has saved (exit code 3)",
            KEPT,
            "to go on from there: forge run c.toml --nproc 4",
        ),
        (
            {"event": "stopped", "step": 800, "reason": "SIGINT"},
            "was stopped at step 812 of 1000 by Ctrl-C; it has saved (exit code 3)",
            KEPT,
            "to go on from there: forge run c.toml --nproc 4",
        ),
        (
            {"event": "stopped", "step": 800, "reason": "the loss is good enough"},
            "was stopped at step 812 of 1000 by a callback: the loss is good enough; it has saved (exit code 3)",
            KEPT,
            "to go on from there: forge run c.toml --nproc 4",
        ),
        (
            failed("NonFiniteError: the loss is not finite, in step 812.", 4),
            (
                "failed at step 812 of 1000: too many losses or gradients were not finite: the loss is not finite, in "
                "step 812 (exit code 4)"
            ),
            LOST,
            "with half the learning rate: forge run c.toml --nproc 4 optimizer.lr=0.0002",
        ),
        (
            failed("LostPeerError: rank 13 on gpu08 has ended", 5),
            "failed at step 812 of 1000: it lost another rank: rank 13 on gpu08 has ended (exit code 5)",
            LOST,
            "to go on from there: forge run c.toml --nproc 4",
        ),
        (
            failed("SystemExit: 130", 130),
            "failed at step 812 of 1000: a second Ctrl-C ended it at once (exit code 130)",
            LOST,
            "to go on from there: forge run c.toml --nproc 4",
        ),
        (
            failed("a rank was killed by SIGKILL", 137),
            "failed at step 812 of 1000: a rank was killed by SIGKILL (exit code 137)",
            LOST,
            "to go on from there: forge run c.toml --nproc 4",
        ),
    ],
)
def test_every_end_is_explained(run, capsys, end, why, lost, following):
    if end["event"] == "completed":
        (run / "checkpoints/step_00000800").rename(run / "checkpoints/step_00001000")
    tell(run, STARTED, end)

    assert main(["explain", str(run)]) == 0

    assert capsys.readouterr().out.splitlines() == [f"runs/x {why}.", *filter(None, [lost]), f"next, {following}"]


def test_every_exit_code_of_a_run_and_every_event_has_words():
    page = (ROOT / "docs/running.md").read_text(encoding="utf-8")
    table = page.partition("## Events")[2].partition("## Metrics")[0]
    ends = test_every_end_is_explained.pytestmark[0].args[1]
    codes = {end.get("exit_code", ENDS[end["event"]]) for end, *_ in ends}

    assert {*ENDS, *REGULAR, *TROUBLE} == set(re.findall(r"^\| `(\w+)` \|", table, re.M))
    assert {int(code) for code in ExitCode} < codes


def test_a_run_that_was_killed_says_what_is_known_of_it(run):
    tell(run, STARTED)
    assert explain(run).why == (
        "was killed at step 812 of 1000: it has written nothing any more, and its host cannot be asked; its last line: "
        "step 812/1000"
    )

    process = attrs.evolve(Process.this(), started="1")  # another one had this number
    lease = {"machine": process.machine, "process": process.number, "started": process.started}
    (run / "lease.json").write_text(json.dumps(lease))
    assert "its process is gone without a word" in explain(run).why

    (run / "stacks").mkdir()
    (run / "stacks/fatal_rank_0.txt").write_text("Fatal Python error: Segmentation fault\n")
    told = explain(run)
    assert told.why == "was killed at step 812 of 1000: by SIGSEGV: an error in compiled code"
    assert (told.exit_code, told.lost_steps, told.lost_seconds) == (None, 12, 6.0)


def test_trouble_since_the_last_start_is_told_and_none_from_before(run):
    trouble = [{"event": name, "step": 700 + index} for index, name in enumerate(TROUBLE)]
    tell(run, STARTED, {"event": "save_failed", "step": 3}, {**STARTED, "event": "resumed", "passed_over": [400]})
    assert explain(run).notes == ["The start passed over damaged checkpoints: 400."]

    trouble[0] |= {"reason": "loss"}
    trouble[1] |= {"to_step": 600}
    trouble.insert(2, {"event": "skipped", "step": 703, "reason": "gradient"})
    tell(run, STARTED, *trouble)
    notes = explain(run).notes
    assert notes[0] == "Since its start: 2 updates left out, the last at step 703: gradient."
    assert notes[1] == "Since its start: 1 times back to a checkpoint, the last at step 701, to step 600."
    assert len(notes) == len(TROUBLE)


def test_a_run_without_a_checkpoint_has_lost_everything(run):
    (run / "checkpoints/step_00000800").rename(run / "checkpoints/.step_00000800.partial")
    tell(run, STARTED, failed("KeyError: 1", 1))

    assert "There is no checkpoint, so that 812 steps are lost." in in_words(explain(run))


def test_a_finished_run_whose_checkpoints_were_removed_has_lost_nothing(run):
    (run / "checkpoints/step_00000800/manifest.json").unlink()
    tell(run, STARTED, {"event": "completed", "step": 1000})

    told = explain(run)

    assert (told.state, told.lost_steps, told.next) == ("finished", 0, "forge report runs/x")
    assert "lost" not in in_words(told)


def test_a_run_that_goes_on_or_has_not_begun_says_so(run, capsys):
    tell(run, STARTED, age=0)
    assert main(["explain", str(run)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "runs/x has not stopped: it is running, in step 812 of 1000.",
        "next, to see its lines as they come: forge runs -f runs/x",
    ]

    prepared = Path("runs/new")
    prepared.mkdir()
    (prepared / "job.toml").write_text(JOB)
    assert main(["explain", str(prepared)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "runs/new has never started.",
        "next, to start it: forge run runs/new/job.toml",
    ]


def test_the_command_for_a_directory_with_odd_letters_is_one_that_a_shell_takes(run):
    tell(run, STARTED, failed("LostPeerError: x", 5))
    (run / "environment.json").unlink()
    odd = run.rename("runs/it's $HOME")

    assert shlex.split(explain(odd).next) == ["forge", "run", "runs/it's $HOME/job.toml"]
    tell(odd, STARTED, {"event": "completed", "step": 1000})
    assert shlex.split(explain(odd).next) == ["forge", "report", "runs/it's $HOME"]
    tell(odd, STARTED, age=0)
    assert shlex.split(explain(odd).next) == ["forge", "runs", "-f", "runs/it's $HOME"]


@pytest.mark.parametrize("name", ["x", "group/x"])
@pytest.mark.parametrize("home", ["runs", "HERE/runs"])
@pytest.mark.parametrize("copied_to", ["runs/y", "copies/x"])
def test_a_copy_of_a_run_is_continued_and_not_the_run_that_it_was_copied_from(run, monkeypatch, name, home, copied_to):
    Path("runs/group").mkdir()
    run = run.rename(Path("runs") / name)
    place = home.replace("HERE", str(Path.cwd()))
    (run / "job.toml").write_text(f'{JOB}[run]\ndir = "{place}"\nname = "{name}"\n')
    tell(run, STARTED, failed("LostPeerError: x", 5))
    copy = Path(shutil.copytree(run, copied_to)).resolve()

    assert explain(run).next == "forge run c.toml --nproc 4"
    assert explain(copy).next == f"forge run c.toml --nproc 4 run.dir={copy.parent} run.name={copy.name}"
    run = run.resolve()
    monkeypatch.chdir("/")
    assert explain(run).next == "forge run c.toml --nproc 4"


def test_ranks_of_another_launcher_are_not_forgotten(run):
    (run / "environment.json").write_text(json.dumps({"command": "forge run c.toml", "world_size": 16}))
    tell(run, STARTED, failed("LostPeerError: x", 5))

    assert explain(run).notes == [
        "Its 16 ranks were started by a launcher, such as torchrun: start them by that again."
    ]


def test_damaged_files_cost_no_more_than_what_they_would_tell(run):
    tell(run, STARTED, failed("LostPeerError: x", 5))
    (run / "job.toml").write_text("[train")
    (run / "environment.json").write_text("{")
    (run / "metrics.jsonl").write_bytes(b"\xff\n[1]\n")
    with (run / "events.jsonl").open("a") as file:
        file.write('{"event": "sav')

    told = explain(run)

    assert (told.exit_code, told.step, told.steps, told.lost_seconds) == (5, 812, None, None)
    assert told.next == "forge run runs/x/job.toml"


def test_json_has_the_same(run, capsys):
    tell(run, STARTED, failed("LostPeerError: x", 5))

    assert main(["explain", "--json", str(run)]) == 0

    told = json.loads(capsys.readouterr().out)
    assert {key: told[key] for key in ("run", "state", "exit_code", "step", "checkpoint", "lost_steps", "next")} == {
        "run": "runs/x",
        "state": "failed",
        "exit_code": 5,
        "step": 812,
        "checkpoint": 800,
        "lost_steps": 12,
        "next": "forge run c.toml --nproc 4",
    }


def test_what_is_no_run_is_refused_with_the_nearest(run, capsys):
    assert main(["explain", "runs/xx"]) == main(["explain", "runs"]) == 2

    assert capsys.readouterr().err.splitlines() == [
        "error: RUN: runs/xx is not a run's directory: there is no such directory; did you mean runs/x?",
        "error: RUN: runs is not a run's directory: there is no job.toml in it that can be read",
    ]
