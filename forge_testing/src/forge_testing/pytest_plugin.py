"""For pytest: a class or function with ``@component`` in a file that it collects is tested by the kit of its kind."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest


def pytest_pycollect_makeitem(collector: Any, name: str, obj: object) -> pytest.Collector | None:
    """Give the conformance class in place of what is decorated."""
    is_decorated = (inspect.isclass(obj) or inspect.isfunction(obj)) and "__forge_component__" in vars(obj)
    if not is_decorated or obj.__module__ != collector.obj.__name__:
        return None
    from forge_testing.plugin_file import cases_in  # it imports torch, which most collections do without

    about, *_ = vars(obj)["__forge_component__"]
    module = collector.obj
    wanted = about["kind"], about["name"]
    (case,) = (one for one in cases_in(Path(module.__file__)) if (one.kind, one.name) == wanted)
    collected = vars(module).setdefault(case.title, case.conformance(module.__name__))  # several ranks look for it
    return pytest.Class.from_parent(collector, name=case.title, obj=collected)
