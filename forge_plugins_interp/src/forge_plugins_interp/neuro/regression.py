"""Linear maps from features to recordings: ridge regression and partial least squares, in float64.

Shapes: n = stimuli, p = features, q = targets (neuroids).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import attrs
import numpy as np
import torch

from forge_core.errors import ConfigError

ALPHAS = tuple(10.0**exponent for exponent in range(-3, 4))


@attrs.frozen
class LinearMap:
    """``y = (x − x_mean) W + y_mean``."""

    weights: torch.Tensor
    """``(p, q)``."""
    x_mean: torch.Tensor
    y_mean: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``(n, p)`` to ``(n, q)``."""
        return (x - self.x_mean) @ self.weights + self.y_mean

    def parts(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """What each band of features adds to the mean, ``(bands, n, q)``; together with it they are the prediction.

        Args:
            widths: features of each band.
        """
        sizes = list(widths)
        bands = zip(torch.split(x - self.x_mean, sizes, 1), torch.split(self.weights, sizes), strict=True)
        return torch.stack([some @ weights for some, weights in bands])

    def split(self, size: int) -> list[LinearMap]:
        """The maps of ``size`` targets after another."""
        parts = zip(torch.split(self.weights, size, 1), torch.split(self.y_mean, size), strict=True)
        return [LinearMap(weights, self.x_mean, y_mean) for weights, y_mean in parts]


class Regression(Protocol):
    """A way to find maps. What depends on features alone is done once, for any number of targets."""

    @property
    def per_target(self) -> bool:
        """Each target has the map that it would have alone, so that several sets of targets can be fitted as one."""
        ...

    def of(self, x: torch.Tensor, groups: np.ndarray | None = None) -> Callable[[torch.Tensor], LinearMap]:
        """From features ``(n, p)`` to the fit of targets ``(n, q)``, float64.

        Args:
            groups: ``(n,)``, which are not split where stimuli are held out to choose something.
        """
        ...


@attrs.frozen(kw_only=True)
class Ridge:
    """Ridge regression, whose penalty is chosen by the mean squared error of leaving each stimulus out.

    That error needs no refitting: it is ``(y − ŷ) / (1 − h)``, with h the diagonal of the hat matrix, intercept
    included (Hastie et al. 2009, section 7.10). One decomposition serves all penalties, with p below and above n.
    """

    alphas: Sequence[float] = ALPHAS
    per_target: bool = False
    """Choose a penalty for each target, in place of one for all."""

    def of(self, x: torch.Tensor, groups: np.ndarray | None = None) -> Callable[[torch.Tensor], LinearMap]:
        """Decompose features ``(n, p)``. Each stimulus is left out by itself, of any group."""
        x_mean = x.mean(0)
        u, s, vt = torch.linalg.svd(x - x_mean, full_matrices=False)
        squares, alphas = u.square(), torch.tensor(self.alphas, dtype=x.dtype, device=x.device)

        def fit(y: torch.Tensor) -> LinearMap:
            y_mean = y.mean(0)
            projected = u.T @ (y - y_mean)
            errors = []
            for alpha in self.alphas:
                shrink = s**2 / (s**2 + alpha)
                residual = y - y_mean - u @ (shrink[:, None] * projected)
                room = 1 - 1 / len(x) - squares @ shrink
                errors.append((residual / room.clamp(min=1e-12)[:, None]).square().mean(0))
            table = torch.stack(errors)  # (alphas, q)
            best = table.argmin(0) if self.per_target else table.mean(1).argmin().expand(y.shape[1])
            weights = vt.T @ ((s[:, None] / (s[:, None] ** 2 + alphas[best])) * projected)
            return LinearMap(weights, x_mean, y_mean)

        return fit


@attrs.frozen(kw_only=True)
class PLS:
    """Partial least squares, PLS2 (Wold 1975; Wegelin 2000), without scaling."""

    components: int = 25
    per_target = False

    def of(self, x: torch.Tensor, groups: np.ndarray | None = None) -> Callable[[torch.Tensor], LinearMap]:
        """
        Raises:
            ConfigError: more components than features or stimuli.
        """
        most = min(len(x) - 1, x.shape[1])
        if self.components > most:
            raise ConfigError(
                f"pls: {self.components} components are more than {len(x)} stimuli and {x.shape[1]} features allow; "
                f"give at most {most}"
            )
        return lambda y: self._fit(x, y)

    def _fit(self, x: torch.Tensor, y: torch.Tensor) -> LinearMap:
        x_mean, y_mean = x.mean(0), y.mean(0)
        left_x, centred_y = x - x_mean, y - y_mean
        smallest = torch.finfo(x.dtype).eps * (left_x.T @ centred_y).norm()
        directions, loadings, targets = [], [], []
        for _ in range(self.components):
            covariance = left_x.T @ centred_y
            if covariance.norm() <= smallest:
                break  # nothing is left that covaries
            w = _first_left(covariance)
            t = left_x @ w
            loading, target = (one.T @ t / (t @ t) for one in (left_x, centred_y))
            left_x = left_x - torch.outer(t, loading)
            directions.append(w)
            loadings.append(loading)
            targets.append(target)
        if not directions:
            return LinearMap(x.new_zeros(x.shape[1], y.shape[1]), x_mean, y_mean)
        w, p, q = (torch.stack(one, dim=1) for one in (directions, loadings, targets))
        return LinearMap(w @ torch.linalg.solve(p.T @ w, q.T), x_mean, y_mean)


def _first_left(matrix: torch.Tensor) -> torch.Tensor:
    """The first left singular vector, from the smaller of the two products: the direction in which features vary most
    with the targets."""
    is_wide = matrix.shape[0] <= matrix.shape[1]
    vectors: torch.Tensor = torch.linalg.eigh(matrix @ matrix.T if is_wide else matrix.T @ matrix)[1]
    first: torch.Tensor = vectors[:, -1] if is_wide else matrix @ vectors[:, -1]
    first /= first.norm()
    return first
