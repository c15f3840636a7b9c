"""Representation metrics: how alike what two models, or layers, make of the same stimuli is.

A plugin yields them in the hook ``forge_representation_metrics``; ``forge compare`` and the evaluation
``representations`` find them by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch


class RepresentationMetric(ABC):
    """A number for two matrices of the same stimuli."""

    is_symmetric: ClassVar[bool] = True
    """It is the same in both orders."""
    is_distance: ClassVar[bool] = False
    """It is least, and not largest, for what is most alike."""

    @abstractmethod
    def compare(self, x: torch.Tensor, y: torch.Tensor) -> float:
        """
        Args:
            x, y: ``(n, p)`` and ``(n, q)``, of any float dtype; a row is a stimulus, the same one in both.

        Raises:
            ConfigError: there are too few stimuli, or values that it has no meaning for.
        """

    def matrix(self, xs: Sequence[torch.Tensor], ys: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
        """Compare each with each. Override it where that shares work.

        Args:
            xs: ``(n, p)`` each, with p of its own.
            ys: the others; without them, ``xs`` again.

        Returns:
            ``(len(xs), len(ys))`` float64.
        """
        columns = xs if ys is None else ys
        found = torch.full((len(xs), len(columns)), torch.nan, dtype=torch.float64)
        for i, x in enumerate(xs):
            for j, y in enumerate(columns):
                is_known = ys is None and self.is_symmetric and j < i
                found[i, j] = found[j, i] if is_known else self.compare(x, y)
        return found


class RepresentationMetricFactory(Protocol):
    """The signature of the factory that a description names."""

    def __call__(self, config: Any, /) -> RepresentationMetric:
        """Build the metric."""
        ...
