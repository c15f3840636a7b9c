from importlib.metadata import version
from types import SimpleNamespace

import pytest

from forge_core.checkpoint.component_state import load_states, states_of
from forge_core.contracts.callback import Callback
from forge_core.contracts.observer import Observer
from forge_core.errors import PluginError
from forge_core.train.events import EVENTS, OBSERVED, Events, mistaken_events


class Recorder(Callback):
    def __init__(self, name, heard):
        self.name, self.heard = name, heard

    def step_end(self, context):  # a subset of the event's arguments
        self.heard.append((self.name, context.step))


def test_every_event_of_the_contract_is_called_by_name():
    declared = {name for name in vars(Callback) if not name.startswith("_")} - {
        "state",
        "load_state",
        "state_version",
        "tensors",
    }

    assert declared == set(EVENTS)
    assert {name for name in vars(Observer) if not name.startswith("_")} == set(OBSERVED)


def test_callbacks_are_called_in_the_order_of_the_job_each_with_the_arguments_it_takes():
    heard = []
    lifecycle = Events([("a", Recorder("first", heard)), ("b", Recorder("second", heard))])

    lifecycle.call("step_end", run=None, context=SimpleNamespace(step=3))

    assert heard == [("first", 3), ("second", 3)]


def test_events_of_observers_are_answered_and_callbacks_may_have_methods_of_these_names():
    class Looks(Observer):
        def find_origin(self, bad):
            return bad

    class Other(Callback):
        def find_origin(self, anything):
            raise AssertionError("this is a method of its own")

    lifecycle = Events([("a", Looks()), ("b", Other())])

    assert lifecycle.call("find_origin", run=None, bad="step 3") == ["step 3"]


def test_an_event_that_nobody_overrides_has_no_listeners():
    lifecycle = Events([("a", Recorder("x", []))])

    assert lifecycle.listens("step_end")
    assert not lifecycle.listens("step_start")


def test_an_argument_that_the_event_does_not_have_is_refused_before_the_run():
    class Wrong(Callback):
        def step_end(self, trainer):
            pass

    with pytest.raises(PluginError, match="trainer"):
        Events([("a", Wrong())])


def test_an_event_that_nothing_would_await_is_refused_before_the_run():
    class Async(Callback):
        async def step_end(self, context):
            pass

    with pytest.raises(PluginError, match="a: step_end is async; nothing awaits it"):
        Events([("a", Async())])


def test_a_method_that_looks_like_an_event_is_named_and_one_that_helps_is_not():
    class Silent(Callback):
        def on_step_end(self, context):  # other frameworks call it so
            pass

        def load_states(self, state):
            pass

        def run_ended(self, path):  # takes what no event has
            pass

        def step_ends(self, context):  # called by its own
            pass

        def step_end(self, context):
            self.step_ends(context)

        def _step_end(self, context):
            pass

    class Inherits(Silent):
        def report(self, run, context):
            pass

    assert [*mistaken_events([("callback 'a'", Inherits()), ("callback 'b'", Recorder("x", []))])] == [
        "callback 'a': nothing calls its method on_step_end; did you mean step_end?",
        "callback 'a': nothing calls its method load_states; did you mean load_state?",
    ]


def test_a_callback_that_raises_is_named():
    class Failing(Callback):
        def step_start(self, step):
            raise ValueError("no")

    with pytest.raises(ValueError, match="no") as caught:
        Events([("acme:failing", Failing())]).call("step_start", run=None, step=1)

    assert "acme:failing in step_start" in caught.value.__notes__[0]


def test_a_callback_that_fails_in_run_failed_is_reported_and_hides_nothing():
    class Failing(Callback):
        def run_failed(self):
            raise ValueError("again")

    lines = []
    Events([("acme:failing", Failing())]).call_failed(lines.append, run=None, step=1, error=KeyError())

    assert "acme:failing failed in run_failed: ValueError: again" in lines[0]


def test_state_goes_back_to_the_callback_of_the_same_namespace_and_the_rest_is_named():
    class Counting(Callback):
        state_version = 2

        def __init__(self):
            self.count = 0

        def state(self):
            return {"count": self.count}

        def load_state(self, state, version):
            assert version == 2
            self.count = state["count"]

    first, second, again, twice = Counting(), Counting(), Counting(), Counting()
    first.count, second.count = 5, 7
    saved = states_of([("plugin.d.callback.c", first), ("plugin.d.callback.c", second)])
    others = ("plugin.new.callback.n", Counting())

    unclaimed = load_states(
        [others, ("plugin.d.callback.c", again), others, ("plugin.d.callback.c", twice)], {**saved, "plugin.gone": {}}
    )

    assert (again.count, twice.count) == (5, 7)
    assert unclaimed == ["plugin.gone"]


def test_state_that_is_no_dictionary_is_refused_by_name():
    class Listing(Callback):
        def state(self):
            return [1]

    with pytest.raises(PluginError, match=r"^plugin\.d\.callback\.c: its state is a list, which must be a dictionary$"):
        states_of([("plugin.d.callback.c", Listing())])


def test_state_that_a_component_does_not_take_is_told_with_the_versions_of_then_and_now():
    class Renamed(Callback):
        state_version = 2

        def load_state(self, state, version):
            self.count = state["count"]

    saved = {"plugin.click.callback.counter": {"version": 1, "state": {"counter": 3}}}

    with pytest.raises(PluginError) as caught:
        load_states([("plugin.click.callback.counter", Renamed())], saved, {"click": "0.1"})

    assert str(caught.value).startswith(
        "plugin.click.callback.counter does not take the state of the checkpoint (KeyError: 'count'). It was saved "
        f"with click 0.1 (state_version 1); here is {version('click')} (state_version 2). Install the earlier version"
    )
