"""Where a thread is, said while it goes on."""

import sys
import threading
from contextlib import contextmanager
from functools import partial

import pytest

from forge_core.contracts.callback import Callback
from forge_core.train.events import Events
from forge_plugins_monitor.peers.position import position_of_error, position_of_thread

NAME = "callbacks[0] plugin.acme.callback.waits"
WAIT = """
def wait(is_there, lock):
    is_there.set()
    lock.acquire()
"""


@pytest.fixture
def no_frames(monkeypatch):
    """The thread is not asked for its frames: those that torch's compiler has freed may be anything."""
    monkeypatch.delattr(sys, "_current_frames")


@contextmanager
def waiting_in(file, work=lambda wait: wait()):
    """A thread in ``work``, which waits in a function of this file, by its number."""
    scope, is_there, lock = {}, threading.Event(), threading.Lock()
    exec(compile(WAIT, file, "exec"), scope)
    thread = threading.Thread(target=work, args=(partial(scope["wait"], is_there, lock),))
    with lock:
        thread.start()
        assert is_there.wait(60)
        yield thread.ident
    thread.join()


def in_a_callback(work):
    class Waits(Callback):
        def step_start(self, run, step):
            work()

    Events([(NAME, Waits())]).call("step_start", run=None, step=3)


def test_it_is_found_without_the_frames_of_the_thread(no_frames):
    with waiting_in("/jobs/reader.py") as thread:
        assert position_of_thread(thread) == "reader.py:4"


def test_it_is_outside_of_torch(no_frames):
    with waiting_in("/site/torch/distributed/x.py") as thread:
        assert position_of_thread(thread).startswith("test_position.py:")


def test_the_callback_is_told_by_the_events():
    class Waits(Callback):
        def step_start(self, run, step):
            said.append(events.calling)

    said, events = [], None
    events = Events([(NAME, Waits())])
    events.call("step_start", run=None, step=3)

    assert [*said, events.calling] == [f"{NAME}, step_start", ""]


def test_nothing_fails_where_nothing_can_be_written(monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/nowhere/at/all")

    assert position_of_thread(threading.get_ident()) == ""


def test_a_thread_that_has_ended_is_nowhere():
    with waiting_in("/jobs/reader.py") as thread:
        pass

    assert position_of_thread(thread) == ""


def test_an_error_of_a_callback_names_it():
    def fail():
        raise RuntimeError

    with pytest.raises(RuntimeError) as caught:
        in_a_callback(fail)

    assert position_of_error(caught.value).endswith(f", in {NAME}, step_start")
