"""Everything a ``plugin.py`` or a config class needs, and nothing heavy: this module imports attrs and pluggy only."""

import pluggy

from forge_core.component import Check, Command, Component, Conflict, Kind, Need, PassComponent, Slot, Use

ENTRY_POINT_GROUP = "forge.v1"
"""Where plugins announce themselves. The number is the major version of the contract."""
API_MINOR = 0
"""The minor version of the contract that this core offers. A plugin states the oldest one it works with as
``FORGE_API = "1.0"`` in its plugin module."""

hookimpl = pluggy.HookimplMarker("forge")
"""Marks a function of a plugin module as the implementation of the hook of the same name."""

__all__ = [
    "API_MINOR",
    "ENTRY_POINT_GROUP",
    "Check",
    "Command",
    "Component",
    "Conflict",
    "Kind",
    "Need",
    "PassComponent",
    "Slot",
    "Use",
    "hookimpl",
]
