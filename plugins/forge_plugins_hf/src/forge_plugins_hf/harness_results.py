"""The numbers among what lm-evaluation-harness and lmms-eval give back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any


def values_of(results: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    """Those of ``acc,none`` by ``<task>/acc``, and of a filter by ``<task>/exact_match/strict-match``."""
    for task, values in results.items():
        for key, value in values.items():
            metric, comma, kept = key.partition(",")
            if comma and isinstance(value, Real) and not math.isnan(value):
                yield f"{task}/{metric}" + (f"/{kept}" if kept != "none" else ""), float(value)
