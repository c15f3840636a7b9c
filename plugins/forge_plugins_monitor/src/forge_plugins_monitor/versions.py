"""The versions that a tracker records beside the job."""

from __future__ import annotations

import platform
from importlib import metadata


def versions() -> dict[str, str]:
    """Of Python, torch, forge-core and every installed plugin, by distribution."""
    plugins = {point.dist.name for point in metadata.entry_points(group="forge.v1") if point.dist is not None}
    names = ["torch", "forge-core", *sorted(plugins)]
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in names}}
