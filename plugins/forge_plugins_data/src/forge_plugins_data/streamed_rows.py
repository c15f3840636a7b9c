"""Rows of a data set of the ``datasets`` library that is streamed: dealt to streams, and shuffled in blocks."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from forge_core.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from datasets import IterableDataset  # type: ignore[import-untyped]  # it has no types


@attrs.frozen
class BlockPlace:
    """Where a block of rows begins. What a source adds says where it is in the block."""

    epoch: int = 0
    block: int = 0
    """Number in the epoch of the rows that are shuffled together."""
    row: int = 0
    """Of the stream's files: where the block begins."""
    reading: Mapping[str, Any] | None = None
    """Where the block begins, as ``datasets`` says it; ``None`` is the beginning of the epoch."""


Place = TypeVar("Place", bound=BlockPlace)


def epochs(
    samples: Callable[[Place], Iterator[tuple[dict[str, np.ndarray], Place]]], place: Place, nothing: str
) -> Iterator[tuple[dict[str, np.ndarray], dict[str, Any]]]:
    """Samples without end, each with the state after it: the place as JSON values.

    Args:
        samples: gives those of an epoch from a place on, each with the place after it.
        nothing: a sentence for an epoch without a sample.

    Raises:
        ConfigError: an epoch has not a single sample.
    """
    beginning = type(place)
    while True:
        has_samples = place != beginning(place.epoch)  # a sample has ended there
        for sample, place_after in samples(place):
            has_samples = True
            yield sample, attrs.asdict(place_after)
        if not has_samples:
            raise ConfigError(nothing)
        place = beginning(place.epoch + 1)


def _next(rows: Iterator[Mapping[str, Any]], stream: int, row: int) -> Mapping[str, Any] | None:
    try:
        return next(rows, None)
    except (ValueError, EOFError, zlib.error) as error:  # as pyarrow, pandas and gzip say it
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(
            f"data: a file of stream {stream} is damaged at row {row} or later (from 0): {said}"
        ) from error


class StreamedRows:
    """The rows of several streams of a data set.

    A stream has some of the data set's files; where there are fewer files than streams, every ``k``-th row of one.

    Args:
        block_size: rows that are shuffled together; 1 keeps their order.
        seed: what orders depend on, beside the stream, the epoch and the block: the source and the run's seed.
    """

    def __init__(self, dataset: IterableDataset, n_streams: int, block_size: int, seed: str) -> None:
        self._dataset, self._n_streams, self._block_size, self._seed = dataset, n_streams, block_size, seed

    def blocks(self, stream: int, start: Place) -> Iterator[tuple[Place, list[tuple[int, Mapping[str, Any]]]]]:
        """The blocks of an epoch, from the one that begins at ``start`` on: where each begins, and its rows in their
        order, each with its number in the stream's files.

        Raises:
            ConfigError: a file is damaged.
        """
        dataset, part, parts = self._part(stream)
        if start.reading is not None:
            dataset.load_state_dict(dict(start.reading))
        rows = iter(dataset)
        while True:
            found: list[tuple[int, Mapping[str, Any]]] = []
            row = start.row
            while len(found) < self._block_size and (one := _next(rows, stream, row)) is not None:
                if row % parts == part:
                    found.append((row, one))
                row += 1
            if not found:
                return
            yield start, [found[index] for index in self.order(len(found), stream, start)]
            reading = json.loads(json.dumps(dataset.state_dict()))
            start = attrs.evolve(start, block=start.block + 1, row=row, reading=reading)

    def order(self, n: int, stream: int, start: BlockPlace) -> list[int]:
        """A pseudo-random order of ``n`` things of a block."""
        if self._block_size == 1:
            return [*range(n)]
        which = f"{self._seed}/{stream}/{start.epoch}/{start.block}"
        return sorted(range(n), key=lambda index: hashlib.sha256(f"{which}/{index}".encode()).digest())

    def _part(self, stream: int) -> tuple[IterableDataset, int, int]:
        """The files of a stream, and of how many parts of their rows it has which."""
        files = self._dataset.num_shards
        if files >= self._n_streams:
            return self._dataset.shard(self._n_streams, stream), 0, 1
        return (
            self._dataset.shard(files, stream % files),
            stream // files,
            len(range(stream % files, self._n_streams, files)),
        )
