"""Everything a ``plugin.py`` or a config class needs, and nothing heavy: this module imports attrs and pluggy only."""

import pluggy

from forge_core.contracts.component_ref import ComponentRef
from forge_core.registry.component import Check, Command, Component, Conflict, Kind, Need, PassComponent, Slot
from forge_core.registry.entry_points import API_MINOR, ENTRY_POINT_GROUP
from forge_core.registry.plugin_files import component

Use = ComponentRef
"""The older name of ``ComponentRef``."""

hookimpl = pluggy.HookimplMarker("forge")
"""Marks a function of a plugin module as the implementation of the hook of the same name."""

__all__ = ["API_MINOR", "ENTRY_POINT_GROUP", "Check", "Command", "Component", "ComponentRef", "Conflict", "Kind"]
__all__ += ["Need", "PassComponent", "Slot", "Use", "component", "hookimpl"]
