"""What all comparisons begin with: two matrices of the same stimuli, checked."""

from __future__ import annotations

import warnings

import torch

from forge_core.errors import ConfigError


def checked(x: torch.Tensor, y: torch.Tensor, least: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as float64, ``(n, p)`` and ``(n, q)``; further dimensions become features.

    Raises:
        ConfigError: they have different numbers of stimuli, fewer than ``least``, or a value that is not finite.
    """
    x, y = _matrix(x, "first"), _matrix(y, "second")
    if len(x) != len(y):
        raise ConfigError(f"the first has {len(x)} stimuli, and the second {len(y)}; compare the same ones")
    if len(x) < least:
        raise ConfigError(f"there are {len(x)} stimuli, and this needs at least {least}")
    return x, y


def _matrix(values: torch.Tensor, which: str) -> torch.Tensor:
    matrix = values.reshape(len(values), -1).double()
    if not bool(matrix.isfinite().all()):
        row, column = (~matrix.isfinite()).nonzero()[0].tolist()
        raise ConfigError(f"the {which}: stimulus {row} has a value that is not finite in feature {column}")
    return matrix


def centred(x: torch.Tensor) -> torch.Tensor:
    """Each feature without its mean over stimuli, and exactly 0 where it is the same for all."""
    x = x - x[:1]  # a mean of equal values may be another one in its last digit
    return x - x.mean(0)


def varies(*sides: torch.Tensor) -> bool:
    """Return whether the stimuli of each side ``(n, p)`` differ; if not, warn, as nothing is like such a side."""
    differ = all(bool((x != x[:1]).any()) for x in sides)
    if not differ:
        warnings.warn("all stimuli of a representation are the same, so that it is like no other", stacklevel=3)
    return differ
