"""A guard against targets that are not shifted, from which a model learns to copy its input."""

from __future__ import annotations

import numpy as np

from forge_core.contracts.loss import IGNORED
from forge_core.errors import ConfigError

_MOST = 0.99
"""The largest share of targets that may be the token at their own position."""


def refuse_copies(tokens: np.ndarray, targets: np.ndarray) -> None:
    """
    Args:
        tokens: ``(B, S)``.
        targets: ``(B, S)``, −100 where there is nothing to learn.

    Raises:
        ConfigError: nearly all targets are the tokens at the same positions.
    """
    learned = targets != IGNORED
    same = int((tokens == targets)[learned].sum())
    if same > _MOST * learned.sum():
        raise ConfigError(
            f"{same:,} of {int(learned.sum()):,} targets are the token at their own position, so that a model would "
            "learn to copy its input: targets must be the tokens after it, and texts more than one repeated token"
        )
