"""Our metrics as components. The formulas are in the files beside this one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forge_core.errors import ConfigError
from forge_plugins_interp.metrics import rsa
from forge_plugins_interp.metrics.cca import mean_cca, pwcca, svcca
from forge_plugins_interp.metrics.cka import LinearCKA, rbf_cka
from forge_plugins_interp.metrics.config import (
    LEAST_DEBIASED,
    CcaConfig,
    CkaConfig,
    ProcrustesConfig,
    RoutingAgreementConfig,
    RsaConfig,
    SvccaConfig,
)
from forge_plugins_interp.metrics.contract import RepresentationMetric
from forge_plugins_interp.metrics.procrustes import angular_procrustes, procrustes
from forge_plugins_interp.metrics.routing import routing_agreement


class Cka(RepresentationMetric):
    """See ``forge_plugins_interp.metrics.cka``."""

    def __init__(self, config: CkaConfig, /) -> None:
        self._config = config

    def compare(self, x: torch.Tensor, y: torch.Tensor) -> float:
        config = self._config
        if config.kernel == "rbf":
            return rbf_cka(x, y, fraction=config.fraction, debiased=config.debiased)
        return float(self.matrix([x], [y]))

    def matrix(self, xs: Sequence[torch.Tensor], ys: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
        if self._config.kernel == "rbf":
            return super().matrix(xs, ys)
        config, n = self._config, len(xs[0])
        estimate = LinearCKA(debiased=config.debiased, sampled_features=config.sampled_features)
        for rows in _batches(n, config.batch):
            estimate.update([x[rows] for x in xs], None if ys is None else [y[rows] for y in ys])
        return estimate.result()


def _batches(n: int, size: int) -> list[slice]:
    """Slices of ``size`` stimuli; what would be left for a last one of too few belongs to the one before."""
    if not size or n <= size:
        return [slice(0, n)]
    starts = list(range(0, n, size))
    if n - starts[-1] < LEAST_DEBIASED:
        starts.pop()
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], n], strict=True)]


class Cca(RepresentationMetric):
    """See ``forge_plugins_interp.metrics.cca``."""

    def __init__(self, config: CcaConfig, /) -> None: ...

    def compare(self, x: torch.Tensor, y: torch.Tensor) -> float:
        return mean_cca(x, y)


class Svcca(RepresentationMetric):
    """See ``forge_plugins_interp.metrics.cca``."""

    def __init__(self, config: SvccaConfig, /) -> None:
        self._config = config

    def compare(self, x: torch.Tensor, y: torch.Tensor) -> float:
        return svcca(x, y, threshold=self._config.threshold, basis=self._config.basis)


class Pwcca(RepresentationMetric):
    """See ``forge_plugins_interp.metrics.cca``. The first one's directions have the weights."""

    is_symmetric = False

    def __init__(self, config: CcaConfig, /) -> None: ...

    def compare(self, x: torch.Tensor, y: torch.Tensor) -> float:
        return pwcca(x, y)


class Procrustes(RepresentationMetric):
    """See ``forge_plugins_interp.metrics.procrustes``."""

    is_distance = True

    def __init__(self, config: ProcrustesConfig, /) -> None:
        self._compare = angular_procrustes if config.angular else procrustes

    def compare(self, x: torch.Tensor, y: torch.Tensor) -> float:
        return self._compare(x, y)


class RoutingAgreement(RepresentationMetric):
    """See ``forge_plugins_interp.metrics.routing``."""

    def __init__(self, config: RoutingAgreementConfig, /) -> None: ...

    def compare(self, x: torch.Tensor, y: torch.Tensor) -> float:
        return routing_agreement(x, y)


class Rsa(RepresentationMetric):
    """See ``forge_plugins_interp.metrics.rsa``."""

    _MOST = 20_000
    """Stimuli: beyond, a matrix of their pairs takes more than 3 GB."""

    def __init__(self, config: RsaConfig, /) -> None:
        self._config = config

    def compare(self, x: torch.Tensor, y: torch.Tensor) -> float:
        return float(self.matrix([x], [y]))

    def matrix(self, xs: Sequence[torch.Tensor], ys: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
        if len(xs[0]) > self._MOST:
            raise ConfigError(
                f"rsa compares all pairs of stimuli, and {len(xs[0])} have too many; give at most {self._MOST}"
            )
        first = [self._rdm(x) for x in xs]
        second = first if ys is None else [self._rdm(y) for y in ys]
        rows = [[self._similarity(a, b) for b in second] for a in first]
        return torch.tensor(rows, dtype=torch.float64)

    def _similarity(self, a: torch.Tensor, b: torch.Tensor) -> float:
        return rsa.compare(a, b, self._config.comparison) if rsa.vary(a, b) else torch.nan

    def _rdm(self, x: torch.Tensor) -> torch.Tensor:
        return rsa.rdm(x, self._config.dissimilarity)
