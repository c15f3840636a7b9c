"""Ridge regression with a penalty for each band of features (Dupré la Tour et al. 2022, NeuroImage 264, 119728).

Shapes: n = stimuli, p = features of all bands, B = bands, q = targets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np
import torch

from forge_core.errors import ConfigError
from forge_plugins_interp.neuro.regression import LinearMap

BAND_ALPHAS = tuple(10.0**exponent for exponent in range(-3, 7))
_CONCENTRATIONS = (0.1, 1.0)
"""Of Dirichlet distributions: one of few bands each, one of all mixtures alike."""
Fold = tuple[torch.Tensor, torch.Tensor]
"""Numbers of stimuli that are fitted, and of stimuli that are held out."""


@attrs.frozen(kw_only=True)
class BandedRidge:
    """``min ‖Y − X W‖² + Σ_b α_b ‖W_b‖²``, with penalties of each target by cross-validation.

    ``α_b = α / γ_b``: shares γ of the bands, which sum to 1, are drawn at random, and α is one of a list. For each
    target the least mean squared error decides, over folds of the training stimuli that are held out in turn and keep
    groups whole. This is the random search of himalaya.
    """

    widths: Sequence[int]
    """Features of each band, in the order of columns."""
    alphas: Sequence[float] = BAND_ALPHAS
    draws: int = 100
    """How many shares are tried; the first has all bands alike."""
    folds: int = 5
    seed: int = 0
    per_target = True

    def of(self, x: torch.Tensor, groups: np.ndarray | None = None) -> Callable[[torch.Tensor], LinearMap]:
        """
        Raises:
            ConfigError: there are fewer than two groups.
        """
        assert sum(self.widths) == x.shape[1], "each feature is of one band"
        folds, x_mean = self._folds(len(x), groups), x.mean(0)
        # inner products decide, and n directions have all of them; a band may have many times as many features
        rotated, rotations = zip(*map(_rotated, torch.split(x - x_mean, list(self.widths), 1)), strict=True)

        def fit(y: torch.Tensor) -> LinearMap:
            y_mean = y.mean(0)
            widths = [one.shape[1] for one in rotated]
            parts = torch.split(self._search(torch.cat(rotated, 1), widths, y, folds), widths)
            own = [rotation @ part for rotation, part in zip(rotations, parts, strict=True)]
            return LinearMap(torch.cat(own), x_mean, y_mean)

        return fit

    def shares(self) -> torch.Tensor:
        """The shares γ that are tried, ``(draws, B)`` float64."""
        rng, n_bands = np.random.default_rng(self.seed), len(self.widths)
        found = [np.full(n_bands, 1 / n_bands)]
        for draw in range(1, self.draws):
            found.append(rng.dirichlet([_CONCENTRATIONS[draw % 2]] * n_bands))
        return torch.from_numpy(np.stack(found))

    def _folds(self, n: int, groups: np.ndarray | None) -> list[Fold]:
        names = np.arange(n) if groups is None else groups
        unique = np.unique(names)
        if len(unique) < 2:
            raise ConfigError(
                f"banded_ridge: the training part has the one group {str(unique[0])!r}; penalties are chosen on groups "
                "that are held out of it, so that 3 groups are needed in all"
            )
        dealt = np.array_split(np.random.default_rng(self.seed).permutation(unique), min(self.folds, len(unique)))
        is_held = [torch.from_numpy(np.isin(names, some)) for some in dealt]
        return [((~one).nonzero()[:, 0], one.nonzero()[:, 0]) for one in is_held]

    def _search(self, x: torch.Tensor, widths: Sequence[int], y: torch.Tensor, folds: Sequence[Fold]) -> torch.Tensor:
        """Weights ``(p, q)`` of centred features."""
        sizes, shares = torch.tensor(widths), self.shares().to(x)
        alphas = torch.tensor(self.alphas, dtype=x.dtype, device=x.device)
        least = torch.full((y.shape[1],), torch.inf, dtype=x.dtype, device=x.device)
        draw, alpha = (torch.zeros(y.shape[1], dtype=torch.int64, device=x.device) for _ in range(2))
        for number, gamma in enumerate(shares):
            scaled = x * gamma.sqrt().repeat_interleave(sizes)
            error, best = torch.stack([self._errors(scaled, y, fold) for fold in folds]).mean(0).min(0)
            is_better = error < least
            least = torch.where(is_better, error, least)
            draw, alpha = torch.where(is_better, number, draw), torch.where(is_better, best, alpha)
        weights = x.new_zeros(x.shape[1], y.shape[1])
        for number in set(draw.tolist()):
            scale, chosen = shares[number].sqrt().repeat_interleave(sizes), (draw == number).nonzero()[:, 0]
            squares, basis, projection = _decomposed(x * scale)
            fitted = projection @ (y - y.mean(0))[:, chosen] / (squares[:, None] + alphas[alpha[chosen]])
            weights[:, chosen] = scale[:, None] * (basis @ fitted)
        return weights

    def _errors(self, x: torch.Tensor, y: torch.Tensor, fold: Fold) -> torch.Tensor:
        """The mean squared error on what is held out, ``(alphas, q)``."""
        train, held = fold
        x_mean, y_mean = x[train].mean(0), y[train].mean(0)
        squares, basis, projection = _decomposed(x[train] - x_mean)
        seen = (x[held] - x_mean) @ basis
        seen = torch.cat([seen / (squares + alpha) for alpha in self.alphas])
        # far more recordings than stimuli are multiplied once, by one small matrix for all alphas
        found: torch.Tensor = torch.linalg.multi_dot([seen, projection, y[train] - y_mean])
        return found.view(len(self.alphas), len(held), y.shape[1]).sub_(y[held] - y_mean).square_().mean(1)


def _decomposed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """λ, B and P, by which weights are ``B (P y / (λ + α))``: the primal of ridge for few features, else the dual. The
    eigenvalues of the smaller product of features take a fraction of the time of singular values."""
    if x.shape[1] <= len(x):
        squares, basis = torch.linalg.eigh(x.T @ x)
        return squares.clamp(min=0), basis, basis.T @ x.T
    squares, directions = torch.linalg.eigh(x @ x.T)
    return squares.clamp(min=0), x.T @ directions, directions.T


def _rotated(band: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """At most n columns of the same inner products ``(n, min(n, p))``, and the rotation back ``(p, min(n, p))``."""
    if band.shape[1] <= len(band):
        return band, torch.eye(band.shape[1], dtype=band.dtype, device=band.device)
    u, s, vt = torch.linalg.svd(band, full_matrices=False)
    return u * s, vt.T
