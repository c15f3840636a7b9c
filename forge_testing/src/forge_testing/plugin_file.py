"""Conformance of what a plugin file registers: ``pytest my_router.py`` runs the kit of each component, unasked."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from forge_core.registry.plugin_files import PROVIDER, registered, trust
from forge_testing.component_case import ComponentCase


def cases_of(module: ModuleType) -> dict[str, type[ComponentCase]]:
    """A conformance class for each component of a module that is a plugin file: ``{"TestRandom": …}``.

    Raises:
        LookupError: a component is of a kind that has no kit here.
    """
    file = Path(str(module.__file__))
    texts = texts_of(file)
    found = {}
    for made, about, example, checks in registered(module):
        name = case_name(about)
        own = {
            **checks,
            "component": f"{PROVIDER}{file.name}:{about['name']}",
            "config": example,
            "files": texts,
            "__module__": module.__name__,
            "__doc__": made.__doc__,
        }
        found[name] = type(name, (_kit(about),), own)
    return found


def case_name(about: Mapping[str, Any]) -> str:
    """``"TestNoisyGate"`` of the component ``noisy_gate``."""
    return f"Test{_capitalised(about['name'])}"


def texts_of(file: str | Path) -> Mapping[str, str]:
    """The text of a plugin file by its name, for ``files`` of a conformance class."""
    text = Path(file).read_text(encoding="utf-8")
    trust(text)
    return {Path(file).name: text}


def _kit(about: Mapping[str, Any]) -> type[ComponentCase]:
    name = "split_pass" if about.get("phase") == "split" else about["kind"]
    module = f"forge_testing.{name}"
    if find_spec(module) is None:
        raise LookupError(f"there is no kit for the kind {about['kind']!r}, of which is {about['name']!r}")
    kit: type[ComponentCase] = getattr(import_module(module), f"{_capitalised(name)}Conformance")
    return kit


def _capitalised(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))
