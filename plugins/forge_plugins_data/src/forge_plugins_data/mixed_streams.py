"""A mixture that has streams among its sources, and so is read as streams itself."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from forge_core.data.permutation import permute
from forge_core.errors import ConfigError
from forge_plugins_data.interleaving import InterleavingInPhases
from forge_plugins_data.mixture_parts import MixtureParts, Part, WatchedParts

_BLOCK = 4096
"""Positions that are dealt out at once, about, and kept for the other streams."""


class MixedStreams(WatchedParts):
    """The ``StreamedSource`` of a mixture.

    It has ``n`` streams, the greatest common divisor of how many its sources have. Stream ``s`` of it has the streams
    ``s``, ``s + n``, ``s + 2n`` … of each of them, which take turns. The ``m``-th samples of the ``n`` streams are of
    the sources that stand at the positions ``m · n`` to ``m · n + n − 1`` of ``InterleavingInPhases``, so that before
    any step each source has had its share, give or take two samples. Which stream has which of these positions is
    pseudo-random; in their order, every second stream might have all samples of a source of weight ½.

    Indexed sources have the samples that they have in a ``Mixture``.
    """

    def __init__(
        self, parts: MixtureParts, shares: Sequence[float], phases: Sequence[tuple[int, Sequence[float]]] = ()
    ) -> None:
        """
        Args:
            shares: of each source, from position 0.
            phases: positions from which on they are others, in order, and the shares. Each source goes on where it was.
        """
        super().__init__(parts)
        numbers = [part.n_streams for part in parts.parts]
        self.n_streams = math.gcd(*numbers)
        self.fingerprint = parts.fingerprint(tuple(shares), numbers)
        self._planned = InterleavingInPhases([(0, shares), *phases])
        self._rows = -(-_BLOCK // self.n_streams)
        self.go_without(())

    def go_without(self, left_out: Sequence[tuple[int, int]]) -> None:
        """See ``DataSourceConfig.Phase``."""
        self._interleavings = self._planned.without(left_out)
        self._block = functools.lru_cache(maxsize=8)(self._dealt)

    def open(
        self, stream: int, state: Mapping[str, Any] | None
    ) -> Iterator[tuple[dict[str, np.ndarray], dict[str, Any]]]:
        """Same as ``StreamedSource.open``.

        Raises:
            ConfigError: a stream of a source has no sample at all.
        """
        at, states = (state["next"], state["sources"]) if state else (0, {})
        turns = {
            number: _Turns(part, range(stream, part.n_streams, self.n_streams), states.get(part.name))
            for number, part in enumerate(self._parts.parts)
            if part.n_streams
        }

        def read(number: np.ndarray, part: int, _: np.ndarray) -> dict[str, np.ndarray]:
            return turns[part].read() if part in turns else self._parts.parts[part].read(number)

        while True:
            dealt = self._block(at // self._rows)[:, at % self._rows, stream]
            batch = self._parts.gathered(dealt[:1], functools.partial(read, dealt[1:]))
            at += 1
            states = {self._parts.names[number]: one.state() for number, one in turns.items()}
            yield {name: values[0] for name, values in batch.items()}, {"next": at, "sources": states}

    def counts(self, position: int) -> list[int]:
        """Same as ``MixedSource.counts``."""
        row, rest = divmod(position, self.n_streams)
        counts = np.array(self._interleavings.counts(position - rest))
        begun = self._block(row // self._rows)[0, row % self._rows, :rest]
        found: list[int] = (counts + np.bincount(begun, minlength=len(counts))).tolist()
        return found

    def _dealt(self, block: int) -> np.ndarray:
        """``(2, rows, streams)`` int64: of some samples of each stream the source, and how many samples of the source
        stand before."""
        shape = (self._rows, self.n_streams)
        positions = block * math.prod(shape) + np.arange(math.prod(shape))
        order = permute(positions, 2**62, seed=0, epoch=0).reshape(shape).argsort(axis=1)
        which, numbers = (found.reshape(shape) for found in self._interleavings.at(positions))
        return np.stack([np.take_along_axis(found, order, axis=1) for found in (which, numbers)])


class _Turns:
    """Some streams of one source, which take turns.

    Args:
        streams: their numbers.
        state: where to go on; ``None`` is the beginning.
    """

    def __init__(self, part: Part, streams: Sequence[int], state: Mapping[str, Any] | None) -> None:
        self._part, self._streams = part, streams
        self._turn: int = state["turn"] if state else 0
        self._states = [*state["states"]] if state else [None] * len(streams)
        self._open: dict[int, Iterator[tuple[Mapping[str, np.ndarray], Mapping[str, Any]]]] = {}

    def read(self) -> dict[str, np.ndarray]:
        """The next sample, as a batch of one. A stream that ends begins anew.

        Raises:
            ConfigError: it has no sample.
        """
        turn = self._turn
        sample, self._states[turn] = self._next(turn)
        self._turn = (turn + 1) % len(self._streams)
        return self._part.as_batch(sample)

    def state(self) -> dict[str, Any]:
        """Where it is, a mapping of its own."""
        return {"turn": self._turn, "states": [*self._states]}

    def _next(self, turn: int) -> tuple[Mapping[str, np.ndarray], Mapping[str, Any]]:
        source, stream = self._part.streams, self._streams[turn]
        assert source is not None, "it is read as streams"
        if turn not in self._open:
            self._open[turn] = iter(source.open(stream, self._states[turn]))
        if (found := next(self._open[turn], None)) is None:
            self._open[turn] = iter(source.open(stream, None))
            found = next(self._open[turn], None)
        if found is None:
            raise ConfigError(f"data: {self._part.without_samples(stream)}")
        return found
