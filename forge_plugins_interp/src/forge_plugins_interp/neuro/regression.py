"""Linear maps from features to recordings: ridge regression and partial least squares, in float64.

Shapes: n = stimuli, p = features, q = targets (neuroids).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs
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


class Fit(Protocol):
    """A way to find a map."""

    def __call__(self, x: torch.Tensor, y: torch.Tensor, /) -> LinearMap:
        """From ``(n, p)`` and ``(n, q)`` float64."""
        ...


def ridge(x: torch.Tensor, y: torch.Tensor, *, alphas: Sequence[float] = ALPHAS, per_target: bool = False) -> LinearMap:
    """Ridge regression, whose penalty is chosen by the mean squared error of leaving each stimulus out.

    That error needs no refitting: it is ``(y − ŷ) / (1 − h)``, with h the diagonal of the hat matrix, intercept
    included (Hastie et al. 2009, section 7.10). One decomposition serves all penalties, with p below and above n.

    Args:
        per_target: choose a penalty for each target.
    """
    x_mean, y_mean = x.mean(0), y.mean(0)
    u, s, vt = torch.linalg.svd(x - x_mean, full_matrices=False)
    projected, n = u.T @ (y - y_mean), len(x)
    errors = []
    for alpha in alphas:
        shrink = s**2 / (s**2 + alpha)
        fitted = u @ (shrink[:, None] * projected)
        leverage = (u**2) @ shrink + 1 / n
        left_out = (y - y_mean - fitted) / (1 - leverage).clamp(min=1e-12)[:, None]
        errors.append(left_out.square().mean(0))
    table = torch.stack(errors)  # (alphas, q)
    best = table.argmin(0) if per_target else table.mean(1).argmin().expand(y.shape[1])
    chosen = torch.tensor(alphas, dtype=x.dtype, device=x.device)[best]
    weights = vt.T @ ((s[:, None] / (s[:, None] ** 2 + chosen)) * projected)
    return LinearMap(weights, x_mean, y_mean)


def pls(x: torch.Tensor, y: torch.Tensor, *, components: int = 25) -> LinearMap:
    """Partial least squares, PLS2 by NIPALS (Wold 1975; Wegelin 2000), without scaling.

    Raises:
        ConfigError: more components than features or stimuli.
    """
    most = min(len(x) - 1, x.shape[1])
    if components > most:
        raise ConfigError(
            f"pls: {components} components are more than {len(x)} stimuli and {x.shape[1]} features allow; give at "
            f"most {most}"
        )
    x_mean, y_mean = x.mean(0), y.mean(0)
    left_x, left_y = x - x_mean, y - y_mean
    directions, loadings, targets = [], [], []
    for _ in range(components):
        # the direction in which features vary most with the targets
        w = torch.linalg.svd(left_x.T @ left_y, full_matrices=False).U[:, 0]
        t = left_x @ w
        size = t @ t
        if size < torch.finfo(x.dtype).eps:
            break
        loading, target = left_x.T @ t / size, left_y.T @ t / size
        left_x, left_y = left_x - torch.outer(t, loading), left_y - torch.outer(t, target)
        directions.append(w)
        loadings.append(loading)
        targets.append(target)
    w, p, q = (torch.stack(one, dim=1) for one in (directions, loadings, targets))
    return LinearMap(w @ torch.linalg.solve(p.T @ w, q.T), x_mean, y_mean)
