"""The keys of the metrics. ``forge compare`` takes them as ``metric.<key>=…``."""

from __future__ import annotations

from typing import ClassVar, Literal

import attrs
from attrs.validators import ge, gt

LEAST_DEBIASED = 4
"""Stimuli that an estimate without bias takes."""


def _of_unbiased_linear(config: CkaConfig, _: attrs.Attribute[bool], value: bool) -> None:
    if value and not (config.kernel == "linear" and config.debiased):
        raise ValueError("needs kernel = 'linear' and debiased = true")


def _of_rbf(config: CkaConfig, _: attrs.Attribute[float], value: float) -> None:
    if value != 1 and config.kernel == "linear":
        raise ValueError(f"has no effect with kernel = 'linear', got {value}")


def _of_enough_stimuli(config: CkaConfig, _: attrs.Attribute[int], value: int) -> None:
    if value and config.kernel == "rbf":
        raise ValueError(f"has no effect with kernel = 'rbf', got {value}")
    if value and not config.debiased:
        raise ValueError(f"averages over batches, which is right for debiased = true only; got {value}")
    if 0 < value < LEAST_DEBIASED:
        raise ValueError(f"debiased estimates need at least {LEAST_DEBIASED} stimuli, got {value}")


@attrs.frozen(kw_only=True)
class CkaConfig:
    """Centred kernel alignment."""

    kernel: Literal["linear", "rbf"] = "linear"
    """Of the features; ``rbf`` is Gaussian."""
    debiased: bool = True
    """Estimate without bias; with it, wide representations seem alike that have nothing in common."""
    sampled_features: bool = attrs.field(default=False, validator=_of_unbiased_linear)
    """Features are a sample, such as the neurons of an area that were recorded: estimate the value of all there are."""
    fraction: float = attrs.field(default=1.0, validator=[gt(0), _of_rbf])
    """With ``rbf``: the width of the kernel, in median distances of stimuli."""
    batch: int = attrs.field(default=0, validator=[ge(0), _of_enough_stimuli])
    """With ``linear``: estimate from batches of so many stimuli, in less memory and time; 0 takes all at once."""

    @property
    def least(self) -> int:
        """The fewest stimuli."""
        return LEAST_DEBIASED if self.debiased else 2


@attrs.frozen(kw_only=True)
class CcaConfig:
    """The mean canonical correlation, and PWCCA. They have no keys."""

    least: ClassVar[int] = 2
    """The fewest stimuli."""


@attrs.frozen(kw_only=True)
class RoutingAgreementConfig:
    """How often two routers choose the same experts. It has no keys."""


@attrs.frozen(kw_only=True)
class SvccaConfig:
    """Singular vector canonical correlations."""

    least: ClassVar[int] = 2
    """The fewest stimuli."""

    threshold: float = attrs.field(
        default=0.99, validator=attrs.validators.and_(attrs.validators.gt(0), attrs.validators.le(1))
    )
    """The share of the variance that the kept directions have."""
    basis: Literal["variance", "sum"] = "variance"
    """The share is of squared singular values, or of singular values, which is the paper's formula."""


@attrs.frozen(kw_only=True)
class ProcrustesConfig:
    """What is left after the best rotation."""

    least: ClassVar[int] = 2
    """The fewest stimuli."""

    angular: bool = False
    """The angle, which is a metric, in place of the squared distance."""


@attrs.frozen(kw_only=True)
class RsaConfig:
    """Representational similarity analysis."""

    least: ClassVar[int] = 2
    """The fewest stimuli."""

    dissimilarity: Literal["correlation", "cosine", "euclidean", "sqeuclidean"] = "correlation"
    """Of two stimuli."""
    comparison: Literal["spearman", "pearson", "kendall", "cosine"] = "spearman"
    """Of two matrices of dissimilarities; ``kendall`` is τ-a."""
