"""What all conformance classes share: which component is under test, how it is built, what it is allowed to fail."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from forge_core.config.builder import ComponentBuilder
from forge_core.contracts.component_ref import ComponentRef
from forge_core.registry.catalog import Catalog
from forge_core.registry.discovery import discover
from forge_core.registry.plugin_files import with_files


class ComponentCase:
    """Base of the conformance classes. A subclass whose name starts with ``Test`` is collected by pytest.

    Name an installed component with ``component`` and ``config``, or override ``make`` for one that is not installed.
    Every test builds its own instance; nothing is shared between them.
    """

    kind: ClassVar[str]
    """The kind under test; set by the conformance class."""
    component: ClassVar[str] = ""
    """``"distribution:name"``, or just the name if only one installed plugin has it."""
    config: ClassVar[Mapping[str, Any]] = {}
    """The component's keys as in TOML, nested components included; choose small sizes."""
    plugin_files: ClassVar[Mapping[str, str]] = {}
    """Texts of plugin files by name, for a component of one; ``pytest my_router.py`` gives them by itself."""
    expected_failures: ClassVar[Mapping[str, str]] = {}
    """Checks that this component does not pass by design, with the reason: ``{"test_is_deterministic": "samples"}``, or
    ``"test_shapes[7]"`` for one case of a check. They are strict: a check that passes after all is an error."""

    def make(self, **given: Any) -> Any:
        """Build the component from its configuration and from what the engine gives to its kind."""
        return self.builder()(self.use(), **given)

    @classmethod
    def builder(cls) -> ComponentBuilder:
        """The builder over everything that is installed, and over ``plugin_files``."""
        return ComponentBuilder(with_files(_installed(), cls.plugin_files)) if cls.plugin_files else builder()

    def use(self) -> ComponentRef:
        """The choice of component that ``component`` and ``config`` describe."""
        assert self.component, f'{type(self).__name__}: set component = "distribution:name", or override make()'
        return self.builder().resolve(self.kind, {"name": self.component, **self.config})

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for name in cls.expected_failures:
            check = name.partition("[")[0]
            if not hasattr(cls, check):
                near = difflib.get_close_matches(check, [known for known in dir(cls) if known.startswith("test_")], 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise TypeError(f"{cls.__name__}.expected_failures names {name!r}, which is not a check{hint}")

    @pytest.fixture(autouse=True)
    def _expect_failure(self, request: pytest.FixtureRequest) -> None:
        node = request.node
        reason = self.expected_failures.get(node.name) or self.expected_failures.get(node.originalname)
        if reason:
            request.applymarker(pytest.mark.xfail(reason=reason, strict=True))


@functools.cache
def builder() -> ComponentBuilder:
    """The builder over everything that is installed; discovery runs once a process."""
    return ComponentBuilder(_installed())


@functools.cache
def _installed() -> Catalog:
    return discover()
