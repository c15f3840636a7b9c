"""Conformance of data sources (contract: ``forge_core.contracts.data_source``)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import numpy as np
import pytest

from forge_core.contracts.data_source import DataSource, DataSourceConfig, Split
from forge_core.contracts.loss import IGNORED
from forge_core.errors import ConfigError
from forge_testing.component_case import ComponentCase


class DataSourceConformance(ComponentCase):
    """Subclass it, name the component, and pytest runs every check below on it.

    A source that reads files gets them from an autouse fixture of the subclass, which may set ``self.config``. Give it
    data that do not repeat themselves: what is held out is told from the rest by its tokens.
    """

    kind = "data_source"
    seq_len: ClassVar[int] = 8
    holds_out: ClassVar[bool] = True
    """Whether this configuration keeps samples back for validation."""

    def open(self, split: Split = "train", seq_len: int | None = None) -> DataSource:
        source: DataSource = self.make(seq_len=seq_len or self.seq_len, split=split)
        return source

    def test_config_has_the_common_keys(self) -> None:
        if not self.component:
            pytest.skip("built by make(), without a configuration")
        config = self.use().config

        assert isinstance(config, DataSourceConfig), f"{type(config).__name__} must extend DataSourceConfig"

    def test_states_its_sizes(self) -> None:
        source = self.open()

        assert len(source) >= 1, "a source must have at least one sample; refuse the data with a ConfigError instead"
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

    def test_samples_are_well_formed(self) -> None:
        source = self.open()
        indices = _some_indices(source)

        batch = source.read(indices)

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
        batch = self.open().read(_some_indices(self.open()))
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
        batch = self.open().read(_some_indices(self.open()))
        if not {"document", "positions"} <= set(batch):
            pytest.skip("the source gives no positions of packed documents")
        document, positions = batch["document"], batch["positions"]

        same = document[:, 1:] == document[:, :-1]
        steps = positions[:, 1:] - positions[:, :-1]
        assert (steps[same] == 1).all(), "positions must count up by 1 inside a document"
        assert (positions[:, 1:][~same] == 0).all(), "positions must start at 0 where a new document does"

    def test_reading_has_no_side_effects(self) -> None:
        source = self.open()
        indices = _some_indices(source)
        given = indices.copy()

        first = source.read(indices)
        kept = {name: values.copy() for name, values in first.items()}
        for values in first.values():
            values[...] = 0  # the caller owns what it was given
        second = source.read(indices)

        assert np.array_equal(indices, given), "read changes the indices it is given"
        assert _same(kept, second), "reading the same samples twice gives different ones"

    def test_samples_do_not_depend_on_their_neighbours(self) -> None:
        source = self.open()
        indices = _some_indices(source)
        repeated = np.concatenate([indices[::-1], indices[:1]])

        batch = source.read(repeated)

        for row, index in enumerate(repeated):
            alone = source.read(np.array([index]))
            together = {name: values[row : row + 1] for name, values in batch.items()}
            assert _same(together, alone), f"sample {index} differs when it is read together with others"

    def test_reading_is_safe_from_threads(self) -> None:
        source = self.open()
        indices = np.arange(min(len(source), 64), dtype=np.int64)
        expected = [source.read(indices[place : place + 1]) for place in range(len(indices))]

        with ThreadPoolExecutor(8) as pool:
            places = [place for _ in range(4) for place in range(len(indices))]
            found = list(pool.map(lambda place: source.read(indices[place : place + 1]), places))

        for place, batch in zip(places, found, strict=True):
            assert _same(batch, expected[place]), f"sample {place} differs when several threads read"

    def test_opening_again_gives_the_same_samples(self) -> None:
        first, second = self.open(), self.open()
        indices = _some_indices(first)

        assert first.fingerprint == second.fingerprint, "two sources of one configuration differ in fingerprint"
        assert len(first) == len(second), (
            f"two sources of one configuration have {len(first)} and {len(second)} samples"
        )
        assert _same(first.read(indices), second.read(indices)), "two sources of one configuration differ in samples"

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

        learned, held_out = _rows(train), _rows(validation)

        assert not learned & held_out, (
            f"{len(learned & held_out)} of {len(held_out)} validation samples are in the training samples too"
        )

    def test_everything_can_be_opened_at_once(self) -> None:
        train, everything = self.open("train"), self.open("all")

        assert len(everything) >= len(train), f"split 'all' has {len(everything)} samples and 'train' has {len(train)}"


def _some_indices(source: Any) -> np.ndarray:
    """First, last and a few in between."""
    return np.unique(np.linspace(0, len(source) - 1, 7).astype(np.int64))


def _rows(source: DataSource) -> set[bytes]:
    indices = np.arange(min(len(source), 512), dtype=np.int64)
    return {row.tobytes() for row in source.read(indices)["tokens"]}


def _same(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> bool:
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)
