"""The effective training time of runs, told from files that tell of failures, steps left out, and too little."""

from __future__ import annotations

import json
import os
import time
import tracemalloc
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs
import pytest

from forge_core.cli import main
from forge_plugins_monitor.run_states.effective_time import effective_time
from forge_plugins_monitor.run_states.progress import progress_of

BEGUN = 1_700_000_000.0
JOB = {"train": {"steps": 1000}}


def make_run(folder: Path, *, events: list[Any], metrics: list[Any], saved: int = 0, seen: float = 1000.0) -> Path:
    """Args: events are (seconds since the first, name, facts), metrics are (step, step_seconds, skipped)."""
    run = folder / "run"
    run.mkdir()
    (run / "job.toml").write_text("[train]\nsteps = 1000\n")
    (run / "events.jsonl").write_text("".join(json.dumps(event_of(event)) + "\n" for event in events))
    (run / "metrics.jsonl").write_text("".join(json.dumps(line_of(line)) + "\n" for line in metrics))
    (run / "log.txt").touch()
    if saved:
        (run / f"checkpoints/step_{saved:08d}").mkdir(parents=True)
        (run / f"checkpoints/step_{saved:08d}/manifest.json").write_text("{}")
    for file in run.iterdir():
        os.utime(file, (BEGUN + seen,) * 2)
    return run


def event_of(event: Any) -> Any:
    if not isinstance(event, tuple):
        return event
    seconds, name, facts = event
    when = datetime.fromtimestamp(BEGUN + seconds, UTC).isoformat(timespec="milliseconds")
    return {"time": when, "event": name, **facts}


def line_of(line: Any) -> Any:
    return {"step": line[0], "step_seconds": line[1], "skipped": line[2]} if isinstance(line, tuple) else line


def told(run: Path) -> Any:
    return effective_time(run, progress_of(run, JOB))


STARTED = (0, "started", {"step": 0})


def test_steps_that_are_not_logged_have_the_duration_of_their_line(tmp_path):
    """The first line is slower as it compiles, and is not believed."""
    run = make_run(
        tmp_path,
        events=[STARTED, (90, "saved", {"step": 30, "seconds_blocked": 2.5}), (100, "completed", {"step": 30})],
        metrics=[(1, 20.0, 0), (10, 2.0, 0), {"step": 10, "eval/loss": 1.0}, (30, 1.0, 0)],
        saved=30,
    )

    found = told(run)

    assert found.kept_seconds == 1 * 1.5 + 9 * 2.0 + 20 * 1.0
    assert (found.kept_steps, found.seconds, found.ratio) == (30, 100, found.kept_seconds / 100)
    assert (found.waited_seconds, found.starts) == (2.5, 1)


def test_steps_that_were_left_out_do_not_count(tmp_path):
    run = make_run(
        tmp_path,
        events=[STARTED, (100, "stopped", {"step": 30})],
        metrics=[(10, 1.0, 0), (20, 1.0, 3), (30, 1.0, 4)],
        saved=30,
    )

    found = told(run)

    assert (found.kept_steps, found.left_out_steps, found.kept_seconds) == (26, 4, 26)


def test_nor_do_those_of_fp16_whose_gradients_overflow(tmp_path):
    lines = [{"step": step, "step_seconds": 1.0, "skipped": 1, "overflows": 2} for step in (10, 20)]
    run = make_run(tmp_path, events=[STARTED, (100, "stopped", {"step": 20})], metrics=lines, saved=20)

    found = told(run)

    assert (found.kept_steps, found.left_out_steps, found.kept_seconds) == (17, 3, 17)


@pytest.mark.parametrize(
    ("events", "kept", "seconds"),
    [
        ([STARTED], 20, 60),  # killed: its files were last written then
        ([STARTED, (50, "failed", {"step": 30})], 20, 50),
        ([STARTED, (50, "preempted", {"step": 30})], 30, 50),
        ([STARTED, (40, "failed", {"step": 9}), (45, "started", {"step": 0}), (55, "stopped", {"step": 30})], 30, 55),
    ],
    ids=["killed", "failed", "saved before it left", "begun again"],
)
def test_steps_after_the_last_checkpoint_count_where_they_were_saved(tmp_path, events, kept, seconds):
    run = make_run(tmp_path, events=events, metrics=[(10, 1.0, 0), (30, 1.0, 0)], saved=20, seen=60)

    found = told(run)

    assert (found.kept_steps, found.kept_seconds) == (kept, kept)
    assert found.seconds == pytest.approx(seconds, abs=0.1)


