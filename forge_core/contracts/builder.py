"""How a component builds the components nested in its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from forge_core.contracts.component_ref import ComponentRef


class Builder(Protocol):
    """Given to every factory whose component can hold others."""

    def __call__(self, use: ComponentRef, /, **given: Any) -> Any:
        """Import the factory of ``use`` and call it with its config, ``given``, and ``build=self`` if it asks for it.

        Keywords that are optional for its kind (``Kind.optional``) are left out where the factory does not take them.

        Raises:
            PluginError: the factory cannot be imported; the message names the distribution whose bug it is.
        """

    def resolve(self, kind: str, table: str | Mapping[str, Any]) -> ComponentRef:
        """Turn a name or a table with a ``name`` key, found outside the configuration (in a data file's sidecar, in a
        checkpoint), into a choice of component.

        Raises:
            ConfigError: no such component, or its keys are wrong.
        """
