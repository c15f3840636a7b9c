"""A tracker lives on a thread of its own: what it does there, and what it is not waited for."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from forge_core.contracts.tracker import Tracker
from forge_core.registry.plugin_output import output_of
from forge_core.run import trackers
from forge_core.run.trackers import Trackers


class Counting(Tracker):
    """Its state is the number of its lines."""

    def __init__(self, *, slow=0.0):
        self.lines, self.slow, self.threads = [], slow, {threading.current_thread()}

    def log(self, step, metrics):
        time.sleep(self.slow)
        self.threads.add(threading.current_thread())
        self.lines.append((step, metrics))

    def state(self):
        return {"lines": len(self.lines)}

    def load_state(self, state, version):
        self.lines = [None] * state["lines"]

    def close(self, outcome):
        self.threads.add(threading.current_thread())
        self.lines.append(outcome)


class Stuck(Counting):
    """In its first line, until it is let go."""

    def __init__(self):
        super().__init__()
        self.let_go = threading.Event()

    def log(self, step, metrics):
        self.let_go.wait(60)
        super().log(step, metrics)


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Trackers of a run, and what they say."""
    monkeypatch.setattr(trackers, "job_table", lambda job: {})

    def serve(*made, timeout=30.0, saved=(), active=True):
        uses = [
            SimpleNamespace(provider="acme", name=f"t{place}", qualified_name=f"acme:t{place}") for place in range(9)
        ]
        by_name = {f"t{place}": one for place, one in enumerate(made)}
        run = SimpleNamespace(trackers_timeout=timeout, name="run")
        job = SimpleNamespace(run=run, trackers=uses[: len(made)])
        said = []
        build = lambda use, **given: by_name[use.name]() if isinstance(by_name[use.name], type) else by_name[use.name]  # noqa: E731
        return Trackers(build, job, tmp_path, said.append, dict(saved), active=active), said

    return serve


def lines(served, steps):
    for step in steps:
        served.log({"step": step, "loss": 1.0})


def test_its_state_is_that_after_all_lines_before_the_checkpoint(serve):
    tracker = Counting(slow=0.02)
    served, _ = serve(tracker)

    lines(served, range(5))

    assert served.states() == {"plugin.acme.tracker.t0": {"version": 1, "state": {"lines": 5}}}


def test_one_goes_on_from_its_state_and_is_told_the_outcome_and_its_thread_ends(serve):
    tracker = Counting()
    served, _ = serve(tracker, saved={"plugin.acme.tracker.t0": {"version": 1, "state": {"lines": 5}}})

    lines(served, [1])
    assert served.states()["plugin.acme.tracker.t0"]["state"] == {"lines": 6}
    served.close("failed")

    assert tracker.lines[-1] == "failed"
    (thread,) = tracker.threads - {threading.current_thread()}
    thread.join(10)
    assert not thread.is_alive()


def test_other_ranks_have_none_and_say_nothing_of_states(serve):
    tracker = Counting()
    served, said = serve(tracker, saved={"plugin.gone": {}}, active=False)

    lines(served, range(3))
    served.close("completed")
    assert (tracker.lines, served.states(), said) == ([], {}, [])


def test_what_a_tracker_or_the_caller_does_with_values_is_not_seen_by_another(serve):
    class Clearing(Counting):
        def log(self, step, metrics):
            time.sleep(self.slow)
            self.lines.append((step, dict(metrics)))
            metrics.clear()

        def log_series(self, step, series):
            self.lines.append((step, {name: list(values) for name, values in series.items()}))

    first, stuck = Clearing(), Clearing(slow=0.2)
    served, _ = serve(first, stuck)
    values = [1.0, 2.0]
    lines(served, [1])
    served.log_series(2, {"loads": values})
    values.append(3.0)
    served.close("completed")

    assert first.lines == stuck.lines == [(1, {"loss": 1.0}), (2, {"loads": [1.0, 2.0]}), "completed"]


def test_a_slow_tracker_without_a_state_does_not_hold_up_a_save(serve):
    class Stateless(Tracker):
        let_go = threading.Event()

        def log(self, step, metrics):
            self.let_go.wait(60)

    served, said = serve(Stateless(), Counting())
    lines(served, [1])

    assert served.states() == {"plugin.acme.tracker.t1": {"version": 1, "state": {"lines": 1}}}
    Stateless.let_go.set()
    served.close("completed")
    assert not [line for line in said if "its state is saved as it was" in line]


