"""Principal components of a site's last dimension, fitted on the first samples of an extraction."""

from __future__ import annotations

from pathlib import Path

import attrs
import torch
from safetensors.torch import load_file

from forge_core.errors import ConfigError
from forge_plugins_interp.store import write_tensors
from forge_plugins_interp.wide import wide


@attrs.frozen(kw_only=True, eq=False)
class PrincipalComponents:
    """The directions along which values vary most (Pearson 1901), the first one most of all."""

    mean: torch.Tensor
    """``(D,)`` fp32."""
    directions: torch.Tensor
    """``(D, k)`` fp32, orthonormal; the entry of each that is farthest from 0 is positive."""
    explained: torch.Tensor
    """``(k,)`` fp32: the share of the variance along each."""

    def project(self, value: torch.Tensor) -> torch.Tensor:
        """``(…, D)`` to ``(…, k)`` fp32."""
        device = value.device
        return (value.float() - self.mean.to(device)) @ self.directions.to(device)

    def write(self, file: Path) -> None:
        """Write it as safetensors, in one go."""
        write_tensors(file, attrs.asdict(self, recurse=False))

    @classmethod
    def read(cls, file: Path) -> PrincipalComponents:
        """Read what ``write`` has written."""
        return cls(**load_file(file))


_MOST_FEATURES = 16_384
"""Of a row: 2 GiB of products."""


class Moments:
    """Sums over the rows of a site, in float64, from which its components follow."""

    def __init__(self, site: str) -> None:
        self._site = site
        self._n = 0
        self._sum: torch.Tensor | None = None
        self._products: torch.Tensor | None = None

    def add(self, value: torch.Tensor) -> None:
        """Take the rows of ``(…, D)`` into account. It keeps D² numbers on the device of ``value``.

        Raises:
            ConfigError: rows have more features than there is memory for their products.
        """
        if value.shape[-1] > _MOST_FEATURES:
            raise ConfigError(
                f"{self._site} has {value.shape[-1]:,} features, and principal components are computed of at most "
                f"{_MOST_FEATURES:,}; leave it out of --sites"
            )
        rows = wide(value.flatten(0, -2))
        self._n += len(rows)
        self._sum = rows.sum(0) + (0 if self._sum is None else self._sum)
        self._products = rows.T @ rows + (0 if self._products is None else self._products)

    @property
    def rows(self) -> int:
        """How many there were."""
        return self._n

    def mean_and_covariance(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``(D,)`` and ``(D, D)`` on the CPU, float64; the covariance is divided by the number of rows.

        Raises:
            ConfigError: a value is not finite.
        """
        assert self._sum is not None, "a batch was seen"
        assert self._products is not None
        mean = self._sum.cpu() / self._n
        covariance = self._products.cpu() / self._n - torch.outer(mean, mean)
        if not bool(covariance.isfinite().all()):
            raise ConfigError(f"{self._site}: values that are not finite have no principal components")
        return mean, covariance

    def components(self, number: int) -> PrincipalComponents:
        """The first ``number`` of them.

        Raises:
            ConfigError: the site has fewer features, or has been seen in too few rows; or a value is not finite.
        """
        mean, covariance = self.mean_and_covariance()
        width = len(mean)
        if number > min(width, self._n - 1):
            raise ConfigError(
                f"--features {number}: {self._site} has {width} features in {self._n:,} rows, which have at most "
                f"{max(0, min(width, self._n - 1))} principal components; ask for fewer, or give more --fit-samples"
            )
        variances, vectors = (found.flip(-1)[..., :number] for found in torch.linalg.eigh(covariance))
        signs = vectors.gather(0, vectors.abs().argmax(0, keepdim=True)).sign()
        total = covariance.trace().clamp_min(torch.finfo(torch.float64).tiny)
        return PrincipalComponents(
            mean=mean.float(),
            directions=(vectors * signs).float().contiguous(),
            explained=(variances.clamp_min(0) / total).float().contiguous(),
        )
