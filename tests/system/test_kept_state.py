"""What callbacks and trackers keep over a resume, in a run with a plugin of somebody else's."""

import json

import pytest

from forge_core.cli import main

PLUGIN = """
    from forge_core.api import Component, hookimpl

    @hookimpl
    def forge_trackers():
        for name in ("service", "failing"):
            yield Component(name=name, summary="for a test", factory=f"acme.parts:{name}", config="acme.config:Empty")

    @hookimpl
    def forge_callbacks():
        yield Component(name="odd", summary="for a test", factory="acme.parts:Odd", config="acme.config:Empty")
"""
CONFIG = """
    import attrs

    @attrs.frozen(kw_only=True)
    class Empty:
        '''Nothing.'''
"""
PARTS = """
    import torch
    import uuid

    from forge_core.contracts.callback import Callback
    from forge_core.contracts.tracker import Tracker


    class Service(Tracker):
        fails = False

        def __init__(self, config, /, *, run_dir, **_):
            self.file = run_dir / f"{type(self).__name__}.txt"
            self.id = None

        def log(self, step, metrics):
            self.id = self.id or uuid.uuid4().hex
            with self.file.open("a") as file:
                file.write(f"{self.id} {step}\\n")

        def state(self):
            return {"id": self.id}

        def load_state(self, state, version):
            self.id = state["id"]

        def close(self, outcome):
            pass


    class Failing(Service):
        def log(self, step, metrics):
            super().log(step, metrics)
            if step in (7, 12):
                raise OSError("the service is down")


    class Odd(Callback):
        def __init__(self, config, /):
            pass

        def state(self):
            return {"seen": torch.ones(2)}


    service, failing = Service, Failing
"""


@pytest.fixture
def start(tiny, make_distribution):
    make_distribution("acme", files={"acme/plugin.py": PLUGIN, "acme/config.py": CONFIG, "acme/parts.py": PARTS})
    tiny.config.write_text(tiny.config.read_text() + '[[trackers]]\nname = "service"\n[[trackers]]\nname = "failing"\n')

    def run(*arguments):
        return main(["run", str(tiny.config), "checkpoint.interval=5", *arguments])

    run.path = tiny.path()
    return run


def _ids(start, name):
    return [line.split()[0] for line in (start.path / f"{name}.txt").read_text().splitlines()]


def test_a_tracker_finds_its_run_again(start):
    assert start("train.steps=10") == 0
    assert start("train.steps=15") == 0

    assert len(_ids(start, "Service")) == 15
    assert len(set(_ids(start, "Service"))) == 1
    state = json.loads((start.path / "checkpoints/step_00000010/state.json").read_text())
    entry = state["trackers"]["plugin.acme.tracker.service"]
    assert entry == {"version": 1, "state": {"id": _ids(start, "Service")[0]}}


def test_a_tracker_that_fails_twice_is_asked_again_at_each_start_and_keeps_its_run(start):
    assert start("train.steps=10") == 0  # it fails at step 7
    assert start("train.steps=15") == 0  # and at step 12
    assert start("train.steps=20") == 0

    ids = _ids(start, "Failing")
    assert len(ids) == 7 + 2 + 5
    assert len(set(ids)) == 1


def test_state_that_json_cannot_hold_is_named_and_not_saved(start, capsys):
    assert start("callbacks=[{name='odd'}]") == 2

    said = capsys.readouterr().err
    assert "plugin.acme.callback.odd: its state['seen'] is a Tensor; state must be made of" in said
    assert not (start.path / "checkpoints" / "latest").exists()
