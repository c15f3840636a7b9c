"""Conformance of what a plugin file registers: ``pytest my_router.py`` runs the kit of each component, unasked."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs

from forge_core.config.toml_file import read_plugin_file
from forge_core.errors import ConfigError, did_you_mean, with_article
from forge_core.registry.component import Kind, kind_words
from forge_core.registry.discovery import discover
from forge_core.registry.plugin_files import PROVIDER, registered, with_files
from forge_testing.component_case import ComponentCase


@attrs.frozen
class FileCase:
    """A component of a plugin file, and how it is tested."""

    file: Path
    texts: Mapping[str, str]
    """The file's, by its name."""
    kind: str
    name: str
    config: Mapping[str, Any]
    """The decorator's ``example``."""
    checks: Mapping[str, Any]
    """The decorator's: attributes of the conformance class."""
    kit: type[ComponentCase]

    @property
    def title(self) -> str:
        """``"TestNoisyGate"`` of the component ``noisy_gate``."""
        return f"Test{_capitalised(self.name)}"

    def conformance(self, module: str) -> type[ComponentCase]:
        """The class that pytest collects, as if ``module`` defined it."""
        own = {
            "component": f"{PROVIDER}{self.file.name}:{self.name}",
            "config": self.config,
            "plugin_files": self.texts,
        }
        return type(self.title, (self.kit,), {**self.checks, **own, "__module__": module})


def cases_in(file: Path) -> list[FileCase]:
    """The components that a plugin file registers.

    Raises:
        ConfigError: it is no plugin file, a component is of a kind without a kit here, or its ``checks`` name what the
            kit has not.
    """
    texts = {file.name: read_plugin_file(file)}
    catalog = with_files(discover(), texts)
    (plugin,) = (one for one in catalog.plugins if one.distribution.startswith(PROVIDER))
    module = import_module(plugin.components[0][1].factory.partition(":")[0])
    cases = [
        FileCase(file, texts, about["kind"], about["name"], example, checks, _kit(about, catalog.kinds[about["kind"]]))
        for _, about, example, checks in registered(module)
    ]
    for case in cases:
        for name in case.checks:
            if not hasattr(case.kit, name):
                hint = did_you_mean(name, [one for one in dir(case.kit) if not one.startswith(("_", "test_"))])
                raise ConfigError(f"{file.name}: checks of '{case.name}': {case.kit.__name__} has no {name!r}.{hint}")
    return cases


def conformance_of(module: ModuleType, title: str) -> type[ComponentCase]:
    """The conformance class of this title, for a module that is a plugin file."""
    (case,) = (one for one in cases_in(Path(str(module.__file__))) if one.title == title)
    return case.conformance(module.__name__)


def _kit(about: Mapping[str, Any], kind: Kind) -> type[ComponentCase]:
    """Those of the core's kinds are here, and others beside the contract of their kind."""
    name = "split_pass" if about.get("phase") == "split" else kind.name
    package = kind.contract.partition(".")[0]
    folder = "forge_testing" if package == "forge_core" else f"{package}.testing"
    if find_spec(folder) is None or find_spec(f"{folder}.{name}") is None:
        kind_of_it = with_article(kind_words(kind.name))
        raise ConfigError(f"'{about['name']}' is {kind_of_it}, for which {folder} has no kit")
    kit: type[ComponentCase] = getattr(import_module(f"{folder}.{name}"), f"{_capitalised(name)}Conformance")
    return kit


def _capitalised(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))
