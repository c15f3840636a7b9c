"""The spectrum of a representation: how its variance spreads over principal components."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import torch

from forge_core.errors import ConfigError
from forge_plugins_interp.principal_components import Moments

_LEAST_RANKS = 3
"""Of components, through whose variances a line is laid."""


@attrs.frozen(kw_only=True, eq=False)
class Spectrum:
    """Variances of principal components, the largest first."""

    variances: torch.Tensor
    """``(D,)`` float64, of which as many as there are rows, less one, are more than 0."""
    rows: int

    @property
    def dimensions(self) -> float:
        """The participation ratio, (Σλ)² / Σλ²: D for equal variances, 1 for a single one (Gao et al. 2017)."""
        total = self.variances.sum()
        return float(total.square() / self.variances.square().sum()) if total > 0 else 0.0

    def components_for(self, share: float) -> int:
        """The least number of components that have this share of the variance."""
        total = self.variances.sum()
        return int((self.variances.cumsum(0) < share * total).sum()) + 1 if total > 0 else 0

    def exponent(self, first: int, last: int) -> float | None:
        """α of λₙ ~ n^−α: the slope of log λ against log n over the ``first`` to the ``last`` component, or as far as
        there are any; each has the weight 1 / n, as in the code of Stringer et al. 2019, so that equal stretches of
        log n count alike. ``None`` for fewer than three."""
        known = self.variances[: self.rows - 1]
        last = min(last, int((known > known[:1] * torch.finfo(torch.float32).eps).sum()))
        if last - first + 1 < _LEAST_RANKS:
            return None
        ranks, heights = torch.arange(first, last + 1, dtype=torch.float64), known[first - 1 : last].log()
        shares = 1 / ranks / (1 / ranks).sum()
        away = ranks.log() - shares @ ranks.log()
        return -float((shares * away) @ heights / (shares @ away.square()))


def spectrum_of(batches: Iterable[torch.Tensor], site: str) -> Spectrum:
    """
    Args:
        batches: rows ``(n, …)``, whose further dimensions are the features of one.
        site: for the error.

    Raises:
        ConfigError: there are fewer than two rows, too many features, or a value that is not finite.
    """
    moments = Moments(site)
    for batch in batches:
        moments.add(batch.flatten(1))
    if moments.rows < 2:
        raise ConfigError(f"{site}: a spectrum needs two rows at least, and the store has {moments.rows}")
    _, covariance = moments.mean_and_covariance()
    return Spectrum(variances=torch.linalg.eigvalsh(covariance).flip(0).clamp_min(0), rows=moments.rows)
