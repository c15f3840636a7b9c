"""An empty picture, which needs no display."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from forge_core.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def refuse_without_matplotlib() -> None:
    """
    Raises:
        ConfigError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError("figures need matplotlib: pip install forge-plugins-interp[figures]")


def blank(width: float, height: float) -> Figure:
    """An empty figure of this size in inches.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    refuse_without_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")
