"""The data source ``huggingface_streaming``: a data set of the ``datasets`` library, tokenised as it is read."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from forge_core.contracts.builder import Builder
from forge_core.contracts.data_source import Split
from forge_core.contracts.tokenizer import Tokenizer
from forge_core.errors import ConfigError
from forge_plugins_data.documents import Document
from forge_plugins_data.encoding import encode_document
from forge_plugins_data.hub_config import HuggingFaceStreamingConfig
from forge_plugins_data.hub_dataset import load_split, local_files, require_column
from forge_plugins_data.packing import document_inputs
from forge_plugins_data.streamed_rows import BlockPlace, StreamedRows, epochs

if TYPE_CHECKING:
    from datasets import IterableDataset  # type: ignore[import-untyped]  # it has no types


def open_huggingface_streaming(
    config: HuggingFaceStreamingConfig, /, *, seq_len: int, split: Split, build: Builder, seed: int, **_: object
) -> HuggingFaceStreams:
    """Open a data set. Nothing is tokenised yet.

    Raises:
        ConfigError: the data set cannot be loaded, or has no such column; it is to be evaluated.
    """
    if split != "train":
        raise ConfigError("'huggingface_streaming' holds nothing out and has no end; name other data under [eval.data]")
    tokenizer: Tokenizer = build(config.tokenizer, base=Path())
    dataset: Any = load_split(config, streams=config.streams)
    return HuggingFaceStreams(config, dataset, tokenizer, seq_len=seq_len, seed=seed)


@attrs.frozen
class _Place(BlockPlace):
    """Where a document begins, or a sample of a stream."""

    document: int = 0
    """Number in the block, after it was shuffled."""
    token: int = 0
    """Of the document."""


class HuggingFaceStreams:
    """The ``StreamedSource``.

    Documents of a stream follow each other, each with its end, and are cut into windows as those of other sources are.
    At the end of an epoch, a rest of less than a window is not used.
    """

    def __init__(
        self,
        config: HuggingFaceStreamingConfig,
        dataset: IterableDataset,
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        seed: int,
    ) -> None:
        self.vocab_size, self.tokenizer, self.n_streams = tokenizer.vocab_size, tokenizer, config.streams
        self._config, self._seq_len = config, seq_len
        order = f"forge.huggingface_streaming/{seed}"
        self._rows = StreamedRows(dataset, config.streams, config.shuffle_buffer, order)
        self._end = tokenizer.end_of_document
        files = local_files(config) or config.path  # wherever they lie
        keys = (config.subset, config.split, config.revision, config.data_files, config.column, config.document_mask)
        dealt = (config.streams, config.shuffle_buffer, dataset.num_shards)
        content = json.dumps([files, keys, dealt, seq_len, tokenizer.fingerprint])
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()

    def open(
        self, stream: int, state: Mapping[str, Any] | None
    ) -> Iterator[tuple[dict[str, np.ndarray], dict[str, Any]]]:
        """Same as ``StreamedSource.open``.

        Raises:
            ConfigError: an epoch has not a single sample; there is no such column, or it is no text.
        """
        place = _Place() if state is None else _Place(**state)
        nothing = (
            f"data: {self._config.words} has less than a sample of {self._seq_len} tokens in stream {stream} "
            f"of {self.n_streams} (from 0); use fewer streams, more data or a smaller train.seq_len"
        )
        return epochs(partial(self._samples, stream), place, nothing)

    def _samples(self, stream: int, place: _Place) -> Iterator[tuple[dict[str, np.ndarray], _Place]]:
        """Those of an epoch from ``place`` on, each with the place after it."""
        pieces: deque[tuple[_Place, np.ndarray]] = deque()
        n_tokens = 0
        for piece in self._documents(stream, place):
            pieces.append(piece)
            n_tokens += len(piece[1])
            while n_tokens > self._seq_len:
                window = _window(pieces, self._seq_len)
                n_tokens -= self._seq_len
                yield self._sample(window), pieces[0][0]

    def _sample(self, window: np.ndarray) -> dict[str, np.ndarray]:
        batch = {"tokens": window[None, :-1].copy(), "targets": window[None, 1:].copy()}
        if self._config.document_mask:
            batch |= document_inputs(batch["tokens"], batch["targets"], self._end)
        return {name: values[0] for name, values in batch.items()}

    def _documents(self, stream: int, place: _Place) -> Iterator[tuple[_Place, np.ndarray]]:
        """Tokens of each document that has some, with its end, ``(N,)`` int64; the first one from ``place`` on."""
        for start, block in self._rows.blocks(stream, attrs.evolve(place, document=0, token=0)):
            for number, (row, found) in enumerate(block):
                here = attrs.evolve(start, document=number)
                if start.block == place.block and number < place.document:
                    continue
                document = self._document(found, stream, row)
                ids = encode_document(self.tokenizer, document.content, None, document.where)
                if ids is None or not len(ids):
                    continue
                if here == attrs.evolve(place, token=0):
                    here = place
                yield here, np.append(ids.astype(np.int64), self._end)[here.token :]

    def _document(self, row: Mapping[str, Any], stream: int, number: int) -> Document:
        require_column(row, self._config)
        text = row[self._config.column]
        if not isinstance(text, str | None):
            raise ConfigError(
                f"column = {self._config.column!r}: in {self._config.words} it has {str(text)[:80]!r}, which is no text"
            )
        return Document(text, f"{self._config.words}, stream {stream}, row {number} (from 0)")


def _window(pieces: deque[tuple[_Place, np.ndarray]], seq_len: int) -> np.ndarray:
    """The first ``seq_len + 1`` tokens, of which ``seq_len`` are taken away: the last one begins the next window."""
    taken, missing = [], seq_len
    while missing:
        place, ids = pieces.popleft()
        taken.append(ids[:missing])
        if len(ids) > missing:
            pieces.appendleft((attrs.evolve(place, token=place.token + missing), ids[missing:]))
        missing -= len(taken[-1])
    return np.concatenate([*taken, pieces[0][1][:1]])
