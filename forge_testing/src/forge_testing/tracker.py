"""Conformance of trackers (contract: ``forge_core.contracts.tracker``)."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from forge_core.contracts.tracker import Tracker
from forge_core.run.trackers import SLOW_LINE
from forge_testing.component_case import ComponentCase

_JOB = {"run": {"name": "conformance"}, "train": {"steps": 3, "seq_len": 8}, "optimizer": {"betas": [0.9, 0.95]}}


class TrackerConformance(ComponentCase):
    """Subclass it, name the component, and pytest runs every check below on it. Configure it to work offline."""

    kind = "tracker"
    run_name: ClassVar[str] = "conformance"

    @pytest.fixture(autouse=True)
    def _elsewhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "working_directory").mkdir()
        monkeypatch.chdir(tmp_path / "working_directory")

    def start(self, directory: Path, job: dict[str, Any] | None = None) -> Tracker:
        run_dir = directory / "run"
        run_dir.mkdir(exist_ok=True)
        tracker: Tracker = self.make(run_name=self.run_name, run_dir=run_dir, job=_JOB if job is None else job)
        return tracker

    def test_follows_a_run(self, tmp_path: Path) -> None:
        tracker = self.start(tmp_path)

        tracker.log(1, {"loss": 3.5, "lr": 1e-3, "tokens": 64})
        tracker.log(2, {"loss": 3.25, "lr": 1e-3, "tokens": 128, "memory_gib": 0.5})
        tracker.log(2, {"eval/loss": 3.3, "eval/perplexity": 27.1})
        tracker.log_series(
            2, {"load/blocks.0.feed_forward": [5.0, 0.0, 11.0], "load/blocks.1.feed_forward": [8.0, 8.0]}
        )
        tracker.close("completed")

    @pytest.mark.parametrize("outcome", ["completed", "stopped", "failed"])
    def test_closes_after_every_outcome(self, tmp_path: Path, outcome: str) -> None:
        self.start(tmp_path).close(outcome)

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), 0, 2**63])
    def test_takes_unusual_values(self, tmp_path: Path, value: float) -> None:
        tracker = self.start(tmp_path)

        tracker.log(1, {"loss": value})
        tracker.close("failed")

    def test_leaves_what_it_is_given(self, tmp_path: Path) -> None:
        job, metrics = copy.deepcopy(_JOB), {"loss": 3.5}

        tracker = self.start(tmp_path, job)
        tracker.log(1, metrics)
        tracker.close("completed")

        assert job == _JOB, "the tracker changes the job it is given"
        assert metrics == {"loss": 3.5}, "the tracker changes the metrics it is given"

    def test_a_resumed_run_goes_on(self, tmp_path: Path) -> None:
        first = self.start(tmp_path)
        first.log(1, {"loss": 3.5})
        first.close("stopped")

        second = self.start(tmp_path)
        second.log(2, {"loss": 3.25})
        second.close("completed")

    def test_state_survives(self, tmp_path: Path) -> None:
        first = self.start(tmp_path)
        first.log(1, {"loss": 3.5})
        first.log(1, {"eval/loss": 3.25, "eval/perplexity": 25.8})
        version, state = first.state_version, dict(first.state())
        first.close("stopped")
        assert isinstance(version, int), f"state_version must be an int, got {type(version).__name__}"
        try:
            saved = json.loads(json.dumps(state, allow_nan=False))
        except (TypeError, ValueError) as error:
            pytest.fail(f"state must be made of finite JSON values: {error}")

        second = self.start(tmp_path)
        if saved:  # nothing is saved of a tracker without state
            second.load_state(saved, version)
        restored = json.loads(json.dumps(dict(second.state())))
        second.close("completed")

        assert restored == saved, f"a tracker that loads the state {saved} has the state {restored}"

    def test_takes_no_time_for_a_line(self, tmp_path: Path) -> None:
        """It has a thread of its own, on which it falls behind."""
        tracker = self.start(tmp_path)

        seconds = []
        for step in (1, 2):
            started = time.monotonic()
            tracker.log(step, {"loss": 3.5})
            seconds.append(time.monotonic() - started)
        tracker.close("completed")

        assert min(seconds) < SLOW_LINE, (
            f"log takes {min(seconds):.1f} s for a line, and a run may log several a second; collect lines, and send "
            "them together"
        )

    def test_writes_into_the_run_directory_only(self, tmp_path: Path) -> None:
        tracker = self.start(tmp_path)
        tracker.log(1, {"loss": 3.5})
        tracker.close("completed")

        stray = sorted(path.name for path in Path.cwd().iterdir())
        assert not stray, f"the tracker writes {', '.join(stray)} into the working directory; use run_dir"
