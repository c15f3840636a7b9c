"""Data whose images are others: those of other samples, or blank ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np

from forge_core.contracts.batch import DescribedSource, Entry
from forge_core.contracts.data_source import DataSource
from forge_core.contracts.tokenizer import Tokenizer

Images = Literal["real", "shuffled", "blank"]


class WithImages:
    """A source with its texts and other images.

    ``shuffled``: sample ``i`` has the tiles of sample ``i + n / 2`` of the first ``n``, again and again where they are
    fewer; cut or filled up, where a mixture's have another size. ``blank``: zeros.
    """

    tokenizer: Tokenizer | None

    def __init__(self, source: DataSource, images: Images, samples: int) -> None:
        """
        Args:
            samples: n; 0 stands for all.
        """
        self._source, self._images = source, images
        self._samples = min(samples or len(source), len(source))
        self.vocab_size, self.tokenizer = source.vocab_size, source.tokenizer
        self.fingerprint = f"{source.fingerprint} {images}"

    def __len__(self) -> int:
        return len(self._source)

    def entries(self) -> Mapping[str, Entry]:
        """Same as ``DescribedSource.entries``."""
        return self._source.entries() if isinstance(self._source, DescribedSource) else {}

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Same as ``DataSource.read``."""
        batch = self._source.read(indices)
        if "pixels" not in batch or self._images == "real":
            return batch
        if self._images == "blank":
            return {**batch, "pixels": np.zeros_like(batch["pixels"])}
        others = self._source.read((indices + max(1, self._samples // 2)) % self._samples)
        tiles = np.arange(batch["pixels"].shape[1])
        changed: dict[str, list[np.ndarray]] = {}
        for row in range(len(indices)):
            own = max(1, _n_tiles(others, row))
            for name in ("pixels", "tile_sizes"):
                if name in batch:
                    changed.setdefault(name, []).append(others[name][row, tiles % own])
        return {**batch, **{name: np.stack(rows) for name, rows in changed.items()}}


def _n_tiles(batch: Mapping[str, np.ndarray], row: int) -> int:
    """How many tiles a row has; behind them it is filled up."""
    return int(batch["image_range"][row, :, 2].max())
