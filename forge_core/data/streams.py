"""Streams, read by position: what stands at a position stays a function of the position alone."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from forge_core.contracts.data_source import StreamedSource
from forge_core.errors import ConfigError, PluginError

Sample = Mapping[str, np.ndarray]
State = Mapping[str, Any] | None
"""``None`` is the beginning."""

_STATES_CHECKED = 4
"""The first of each stream."""
_STEPS_KEPT = 128
"""Steps whose states are kept, so that their samples can be read once more; more than a step guard asks for."""


class StreamsByPosition:
    """A ``PositionedSource`` of a ``StreamedSource``: position ``p`` is sample ``p div n`` of stream ``p mod n``, where
    ``n`` is the number of streams. A stream that ends begins anew.

    Streams are opened when they are read first, from the nearest known state. Reading is safe from several threads, and
    gives the same in any order; it is fast where positions of a stream go up.

    What else the source has, such as descriptions of entries and a watch over files, this has too, as attributes of its
    own: from Python 3.12 on, ``isinstance`` of a protocol finds no others.
    """

    ahead = 0
    """A stream's samples that are read ahead. So many before the last one read are kept, as they may be asked for by
    another thread; those further back are read again, from a state."""

    def __init__(self, source: StreamedSource) -> None:
        self.vocab_size, self.tokenizer, self.n_streams = source.vocab_size, source.tokenizer, source.n_streams
        self.fingerprint = f"{source.fingerprint}, {source.n_streams} streams"
        self._source = source
        others = {*dir(source)} - {*dir(self), "open"}
        vars(self).update((name, getattr(source, name)) for name in others if name[0] != "_")
        self.restart(0, [None] * self.n_streams)

    def restart(self, number: int, states: Sequence[State]) -> None:
        """Take it that ``number`` samples of each stream have been read, after which their states are ``states``."""
        self._starts: tuple[int, ...] = (number,)  # before the cursors, which a reader takes first
        self._cursors = [_Cursor(self._source, stream, number, state) for stream, state in enumerate(states)]

    def read_at(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """Same as ``PositionedSource.read_at``.

        Raises:
            ConfigError: a stream has no sample at all.
        """
        numbers, streams = np.divmod(positions, self.n_streams)
        cursors, starts, ahead = self._cursors, self._starts, self.ahead
        samples = [cursors[s].read(k, starts, ahead) for s, k in zip(streams.tolist(), numbers.tolist(), strict=True)]
        return {name: _stacked([sample[name] for sample in samples]) for name in samples[0]}

    def states(self, number: int) -> dict[int, State]:
        """The states after ``number`` samples of each stream, as far as this rank has read them."""
        known = ((stream, cursor.states) for stream, cursor in enumerate(self._cursors))
        return {stream: states[number] for stream, states in known if number in states}

    def forget_before(self, number: int) -> None:
        """The samples before ``number`` of each stream belong to steps that are over; they are asked for again, if at
        all, within some steps. It does not wait for threads that read."""
        self._starts = (*self._starts[1 - _STEPS_KEPT :], number)


def _stacked(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Smaller ones are filled up with zeros."""
    size = np.max([one.shape for one in arrays], axis=0)
    return np.stack([np.pad(one, [(0, n) for n in gap]) if any(gap := size - one.shape) else one for one in arrays])


class _Cursor:
    """One stream, and where it is."""

    def __init__(self, source: StreamedSource, stream: int, number: int, state: State) -> None:
        self._source, self._stream = source, stream
        self.states: dict[int, State] = {0: None, number: state}
        """By how many samples have been read before."""
        self._samples: dict[int, Sample] = {}
        self._iterator: Iterator[tuple[Sample, Mapping[str, Any]]] | None = None
        self._next = number
        self._starts: tuple[int, ...] = (number,)
        self._unchecked = _STATES_CHECKED
        self._lock = threading.Lock()

    def read(self, number: int, starts: tuple[int, ...], ahead: int) -> Sample:
        """Read a sample.

        Args:
            starts: where steps begin whose states are kept; the last one is not over.
            ahead: how many samples before ``number`` are kept.
        """
        with self._lock:
            if starts is not self._starts:
                self._forget(starts)
            if number in self._samples:
                return self._samples[number]
            oldest = max(starts[-1], number - ahead)
            self._samples = {at: one for at, one in self._samples.items() if at >= oldest}
            self._seek(number)
            try:
                while self._next < number:
                    self._advance(oldest)
                return self._advance(oldest)
            except BaseException:
                self._iterator = None  # a generator that has raised would seem to have ended
                raise

    def _forget(self, starts: tuple[int, ...]) -> None:
        """Keep the states of steps that are not over, and those at ``starts``."""
        kept = {0, *starts}
        self.states = {at: one for at, one in self.states.items() if at >= starts[-1] or at in kept}
        self._starts = starts

    def _seek(self, number: int) -> None:
        """Go to the nearest state from which ``number`` is reached."""
        nearest = max(at for at in self.states if at <= number)
        if self._iterator is None or not nearest <= self._next <= number:
            self._open(nearest, self.states[nearest])

    def _open(self, at: int, state: State) -> None:
        self._iterator, self._next = iter(self._source.open(self._stream, state)), at

    def _advance(self, oldest: int) -> Sample:
        """Read the next sample, and keep it from the number ``oldest`` on."""
        assert self._iterator is not None, "it has been opened"
        found = next(self._iterator, None)
        if found is None:
            self._open(self._next, None)
            found = next(self._iterator, None)
        if found is None:
            n = self._source.n_streams
            raise ConfigError(f"data: stream {self._stream} of {n} (from 0) has no sample; use fewer streams")
        sample, state = found
        if self._unchecked:
            _refuse_what_is_not_json(state, self._source)
            self._unchecked -= 1
        if self._next >= oldest:
            self._samples[self._next] = sample
        self._next += 1
        if self._next >= self._starts[-1]:
            self.states[self._next] = state
        return sample


def _refuse_what_is_not_json(state: Mapping[str, Any], source: StreamedSource) -> None:
    """
    Raises:
        PluginError: it could not be saved.
    """
    try:
        json.dumps(state)
    except (TypeError, ValueError) as error:
        raise PluginError(
            f"{type(source).__qualname__} gives a state that is not made of JSON values ({error}), so that it cannot "
            "be saved. This is a bug in the data source."
        ) from error
