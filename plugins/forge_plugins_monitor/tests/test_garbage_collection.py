"""``garbage_collection``, by what Python itself says of its collections."""

import gc
import weakref
from typing import ClassVar

import attrs
import pytest

from forge_plugins_monitor.config import GarbageCollectionConfig
from forge_plugins_monitor.garbage_collection import GarbageCollection
from forge_testing.callback import CallbackConformance


class TestGarbageCollection(CallbackConformance):
    component = "forge-plugins-monitor:garbage_collection"
    config: ClassVar = {"interval": 2}

    @pytest.fixture(autouse=True)
    def _collector(self, collector):
        """The kit starts callbacks that it does not end."""


@pytest.fixture
def collector():
    """As it is outside of tests, where Python collects by itself."""
    gc.enable()
    yield
    gc.enable()


@attrs.frozen
class _Step:
    step: int


class _Knot:
    """Refers to itself, so that only a collection finds it."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_goes_in_every_so_many_steps_and_at_no_other_time(collector):
    callback = GarbageCollection(GarbageCollectionConfig(interval=3))
    callback.run_start(None)
    alive = []
    for step in range(1, 7):
        knot = weakref.ref(_Knot())
        _many = [[] for _ in range(10_000)]  # enough for Python to collect by itself
        callback.step_end(None, _Step(step))
        alive.append(knot() is not None)

    assert alive == [True, True, False, True, True, False]


@pytest.mark.parametrize(("end", "given"), [("run_end", ""), ("run_failed", RuntimeError())])
def test_after_the_run_python_collects_by_itself_again(collector, end, given):
    callback = GarbageCollection(GarbageCollectionConfig())
    callback.run_start(None)
    during = gc.isenabled()
    getattr(callback, end)(None, 7, given)

    assert (during, gc.isenabled()) == (False, True)
