"""The global stream of samples: a pure function of (seed, position), whoever consumes it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import cast

import numpy as np

from forge_core.contracts.batch import MixedSource
from forge_core.contracts.data_source import PositionedSource, Source
from forge_core.data.counts import counted_entry, with_counts
from forge_core.data.permutation import permute
from forge_core.data.streams import StreamsByPosition

_BLOCK = 512
"""Positions permuted at once: hardly dearer than the eight of one microbatch, and kept for those after it."""


class SampleStream:
    """A source without end: epoch after epoch, each in an order of its own.

    Position ``p`` is sample ``p mod n`` of epoch ``p div n``, where ``n = len(source)``; epochs follow each other
    without a gap, so that a batch may have samples of two. A ``PositionedSource`` says itself what stands at ``p``.
    Reading is safe from several threads.

    Args:
        left_out: stretches ``[start, stop)`` of the whole stream that this one goes without, apart from each other and
            in their order. What comes after one moves up, so that positions have no gaps.
    """

    def __init__(self, source: Source, seed: int, shuffle: bool, left_out: Sequence[tuple[int, int]] = ()) -> None:
        self.source = source
        # asked once, as protocols take their time to answer
        self._indexed = None if isinstance(source, PositionedSource) else source
        self._positioned = cast("PositionedSource", source)
        self._counted_in = counted_entry(source)
        self.streams = source if isinstance(source, StreamsByPosition) else None
        self.seed = seed
        self.shuffle = shuffle
        self.left_out = tuple((int(start), int(stop)) for start, stop in left_out)
        if hasattr(source, "go_without"):
            source.go_without(self.left_out)
        self._order_of_block = functools.lru_cache(maxsize=8)(self._permuted_block)

    def read(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """The samples at ``positions`` ``(B,)``, any integers from 0, as ``DataSource.read`` returns them, counted."""
        if self._indexed is None:
            return with_counts(self._positioned.read_at(self.numbers(positions)), self._counted_in)
        return with_counts(self._indexed.read(self.indices(positions)), self._counted_in)

    def indices(self, positions: np.ndarray) -> np.ndarray:
        """Which samples of an indexed source are at ``positions`` ``(B,)``: int64 ``(B,)``."""
        assert self._indexed is not None, "it has no index"
        epochs, offsets = np.divmod(self.numbers(positions), len(self._indexed))
        if not self.shuffle:
            return offsets
        blocks = offsets // _BLOCK
        indices = np.empty_like(offsets)
        for epoch, block in set(zip(epochs.tolist(), blocks.tolist(), strict=True)):
            chosen = (epochs == epoch) & (blocks == block)
            indices[chosen] = self._order_of_block(epoch, block)[offsets[chosen] - block * _BLOCK]
        return indices

    def numbers(self, positions: np.ndarray) -> np.ndarray:
        """Where ``positions`` ``(B,)`` of this stream are in the one that goes without nothing: int64 ``(B,)``."""
        numbers = positions.astype(np.int64)
        for start, stop in self.left_out:
            numbers = numbers + (stop - start) * (numbers >= start)
        return numbers

    def counts(self, position: int) -> dict[str, int]:
        """How many samples of each source of a ``MixedSource`` stand before ``position``, by name; of another source,
        nothing."""
        if not isinstance(self.source, MixedSource):
            return {}
        end = int(self.numbers(np.array([position]))[0])
        counts = np.array(self.source.counts(end))
        for start, stop in self.left_out:
            if start < end:
                counts -= np.array(self.source.counts(stop)) - np.array(self.source.counts(start))
        return dict(zip(self.source.names, counts.tolist(), strict=True))

    def samples_read(self, position: int) -> int:
        """How many samples of each of ``streams`` are read before ``position``, a multiple of their number."""
        assert self.streams is not None, "it is asked of streams"
        return (self.numbers_of(0, position)[1] + 1) // self.streams.n_streams if position else 0

    def numbers_of(self, start: int, stop: int) -> tuple[int, int]:
        """The first and the last number of the positions ``start`` to ``stop − 1``."""
        first, last = self.numbers(np.array([start, stop - 1])).tolist()
        return first, last

    def without(self, start: int, stop: int) -> SampleStream:
        """This stream without its positions ``start`` to ``stop − 1``."""
        first, last = self.numbers_of(start, stop)
        outside = [stretch for stretch in self.left_out if not first <= stretch[0] <= last]
        return SampleStream(self.source, self.seed, self.shuffle, sorted([*outside, (first, last + 1)]))

    def _permuted_block(self, epoch: int, block: int) -> np.ndarray:
        assert self._indexed is not None, "as in indices"
        n = len(self._indexed)
        return permute(np.arange(block * _BLOCK, min((block + 1) * _BLOCK, n)), n, self.seed, epoch)
