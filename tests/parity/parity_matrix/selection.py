"""Which cells are tested by day, and which of them a session has selected."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def by_day_or_night(cells: Iterable[str], by_night: Collection[str]) -> list[Any]:
    """For ``parametrize``: those of ``by_night`` are marked."""
    return [pytest.param(cell, marks=[pytest.mark.nightly] if cell in by_night else []) for cell in cells]


def selected_cells(request: pytest.FixtureRequest) -> set[str]:
    """What the selected tests of the file that asks have as ``cell``."""
    items: list[Any] = [item for item in request.session.items if item.path == request.path]
    return {item.callspec.params["cell"] for item in items if "cell" in getattr(item, "fixturenames", ())}
