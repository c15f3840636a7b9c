"""Which source stands at each position of a mixture: a function of the position alone."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence

import numpy as np

_BITS = np.uint64(32)
_LOW = np.uint64(2**32 - 1)
_HALF = np.uint64(2**31)
_BLOCK = 4096
"""Positions that are dealt out at once: not much dearer than the eight of one microbatch, and kept for those after."""


class Interleaving:
    """Positions 0, 1, … dealt out to sources in proportion to their weights, as evenly as can be.

    The sources are the leaves of a Huffman tree of their weights. At each node, of the first ``m`` positions that come
    there ``round(share · m)`` go to the left, as in Bresenham's lines, so that a path through the tree says to which
    source a position belongs and how many of that source come before it. Before any position ``p``, each source has
    had ``weight · p`` samples, give or take 2: a node adds at most ½ to the error that comes down to it, of which a
    child takes its share; and in a Huffman tree, where an uncle weighs no less than a nephew, no share but the last one
    is above ⅔.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """Args:
        weights: none negative, one at least above 0; they need not add up to 1. A source of weight 0 has no position.
        """
        n_nodes = 2 * len(weights)
        self._left, self._right = np.zeros(n_nodes, np.int64), np.zeros(n_nodes, np.int64)
        self._share = np.zeros(n_nodes, np.uint64)
        """Of the left child of each node above the leaves, times 2³²."""
        self._n_sources = len(weights)
        heap = [(weight, source) for source, weight in enumerate(weights) if weight > 0]
        heapq.heapify(heap)
        node = len(weights)
        while len(heap) > 1:
            (lighter, right), (heavier, left) = heapq.heappop(heap), heapq.heappop(heap)
            self._left[node], self._right[node] = left, right
            share = round(heavier / (heavier + lighter) * 2**32)
            self._share[node] = min(max(share, 1), 2**32 - 1)
            heapq.heappush(heap, (heavier + lighter, node))
            node += 1
        self._root = heap[0][1]
        self._block = functools.lru_cache(maxsize=8)(
            lambda number: self._walk(np.arange(number * _BLOCK, (number + 1) * _BLOCK))
        )

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source at each of ``positions`` ``(B,)`` int64, and how many samples of that source come before it: both
        int64 ``(B,)``."""
        first = int(positions[0]) // _BLOCK if len(positions) else 0
        offsets = positions - first * _BLOCK
        if len(offsets) and offsets.min() >= 0 and offsets.max() < _BLOCK:  # the few of a microbatch
            which, number = self._block(first)
            return which[offsets], number[offsets]
        return self._walk(positions)

    def _walk(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        node = np.full(positions.shape, self._root)
        number = positions.astype(np.uint64)
        while (inner := node >= self._n_sources).any():
            at, m = node[inner], number[inner]
            before, after = self._to_left(at, m), self._to_left(at, m + np.uint64(1))
            goes_left = after > before
            node[inner] = np.where(goes_left, self._left[at], self._right[at])
            number[inner] = np.where(goes_left, before, m - before)
        return node, number.astype(np.int64)

    def counts(self, position: int) -> list[int]:
        """How many samples of each source come before ``position``."""
        counts = [0] * self._n_sources
        pending = [(self._root, position)]
        while pending:
            node, m = pending.pop()
            if node < self._n_sources:
                counts[node] = m
                continue
            to_left = int(self._to_left(np.array([node]), np.array([m], np.uint64))[0])
            pending += [(int(self._left[node]), to_left), (int(self._right[node]), m - to_left)]
        return counts

    def _to_left(self, node: np.ndarray, m: np.ndarray) -> np.ndarray:
        """``round(share · m)`` in whole numbers, exact for all ``m`` below 2⁶²."""
        share = self._share[node]
        result: np.ndarray = share * (m >> _BITS) + ((share * (m & _LOW) + _HALF) >> _BITS)
        return result


class InterleavingInPhases:
    """One ``Interleaving`` after another; each source goes on with the number at which the one before has left it."""

    def __init__(self, phases: Sequence[tuple[int, Sequence[float]]]) -> None:
        """
        Args:
            phases: where each begins, in order, the first at 0; and its weights.
        """
        self._given = phases
        self._starts = np.array([start for start, _ in phases])
        self._phases = [Interleaving(weights) for _, weights in phases]
        self._before = np.zeros((len(phases), len(phases[0][1])), np.int64)
        """How many samples of each source come before each phase."""
        for index, length in enumerate(np.diff(self._starts)):
            self._before[index + 1] = self._before[index] + self._phases[index].counts(int(length))

    def without(self, left_out: Sequence[tuple[int, int]]) -> InterleavingInPhases:
        """The same for a run that goes without stretches of positions, in their order. A phase begins later by each
        that ends before it. One that reaches into it does not move it: the run goes without what it has read there."""
        phases = []
        for start, weights in self._given:
            for first, stop in left_out:
                start += (stop - first) * (stop <= start)
            phases.append((start, weights))
        return InterleavingInPhases(phases)

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Same as ``Interleaving.at``."""
        phases = np.searchsorted(self._starts, positions, side="right") - 1
        which, numbers = np.empty_like(positions), np.empty_like(positions)
        for phase in np.unique(phases).tolist():
            rows = phases == phase
            which[rows], own = self._phases[phase].at(positions[rows] - self._starts[phase])
            numbers[rows] = own + self._before[phase][which[rows]]
        return which, numbers

    def counts(self, position: int) -> list[int]:
        """Same as ``Interleaving.counts``."""
        phase = int(np.searchsorted(self._starts, position, side="right")) - 1
        own = self._phases[phase].counts(position - int(self._starts[phase]))
        return [before + count for before, count in zip(self._before[phase].tolist(), own, strict=True)]
