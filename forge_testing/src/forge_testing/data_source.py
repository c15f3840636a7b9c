"""Conformance of data sources (contract: ``forge_core.contracts.data_source``)."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from typing import Any, ClassVar

import numpy as np
import pytest

from forge_core.contracts.batch import KNOWN, DescribedSource, MixedSource
from forge_core.contracts.data_source import (
    DataSourceConfig,
    PositionedSource,
    Source,
    Split,
    StreamedSource,
    TokenlessSource,
)
from forge_core.contracts.loss import IGNORED
from forge_core.data.streams import StreamsByPosition
from forge_core.errors import ConfigError
from forge_testing.component_case import ComponentCase


class DataSourceConformance(ComponentCase):
    """Subclass it, name the component, and pytest runs every check below on it.

    A source that reads files gets them from an autouse fixture of the subclass, which may set ``self.config``. Give it
    data that do not repeat themselves: what is held out is told from the rest by its tokens. Of a ``PositionedSource``
    the checks read positions where they would read indices of another, and of a ``StreamedSource`` the first positions.
    """

    kind = "data_source"
    seq_len: ClassVar[int] = 8
    holds_out: ClassVar[bool] = True
    """Whether this configuration keeps samples back for validation."""

    def make(self, **given: Any) -> Any:
        return super().make(**{"seed": 0, "samples_per_step": 4, **given})

    def open(self, split: Split = "train", seq_len: int | None = None) -> Source:
        source: Source | StreamedSource = self.make(seq_len=seq_len or self.seq_len, split=split)
        return StreamsByPosition(source) if isinstance(source, StreamedSource) else source

    def streams(self) -> StreamedSource:
        source = self.make(seq_len=self.seq_len, split="train")
        if not isinstance(source, StreamedSource):
            pytest.skip("the source has no streams")
        return source

    def test_config_has_the_common_keys(self) -> None:
        if not self.component:
            pytest.skip("built by make(), without a configuration")
        config = self.use().config

        assert isinstance(config, DataSourceConfig), f"{type(config).__name__} must extend DataSourceConfig"
        is_positioned = isinstance(self.open(), PositionedSource)
        assert config.has_own_order == is_positioned, (
            f"{type(config).__name__}.has_own_order must be {is_positioned}, as the source has "
            f"{'read_at, or streams' if is_positioned else 'no read_at'}: by it, the key shuffle is refused where it "
            "does nothing"
        )
        batch = _read(self.open(), np.arange(1))
        for name, entry in config.entries().items():
            shape = entry.shape(1, self.seq_len)
            assert name in batch, f"{type(config).__name__}.entries() names {name!r}, which batches do not have"
            fits = len(shape) == batch[name].ndim and all(
                most is None or size <= most for size, most in zip(batch[name].shape, shape, strict=True)
            )
            assert fits, (
                f"{type(config).__name__}.entries() gives {name!r} the shape {shape}; it is {batch[name].shape}"
            )

    def test_states_its_sizes(self) -> None:
        source = self.open()

        assert _length(source) >= 1, (
            "a source must have at least one sample; refuse the data with a ConfigError instead"
        )
        size = source.vocab_size
        assert isinstance(size, int), f"vocab_size must be an int, got {type(size).__name__}"
        assert size > 0, f"vocab_size must be positive, got {size}"
        fingerprint = source.fingerprint
        assert isinstance(fingerprint, str), f"fingerprint must be a string, got {type(fingerprint).__name__}"
        assert fingerprint, "fingerprint is empty"
        if source.tokenizer is not None:
            assert source.tokenizer.vocab_size <= size, (
                f"the tokenizer has {source.tokenizer.vocab_size} ids and the source says vocab_size = {size}"
            )

    def test_a_stream_goes_on_from_each_of_its_states(self) -> None:
        source = self.streams()
        assert source.n_streams >= 1, f"n_streams must be at least 1, got {source.n_streams}"
        for stream in {0, source.n_streams - 1}:
            read = [*islice(source.open(stream, None), _READ_OF_STREAM)]
            assert read, f"stream {stream} has no sample; refuse the data with a ConfigError instead"
            samples = [{name: values.copy() for name, values in sample.items()} for sample, _ in read]
            for number, (_, state) in enumerate(read, 1):
                try:
                    saved = json.loads(json.dumps(state))
                except (TypeError, ValueError) as error:
                    raise AssertionError(
                        f"the state after sample {number} is not made of JSON values: {error}"
                    ) from error
                assert saved == state, f"the state after sample {number} is {state} and comes back from JSON as {saved}"
                found = [sample for sample, _ in islice(self.streams().open(stream, saved), len(read) - number)]
                for later, (expected, one) in enumerate(zip(samples[number:], found, strict=False), number + 1):
                    assert _same(expected, dict(one)), (
                        f"stream {stream}, opened with the state after sample {number}, gives another sample {later} "
                        "than when it was read from its beginning, so that a resumed run would get others"
                    )
                assert len(found) == len(read) - number, (
                    f"stream {stream}, opened with the state after sample {number}, ends "
                    f"{len(read) - number - len(found)} samples earlier than when it was read from its beginning"
                )

    def test_streams_do_not_depend_on_each_other(self) -> None:
        source = self.streams()
        numbers = [0, source.n_streams - 1, 0]
        alone = [
            [dict(sample) for sample, _ in islice(self.streams().open(one, None), _READ_OF_STREAM)] for one in numbers
        ]

        together = zip(*(islice(source.open(one, None), _READ_OF_STREAM) for one in numbers), strict=False)

        for number, samples in enumerate(together):
            for stream, expected, (sample, _) in zip(numbers, alone, samples, strict=True):
                assert _same(expected[number], dict(sample)), (
                    f"sample {number} of stream {stream} differs when other streams, or itself, are read meanwhile"
                )

    def test_samples_are_well_formed(self) -> None:
        source = self.open()
        indices = _some_indices(source)

        batch = _read(source, indices)

        if isinstance(source, TokenlessSource):
            rows = batch.get(source.counted_in)
            assert rows is not None, f"counted_in is {source.counted_in!r}, which read does not return"
            expected = (len(indices), self.seq_len)
            assert rows.shape[:2] == expected, f"{source.counted_in} must begin with (B, S) = {expected}"
            assert not {"tokens", "targets"} & batch.keys(), "counted_in is for sources without tokens and targets"
            return
        assert {"tokens", "targets"} <= set(batch), f"read must return tokens and targets, got {sorted(batch)}"
        expected = (len(indices), self.seq_len)
        for name in ("tokens", "targets", "document", "positions"):
            if name in batch:
                assert batch[name].dtype == np.int64, f"{name} must be int64, got {batch[name].dtype}"
                assert batch[name].shape == expected, f"{name} must be (B, S) = {expected}, got {batch[name].shape}"
        tokens, targets = batch["tokens"], batch["targets"]
        assert ((tokens >= 0) & (tokens < source.vocab_size)).all(), (
            f"tokens has ids from {tokens.min()} to {tokens.max()}; they must lie between 0 and {source.vocab_size - 1}"
        )
        learned = targets[targets != IGNORED]
        assert ((learned >= 0) & (learned < source.vocab_size)).all(), (
            f"targets has ids from {learned.min()} to {learned.max()}; they must be {IGNORED} or lie between 0 and "
            f"{source.vocab_size - 1}"
        )
        assert len(learned), "no target of the first samples is learned from"

    def test_targets_are_the_next_tokens(self) -> None:
        if isinstance(self.open(), TokenlessSource):
            pytest.skip("the source has no tokens")
        batch = _read(self.open(), _some_indices(self.open()))
        targets, following = batch["targets"][:, :-1], batch["tokens"][:, 1:]

        learned = targets != IGNORED
        assert np.array_equal(targets[learned], following[learned]), (
            "targets[:, s] must be tokens[:, s + 1]; the source shifts them, not the loss"
        )
        if "document" in batch:
            crossing = learned & (batch["document"][:, :-1] != batch["document"][:, 1:])
            assert not crossing.any(), (
                f"a target is the first token of the next document; where a document ends the target is {IGNORED}"
            )

    def test_positions_start_again_with_each_document(self) -> None:
        batch = _read(self.open(), _some_indices(self.open()))
        if not {"document", "positions"} <= set(batch):
            pytest.skip("the source gives no positions of packed documents")
        document, positions = batch["document"], batch["positions"]

        same = document[:, 1:] == document[:, :-1]
        steps, padding = positions[:, 1:] - positions[:, :-1], positions[:, 1:] == -1
        assert (steps[same & ~padding] == 1).all(), "positions must count up by 1 inside a document"
        assert (positions[:, 1:][~same & ~padding] == 0).all(), "positions must start at 0 where a new document does"

    def test_padding_has_no_targets(self) -> None:
        batch = _read(self.open(), _some_indices(self.open()))
        if not {"targets", "positions"} <= set(batch):
            pytest.skip("the source gives no positions")
        targets, positions = batch["targets"], batch["positions"]

        assert (positions >= -1).all(), "positions must be -1 at padding, and else count from 0"
        assert (targets[positions == -1] == IGNORED).all(), f"targets must be {IGNORED} at padding (positions of -1)"

    def test_entries_are_as_they_are_described(self) -> None:
        source = self.open()
        batch = _read(source, _some_indices(source))
        described = {**KNOWN, **(source.entries() if isinstance(source, DescribedSource) else {})}

        assert described.keys() >= batch.keys(), (
            f"entries() must describe {sorted(batch.keys() - described.keys())}: their dims and who wants them"
        )
        for name, values in batch.items():
            entry = described[name]
            assert entry.dims[0] == "sample", f"{name}: the first of its dims must be 'sample', got {entry.dims}"
            assert len(entry.dims) == values.ndim, f"{name} has {values.ndim} dimensions, described with {entry.dims}"
            assert values.dtype == entry.dtype, f"{name} is {values.dtype}, and is described as {entry.dtype}"
            for dim, size in zip(entry.dims, values.shape, strict=True):
                assert dim != "position" or size == self.seq_len, (
                    f"{name} has {size} positions, and a sample has {self.seq_len}"
                )
            assert len(entry.sizes) in (0, len(entry.dims)), f"{name} has the sizes {entry.sizes} for {entry.dims}"
            for dim, size, stated in zip(entry.dims, values.shape, entry.sizes or values.shape, strict=True):
                assert stated in (None, size), f"{name} has {size} along {dim!r}, and is described with {stated}"

    def test_sources_within_are_counted_as_they_come(self) -> None:
        source = self.open()
        if not isinstance(source, MixedSource):
            pytest.skip("the source is not made of several")
        later = 300 if isinstance(source, StreamsByPosition) else _FAR  # everything before is read
        for first, stop in ((0, 97), (later, later + 97)):
            found = np.bincount(_read(source, np.arange(first, stop))["source"], minlength=len(source.names))
            counted = np.array(source.counts(stop)) - np.array(source.counts(first))
            assert np.array_equal(found, counted), (
                f"of positions {first} to {stop - 1}, counts() has {counted.tolist()} samples of the sources, and "
                f"read_at gives {found.tolist()}"
            )

    def test_reading_has_no_side_effects(self) -> None:
        source = self.open()
        indices = _some_indices(source)
        given = indices.copy()

        first = _read(source, indices)
        kept = {name: values.copy() for name, values in first.items()}
        for values in first.values():
            values[...] = 0  # the caller owns what it was given
        second = _read(source, indices)

        assert np.array_equal(indices, given), "read changes the indices it is given"
        assert _same(kept, second), "reading the same samples twice gives different ones"

    def test_samples_do_not_depend_on_their_neighbours(self) -> None:
        source = self.open()
        indices = _some_indices(source)
        repeated = np.concatenate([indices[::-1], indices[:1]])

        batch = _read(source, repeated)

        for row, index in enumerate(repeated):
            alone = _read(source, np.array([index]))
            together = {name: values[row : row + 1] for name, values in batch.items()}
            assert _same(together, alone), f"sample {index} differs when it is read together with others"

    def test_reading_is_safe_from_threads(self) -> None:
        source = self.open()
        indices = np.arange(min(_length(source), 64), dtype=np.int64)
        expected = [_read(source, indices[place : place + 1]) for place in range(len(indices))]

        with ThreadPoolExecutor(8) as pool:
            places = [place for _ in range(4) for place in range(len(indices))]
            found = list(pool.map(lambda place: _read(source, indices[place : place + 1]), places))

        for place, batch in zip(places, found, strict=True):
            assert _same(batch, expected[place]), f"sample {place} differs when several threads read"

    def test_opening_again_gives_the_same_samples(self) -> None:
        first, second = self.open(), self.open()
        indices = _some_indices(first)

        assert first.fingerprint == second.fingerprint, "two sources of one configuration differ in fingerprint"
        assert _length(first) == _length(second), (
            f"two sources of one configuration have {_length(first)} and {_length(second)} samples"
        )
        assert _same(_read(first, indices), _read(second, indices)), (
            "two sources of one configuration differ in samples"
        )

    def test_samples_do_not_depend_on_what_was_read_before(self) -> None:
        read_before, fresh = self.open(), self.open()
        indices = _some_indices(fresh)
        for index in np.arange(min(_length(fresh), 64), dtype=np.int64):
            _read(read_before, np.array([index]))

        assert _same(_read(read_before, indices), _read(fresh, indices)), (
            "samples depend on what was read before them, so that a resumed run would get others"
        )

    def test_fingerprint_tells_lengths_apart(self) -> None:
        assert self.open().fingerprint != self.open(seq_len=self.seq_len // 2).fingerprint, (
            "the fingerprint is the same for another seq_len, which decides the samples too"
        )

    def test_validation_is_held_out(self) -> None:
        if not self.holds_out:
            with pytest.raises(ConfigError):
                self.open("validation")
            return
        train, validation = self.open("train"), self.open("validation")
        assert not isinstance(validation, PositionedSource), (
            "what is evaluated must have an end: for the split 'validation', return a source with __len__ and read"
        )

        learned, held_out = _rows(train), _rows(validation)

        assert not learned & held_out, (
            f"{len(learned & held_out)} of {len(held_out)} validation samples are in the training samples too"
        )

    def test_everything_can_be_opened_at_once(self) -> None:
        train = self.open("train")
        if isinstance(train, PositionedSource):
            with suppress(ConfigError):  # it may be one that cannot be evaluated
                assert not isinstance(self.open("all"), PositionedSource), (
                    "what is evaluated must have an end: for the split 'all', return a source with __len__ and read"
                )
            return
        n_train, n_all = len(train), _length(self.open("all"))
        assert n_all >= n_train, f"split 'all' has {n_all} samples and 'train' has {n_train}"


_FAR = 10**9
"""A position that a run may come to, after which a source without end goes on."""


_READ_OF_STREAM = 12
"""Samples."""


def _length(source: Source) -> int:
    if isinstance(source, StreamsByPosition):  # everything before is read
        return _READ_OF_STREAM * source.n_streams
    return _FAR if isinstance(source, PositionedSource) else len(source)


def _read(source: Source, places: np.ndarray) -> dict[str, np.ndarray]:
    return source.read_at(places) if isinstance(source, PositionedSource) else source.read(places)


def _some_indices(source: Source) -> np.ndarray:
    """First, last and a few in between."""
    return np.unique(np.linspace(0, _length(source) - 1, 7).astype(np.int64))


def _rows(source: Source) -> set[bytes]:
    indices = np.arange(min(_length(source), 512), dtype=np.int64)
    entry = source.counted_in if isinstance(source, TokenlessSource) else "tokens"
    return {row.tobytes() for row in _read(source, indices)[entry]}


def _same(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> bool:
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)