def test_everything_of_a_tracker_happens_on_one_thread(serve):
    made = []

    class Made(Counting):
        def __init__(self):
            super().__init__()
            made.append(self)

    served, _ = serve(Made)
    lines(served, range(3))
    served.close("completed")

    (tracker,) = made
    assert tracker.lines == [*((step, {"loss": 1.0}) for step in range(3)), "completed"]
    assert len(tracker.threads) == 1
    assert threading.current_thread() not in tracker.threads


def test_a_picture_goes_to_all_of_them_in_its_place(serve, tmp_path):
    class Drawing(Counting):
        def log_figure(self, step, name, path):
            self.lines.append((step, name, path))

    drawing, other = Drawing(), Counting()
    served, said = serve(drawing, other)

    lines(served, [1])
    served.log_figure(1, "map", tmp_path / "map.png")
    lines(served, [2])
    served.close("completed")

    assert drawing.lines[1] == (1, "map", tmp_path / "map.png")
    assert (len(drawing.lines), len(other.lines), said) == (4, 3, [])


def test_they_are_built_one_after_the_other(serve):
    """Side by side, the output of the whole process went on under the name of one of them."""
    under_way, most = [], []

    class Slow(Counting):
        def __init__(self):
            super().__init__()
            under_way.append(self)
            most.append(len(under_way))
            time.sleep(0.05)
            under_way.remove(self)

    serve(Slow, Slow, Slow)

    assert most == [1, 1, 1]


def test_one_that_hangs_is_left_at_the_end_and_others_get_every_line(serve):
    hanging, well = Stuck(), Counting()
    served, said = serve(
        hanging, well, timeout=0.2, saved={"plugin.acme.tracker.t0": {"version": 1, "state": {"lines": 7}}}
    )

    lines(served, range(4))
    states = served.states()
    served.close("completed")

    assert states["plugin.acme.tracker.t0"]["state"] == {"lines": 7}, "as it was"
    assert states["plugin.acme.tracker.t1"]["state"] == {"lines": 4}
    assert len(well.lines) == 4 + 1
    assert [line.partition(" ")[0] for line in said] == ["trackers[0]", "trackers[0]"]
    assert "its state is saved as it was" in said[0]
    assert "is left, with" in said[1]
    hanging.let_go.set()


def test_lines_beyond_what_it_may_be_behind_are_counted(serve, monkeypatch):
    monkeypatch.setattr(trackers, "_WAITING", 10)
    tracker = Stuck()
    served, said = serve(tracker)

    lines(served, range(30))
    tracker.let_go.set()
    served.close("completed")

    n_given = len(tracker.lines) - 1
    assert n_given in (10, 11), "one may be under way"
    assert said == [f"trackers[0] acme:t0 was not given {30 - n_given} lines, as it was 10 behind"]


def test_one_that_takes_long_for_a_line_is_named_once(serve, monkeypatch):
    monkeypatch.setattr(trackers, "SLOW_LINE", 0.01)
    served, said = serve(Counting(slow=0.02))

    lines(served, range(3))
    served.close("completed")

    assert len(said) == 1
    assert said[0].startswith("trackers[0] acme:t0 takes 0.0 s for a line; training does not wait")


@pytest.mark.parametrize("error", [OSError("down"), SystemExit(3)])
def test_one_that_fails_is_reported_and_its_state_stays_what_it_was(serve, error):
    class Failing(Counting):
        def log(self, step, metrics):
            super().log(step, metrics)
            if step == 2:
                raise error

    served, said = serve(Failing())

    lines(served, range(2))
    before = served.states()
    lines(served, range(2, 5))

    assert served.states() == before
    served.close("failed")
    assert said == [f"trackers[0] acme:t0 failed and is not asked again: {type(error).__name__}: {error}"]


def test_a_tracker_that_does_not_get_ready_is_not_waited_for(serve, capsys):
    let_go, ready = threading.Event(), threading.Event()

    class Late(Counting):
        def __init__(self):
            with output_of("acme"):
                let_go.wait(60)
            super().__init__()
            ready.set()

    started = time.monotonic()
    served, said = serve(Late, Counting, timeout=0.2)
    print("of the run")

    assert time.monotonic() - started < 10
    assert said == ["trackers[0] acme:t0 is not ready in time (run.trackers_timeout); training does not wait for it"]
    assert capsys.readouterr().out == "of the run\n"

    lines(served, [1])
    let_go.set()
    assert ready.wait(60)
    served.close("completed")
    late, _ = (one._tracker for one in served._served)
    assert [step for step, _ in late.lines[:-1]] == [1]
