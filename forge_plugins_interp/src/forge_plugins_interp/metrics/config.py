"""The keys of the metrics. ``forge compare`` takes them as ``metric.<key>=…``."""

from __future__ import annotations

from typing import Literal

import attrs


@attrs.frozen(kw_only=True)
class CkaConfig:
    """Centred kernel alignment."""

    kernel: Literal["linear", "rbf"] = "linear"
    """Of the features; ``rbf`` is Gaussian."""
    debiased: bool = True
    """Estimate without bias; with it, wide representations seem alike that have nothing in common."""
    sampled_features: bool = False
    """Features are a sample, such as the neurons of an area that were recorded: estimate the value of all there are."""
    fraction: float = attrs.field(default=1.0, validator=attrs.validators.gt(0))
    """With ``rbf``: the width of the kernel, in median distances of stimuli."""
    batch: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """With ``linear``: estimate from batches of so many stimuli, in less memory and time; 0 takes all at once."""

    def __attrs_post_init__(self) -> None:
        if self.kernel == "rbf" and self.batch:
            raise ValueError(f"batch = {self.batch}: has no effect with kernel = 'rbf'")
        if self.kernel == "linear" and self.fraction != 1:
            raise ValueError(f"fraction = {self.fraction}: has no effect with kernel = 'linear'")
        if self.sampled_features and (self.kernel == "rbf" or not self.debiased):
            raise ValueError("sampled_features = true: needs kernel = 'linear' and debiased = true")
        if self.batch and not self.debiased:
            raise ValueError("batch: an average over batches is right for debiased = true only")
        if 0 < self.batch < 4:
            raise ValueError(f"batch = {self.batch}: debiased estimates need at least 4 stimuli")


@attrs.frozen(kw_only=True)
class CcaConfig:
    """The mean canonical correlation, and PWCCA. They have no keys."""


@attrs.frozen(kw_only=True)
class RoutingAgreementConfig:
    """How often two routers choose the same experts. It has no keys."""


@attrs.frozen(kw_only=True)
class SvccaConfig:
    """Singular vector canonical correlations."""

    threshold: float = attrs.field(
        default=0.99, validator=attrs.validators.and_(attrs.validators.gt(0), attrs.validators.le(1))
    )
    """The share of the variance that the kept directions have."""
    basis: Literal["variance", "sum"] = "variance"
    """The share is of squared singular values, or of singular values, which is the paper's formula."""


@attrs.frozen(kw_only=True)
class ProcrustesConfig:
    """What is left after the best rotation."""

    angular: bool = False
    """The angle, which is a metric, in place of the squared distance."""


@attrs.frozen(kw_only=True)
class RsaConfig:
    """Representational similarity analysis."""

    dissimilarity: Literal["correlation", "cosine", "euclidean", "sqeuclidean"] = "correlation"
    """Of two stimuli."""
    comparison: Literal["spearman", "pearson", "kendall", "cosine"] = "spearman"
    """Of two matrices of dissimilarities; ``kendall`` is τ-a."""
