"""Samples of one length, cut from arrays of tokens."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from typing import Any

import attrs
import numpy as np

from forge_core.contracts.data_source import Split
from forge_core.contracts.loss import IGNORED
from forge_core.contracts.tokenizer import Tokenizer
from forge_core.errors import ConfigError
from forge_plugins_data.packing import document_inputs
from forge_plugins_data.verification import Verification


@attrs.frozen
class Span:
    """Consecutive windows of one array: those from ``first`` up to, not including, ``stop``."""

    tokens: np.ndarray
    """``(N,)``, any integer type; possibly memory-mapped."""
    first: int
    stop: int
    where: str = "the data"
    """For messages: the file."""


class TokenSamples(ABC):
    """Samples of arrays of tokens, whatever their cut: what all have in common."""

    def __init__(
        self,
        *,
        seq_len: int,
        vocab_size: int,
        tokenizer: Tokenizer | None,
        separator: int | None,
        identity: Sequence[Any],
        verification: Verification | None,
    ) -> None:
        """Args:
        separator: the id that ends a document, if documents are to be kept apart.
        identity: JSON values that decide the samples; ``seq_len`` and ``separator`` are added.
        verification: told which files are read.
        """
        self._verification = verification
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        content = json.dumps([*identity, seq_len, separator], sort_keys=True)
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()
        self._seq_len = seq_len
        self._separator = separator

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Same as ``DataSource`` has it."""

    @abstractmethod
    def _place(self, index: int, column: int) -> tuple[str, int]:
        """The file, and the position in it, of the token at ``column`` of a sample, 0 to ``S``, both included."""

    def refuse_damaged(self) -> None:
        """Same as ``CheckedSource`` has it."""
        if self._verification is not None:
            self._verification.refuse_damaged()

    def watch(self, report: Callable[[str], None]) -> None:
        """Same as ``CheckedSource`` has it."""
        if self._verification is not None:
            self._verification.watch(report)

    def _touch(self, files: Collection[str]) -> None:
        if self._verification is not None:
            self._verification.touch(files)

    def _refuse_strangers(self, indices: np.ndarray, tokens: np.ndarray, targets: np.ndarray) -> None:
        """Files may change after they were opened, and an id beyond the vocabulary is an error of the device, far from
        here. As unsigned numbers, negative ids are beyond it too."""
        last = np.where(targets[:, -1:] == IGNORED, 0, targets[:, -1:])
        largest = max(tokens.view(np.uint64).max(initial=0), last.view(np.uint64).max(initial=0))
        if largest < self.vocab_size:
            return
        windows = np.concatenate([tokens, last], axis=1)
        row, column = np.argwhere(windows.view(np.uint64) >= self.vocab_size)[0].tolist()
        where, position = self._place(int(indices[row]), column)
        raise ConfigError(
            f"{where}: token {position} (from 0) has the id {windows[row, column]}, but the vocabulary has "
            f"{self.vocab_size} (ids 0 to {self.vocab_size - 1}). What was opened had no such id, so the file has been "
            "overwritten or its disk fails. Compare it with 'forge data inspect --verify'; copy it again or prepare "
            "the data again."
        )


class TokenWindows(TokenSamples):
    """Windows of equal length.

    Window ``w`` of an array is the tokens from ``w · S`` to ``w · S + S``, both included: the last is a target only,
    and the first token of the next window. So each token but an array's first is the target once, and only a rest of
    fewer than ``S`` tokens at an array's end is never used.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        *,
        seq_len: int,
        vocab_size: int,
        tokenizer: Tokenizer | None,
        separator: int | None,
        identity: Sequence[Any],
        verification: Verification | None = None,
    ) -> None:
        """Args: ``spans`` are in order, with at least one window altogether; the others as in ``TokenSamples``."""
        super().__init__(
            seq_len=seq_len,
            vocab_size=vocab_size,
            tokenizer=tokenizer,
            separator=separator,
            identity=identity,
            verification=verification,
        )
        self._spans = [span for span in spans if span.stop > span.first]
        self._starts = np.array([0, *accumulate(span.stop - span.first for span in self._spans)], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        shape = (len(indices), self._seq_len)
        tokens, targets = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int64)
        which = np.searchsorted(self._starts, indices, side="right") - 1
        windows = indices - self._starts[which]
        self._touch({self._spans[index].where for index in set(which.tolist())})
        for row, (index, window) in enumerate(zip(which.tolist(), windows.tolist(), strict=True)):
            span = self._spans[index]
            start = (span.first + window) * self._seq_len
            stop = start + self._seq_len
            tokens[row] = span.tokens[start:stop]
            targets[row] = span.tokens[start + 1 : stop + 1]
        self._refuse_strangers(indices, tokens, targets)
        batch = {"tokens": tokens, "targets": targets}
        if self._separator is not None:
            batch |= document_inputs(tokens, targets, self._separator)
        return batch

    def _place(self, index: int, column: int) -> tuple[str, int]:
        which = int(np.searchsorted(self._starts, index, side="right")) - 1
        span = self._spans[which]
        return span.where, (span.first + index - int(self._starts[which])) * self._seq_len + column


def count_windows(tokens: int, seq_len: int) -> int:
    """How many windows of ``seq_len`` tokens, each with the token after it, an array of ``tokens`` tokens has."""
    return max(0, (tokens - 1) // seq_len)


def require_held_out(validation: float, split: Split) -> None:
    """Raises:
    ConfigError: the validation split is asked for and nothing is held out.
    """
    if split == "validation" and validation == 0:
        raise ConfigError(
            "validation = 0 holds nothing out of the training data; set it in [data] (validation = 0.01 holds out a "
            "hundredth), or give what evaluates data of its own, as [eval.data]"
        )


def too_small(what: str, seq_len: int, tokens: int) -> ConfigError:
    """The error of data that have not a single window."""
    return ConfigError(
        f"{what} is too small: one sample needs at least seq_len + 1 = {seq_len + 1} consecutive tokens, and there are "
        f"{tokens}. Use more data or a smaller train.seq_len."
    )
