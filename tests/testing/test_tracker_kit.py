"""The tracker kit passes a tracker that keeps the contract, and has a sentence for each way to break it."""

import time
from pathlib import Path

import pytest

from forge_core.contracts.tracker import Tracker
from forge_testing.tracker import TrackerConformance


class Lines(Tracker):
    def __init__(self, *, run_name, run_dir, job):
        self.file = (run_dir / "lines.txt").open("a")

    def log(self, step, metrics):
        for name, value in metrics.items():
            self.file.write(f"{step} {name} {value}\n")

    def close(self, outcome):
        self.file.close()


class Case(TrackerConformance):
    tracker = Lines

    def make(self, **given):
        return self.tracker(**given)


class TestLines(Case):
    pass


def faulty(**methods):
    return type("Faulty", (Lines,), methods)


class Exclusive(Lines):
    def __init__(self, *, run_name, run_dir, job):
        self.file = (run_dir / "lines.txt").open("x")


class Stray(Lines):
    def __init__(self, *, run_name, run_dir, job):
        super().__init__(run_name=run_name, run_dir=Path(), job=job)


class Greedy(Lines):
    def __init__(self, *, run_name, run_dir, job):
        super().__init__(run_name=run_name, run_dir=run_dir, job=job)
        job.clear()


def fixed_columns(self, step, metrics):
    self.file.write(f"{metrics['loss']}\n")


def only_completed(self, outcome):
    self.file.close()
    if outcome != "completed":
        raise ValueError(f"unknown outcome {outcome}")


def whole_numbers(self, step, metrics):
    self.file.write(str([int(value) for value in metrics.values()]))


FAULTS = [
    (faulty(log=fixed_columns), "test_follows_a_run", (), KeyError, "loss"),
    (
        faulty(close=only_completed),
        "test_closes_after_every_outcome",
        ("failed",),
        ValueError,
        "unknown outcome failed",
    ),
    (faulty(log=whole_numbers), "test_takes_unusual_values", (float("nan"),), ValueError, "cannot convert float NaN"),
    (Greedy, "test_leaves_what_it_is_given", (), AssertionError, "the tracker changes the job it is given"),
    (
        faulty(log=lambda self, step, metrics: metrics.clear()),
        "test_leaves_what_it_is_given",
        (),
        AssertionError,
        "the tracker changes the metrics it is given",
    ),
    (Exclusive, "test_a_resumed_run_goes_on", (), FileExistsError, "lines.txt"),
    (
        faulty(state=lambda self: {"file": self.file}),
        "test_state_survives",
        (),
        pytest.fail.Exception,
        "state must be made of finite JSON values",
    ),
    (
        faulty(state=lambda self: {"run": id(self)}),
        "test_state_survives",
        (),
        AssertionError,
        "a tracker that loads the state .* has the state",
    ),
    (
        faulty(log=lambda self, step, metrics: time.sleep(1.1)),
        "test_takes_no_time_for_a_line",
        (),
        AssertionError,
        "log takes 1.1 s for a line",
    ),
    (
        Stray,
        "test_writes_into_the_run_directory_only",
        (),
        AssertionError,
        "the tracker writes lines.txt into the working directory; use run_dir",
    ),
]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files that faulty trackers leave open
@pytest.mark.parametrize(("tracker", "check", "given", "error", "sentence"), FAULTS)
def test_a_fault_is_found_and_told(tmp_path, monkeypatch, tracker, check, given, error, sentence):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    case = Case()
    case.tracker = tracker

    with pytest.raises(error, match=sentence):
        getattr(case, check)(tmp_path, *given)


def test_every_check_has_a_fault_that_it_finds():
    checks = {name for name in vars(TrackerConformance) if name.startswith("test_")}

    assert {check for _, check, *_ in FAULTS} == checks
