"""For pytest: a class or function with ``@component`` in a file that it collects is tested by the kit of its kind."""

from __future__ import annotations

import inspect
from typing import Any

import pytest


def pytest_pycollect_makeitem(collector: Any, name: str, obj: object) -> pytest.Collector | None:
    """Give the conformance class in place of what is decorated."""
    is_decorated = (inspect.isclass(obj) or inspect.isfunction(obj)) and "__forge_component__" in vars(obj)
    if not is_decorated or obj.__module__ != collector.obj.__name__:
        return None
    from forge_testing.plugin_file import case_name, cases_of  # it imports torch, which most collections do without

    about, _, _ = vars(obj)["__forge_component__"]
    case = cases_of(collector.obj)[case_name(about)]
    vars(collector.obj).setdefault(case.__name__, case)  # where several ranks look for it
    return pytest.Class.from_parent(collector, name=case.__name__, obj=case)
