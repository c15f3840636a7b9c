"""An empty picture, which needs no display."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge_core.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def blank(width: float, height: float) -> Figure:
    """An empty figure of this size in inches.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("figures need matplotlib: pip install forge-plugins-interp[figures]") from None
    return Figure(figsize=(width, height), layout="constrained")
