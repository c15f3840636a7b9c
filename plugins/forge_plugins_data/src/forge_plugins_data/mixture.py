"""The data source ``mixture``: samples of several sources, in proportion to their weights."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from forge_core.contracts.builder import Builder
from forge_core.contracts.data_source import DataSource, PositionedSource, Split, StreamedSource
from forge_core.contracts.tokenizer import Tokenizer
from forge_core.data.counts import counted_entry, with_counts
from forge_core.data.stream import SampleStream
from forge_core.errors import ConfigError
from forge_plugins_data.interleaving import InterleavingInPhases
from forge_plugins_data.mixed_streams import MixedStreams
from forge_plugins_data.mixture_config import MixtureConfig, MixturePhase
from forge_plugins_data.mixture_parts import MixtureParts, Part, WatchedParts


def open_mixture(
    config: MixtureConfig,
    /,
    *,
    seq_len: int,
    split: Split,
    build: Builder,
    seed: int,
    samples_per_step: int,
    phases: Sequence[tuple[int, MixturePhase]] = (),
) -> Mixture | MixedStreams | MixtureSet:
    """Open all sources; for validation, the ones that hold something out.

    Raises:
        ConfigError: a source cannot be opened; sources of different tokenizers or entries; nothing is held out.
    """
    chosen = [one for one in config.sources if split != "validation" or one.holds_out]
    if not chosen:
        raise ConfigError("no source holds anything out; set validation in one, or name data under [eval.data]")
    parts = []
    for one in chosen:
        own_seed = _seed_of(seed, one.name)
        given = {"seq_len": seq_len, "split": split, "seed": own_seed, "samples_per_step": samples_per_step}
        try:
            parts.append(Part(one, build(one.source, **given), own_seed))
        except ConfigError as error:
            raise ConfigError(f"source {one.name!r}: {error}") from error
    together = MixtureParts.of(parts, tuple(one.name for one in config.sources))
    if split != "train":
        return MixtureSet(together)
    kind = MixedStreams if any(part.n_streams for part in parts) else Mixture
    return kind(together, config.shares(), [(start, config.shares(phase)) for start, phase in phases])


_BLOCK = 4096
"""Positions whose samples are found at once, and kept for the microbatches after."""


class Mixture(WatchedParts):
    """Position ``p`` is sample number ``k`` of one source's own stream, both as ``Interleaving`` has them."""

    def __init__(
        self, parts: MixtureParts, shares: Sequence[float], phases: Sequence[tuple[int, Sequence[float]]] = ()
    ) -> None:
        """
        Args:
            shares: of each source, from position 0.
            phases: positions from which on they are others, in order, and the shares. Each source goes on where it was.
        """
        super().__init__(parts)
        self.shares = tuple(shares)
        self.fingerprint = parts.fingerprint(self.shares)
        self._planned = InterleavingInPhases([(0, shares), *phases])
        self.go_without(())

    def go_without(self, left_out: Sequence[tuple[int, int]]) -> None:
        """See ``DataSourceConfig.Phase``."""
        self._interleavings = self._planned.without(left_out)
        self._block = functools.lru_cache(maxsize=8)(  # a new one, as a thread may still read for the one before
            lambda number: self.samples_at(np.arange(number * _BLOCK, (number + 1) * _BLOCK))
        )

    def read_at(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """Same as ``PositionedSource.read_at``."""
        if self._parts.windows:
            first = int(positions[0]) // _BLOCK if len(positions) else 0
            offsets = positions - first * _BLOCK
            is_within = offsets.min(initial=0) >= 0 and offsets.max(initial=0) < _BLOCK
            which, indices = self._block(first) if is_within else self.samples_at(positions)
            chosen = offsets if is_within else slice(None)
            return self._parts.read_windows(which[chosen], indices[chosen])
        which, numbers = self._interleavings.at(positions)
        return self._parts.gathered(which, lambda part, rows: self._parts.parts[part].read(numbers[rows]))

    def samples_at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The part at each of ``positions`` ``(N,)``, and which of its samples: both int64 ``(N,)``."""
        which, numbers = self._interleavings.at(positions)
        indices = np.empty_like(numbers)
        for part in np.unique(which).tolist():
            rows = which == part
            indices[rows] = self._parts.parts[part].indices(numbers[rows])
        return which, indices

    def counts(self, position: int) -> list[int]:
        """Same as ``MixedSource.counts``."""
        return self._interleavings.counts(position)


class MixtureSet(WatchedParts):
    """All samples of all parts, in an order that is pseudo-random and always the same: the first of them are of each
    part in proportion to its length."""

    def __init__(self, parts: MixtureParts) -> None:
        super().__init__(parts)
        self.fingerprint = parts.fingerprint()
        self._sources = [_with_an_end(part) for part in parts.parts]
        self._starts = np.array([0, *accumulate(map(len, self._sources))])
        self._order = SampleStream(_Numbers(len(self)), seed=0, shuffle=True)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Same as ``DataSource.read``."""
        numbers = self._order.indices(indices)
        which = np.searchsorted(self._starts, numbers, side="right") - 1
        offsets = numbers - self._starts[which]

        def read(part: int, rows: np.ndarray) -> dict[str, np.ndarray]:
            source = self._sources[part]
            return with_counts(source.read(offsets[rows]), counted_entry(source))

        return self._parts.gathered(which, read)


class _Numbers:
    """A source of nothing but its length, whose order is asked for."""

    vocab_size, fingerprint = 1, ""
    tokenizer: Tokenizer | None = None

    def __init__(self, n: int) -> None:
        self._n = n

    def __len__(self) -> int:
        return self._n

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {"tokens": indices[:, None], "targets": indices[:, None]}


def _with_an_end(part: Part) -> DataSource:
    if isinstance(part.source, PositionedSource | StreamedSource):
        raise ConfigError(f"source {part.name!r} has no end, so that it cannot be evaluated")
    return part.source


def _seed_of(seed: int, name: str) -> int:
    """Sources of one run are shuffled apart from each other, and the same beside any others."""
    return int.from_bytes(hashlib.sha256(f"forge.mixture/{seed}/{name}".encode()).digest()[:8], "big")