def test_time_goes_on_for_a_run_that_trains(tmp_path):
    run = make_run(tmp_path, events=[STARTED], metrics=[(10, 1.0, 0), (30, 1.0, 0)], saved=20)
    os.utime(run / "log.txt")

    found = told(run)

    assert found.kept_steps == 30
    assert found.seconds == pytest.approx(time.time() - BEGUN, abs=60)


def test_a_job_that_starts_again_after_a_failure_has_lost_what_was_not_saved(tmp_path):
    failed = (50, "failed", {"step": 30})
    run = make_run(tmp_path, events=[STARTED, failed], metrics=[(10, 1.0, 0), (30, 1.0, 0)], saved=20)
    progress = attrs.evolve(progress_of(run, JOB), state="running")  # as its queue says

    found = effective_time(run, progress)

    assert found is not None
    assert found.kept_steps == 20
    assert found.seconds == pytest.approx(time.time() - BEGUN, abs=60)


@pytest.mark.parametrize(
    ("events", "metrics"),
    [
        ([], [(10, 1.0, 0)]),
        ([STARTED, (50, "completed", {"step": 10})], []),
        ([STARTED, (50, "completed", {"step": 10})], [{"step": 10, "loss": 1.0}]),
        ([(0, "saved", {"step": 5}), (50, "completed", {"step": 10})], [(10, 1.0, 0)]),
        ([{"event": "started", "time": "2026", "step": 0}, (50, "completed", {"step": 10})], [(10, 1.0, 0)]),
        (
            [STARTED, {"event": "completed", "time": "2030-01-01T00:00:00", "step": 10}],
            [(10, 1.0, 0)],
        ),  # of which zone?
        ([STARTED, {"event": "completed", "step": 10}], [(10, 1.0, 0)]),
        ([STARTED, (5, "completed", {"step": 10})], [(10, 1.0, 0)]),  # a clock that was set back
        ([STARTED, (50, "failed", {"step": 10})], [(10, 1.0, 0)]),  # and nothing saved
    ],
)
def test_what_the_files_do_not_tell_is_not_said(tmp_path, capsys, events, metrics):
    run = make_run(tmp_path, events=events, metrics=metrics)

    assert told(run) is None
    assert main(["runs", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["effective_time"] is None
    assert main(["runs", str(run)]) == 0
    assert "effective" not in capsys.readouterr().out


def test_damaged_lines_are_passed_over(tmp_path):
    run = make_run(
        tmp_path,
        events=[STARTED, [], {"event": 5}, (80, "saved", {"step": 20}), (100, "completed", {"step": 20})],
        metrics=[(10, 1.0, 0), {"step": "11", "step_seconds": 1.0}, {"step": 12, "step_seconds": None}, (20, 1.0, 0)],
        saved=20,
    )
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 30, "step_sec')

    found = told(run)

    assert (found.kept_seconds, found.waited_seconds) == (20, 0)


def test_a_long_run_takes_less_memory_than_its_file(tmp_path):
    others = {f"loss/{i}": i / 7 for i in range(40)}
    lines = [{"step": step, "step_seconds": 0.01, "skipped": 0, **others} for step in range(2000)]
    run = make_run(tmp_path, events=[STARTED], metrics=lines)
    progress = progress_of(run, {})

    tracemalloc.start()
    try:
        effective_time(run, progress)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < (run / "metrics.jsonl").stat().st_size


def test_it_is_told_of_one_run_alone(tmp_path, capsys):
    run = make_run(tmp_path, events=[STARTED, (40, "completed", {"step": 20})], metrics=[(20, 1.0, 0)], saved=20)

    assert main(["runs", str(run)]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == (
        "effective training time: 50.0% of 40 s since its start; 20 steps that stay took 20 s; training waited 0 s for "
        "saves"
    )
    assert main(["runs", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["effective_time"] is None
