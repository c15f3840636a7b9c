"""Look into a model that Forge trains, and change what is in it, in any layout.

Names are imported when they are asked for: ``plugin`` is imported by every command, and they need torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_CHANGES = ("Add", "Fn", "Mean", "Patch", "Project", "Replace", "Resample", "Scale", "Zero")

__all__ = [*_CHANGES, "Session", "open", "wrap"]


def __getattr__(name: str) -> Any:
    if name in _CHANGES:
        return getattr(import_module("forge_plugins_interp.interventions"), name)
    if name in ("Session", "open"):
        return getattr(import_module("forge_plugins_interp.session"), {"open": "open_session"}.get(name, name))
    if name == "wrap":
        return import_module("forge_plugins_interp.wrapped").wrap
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
