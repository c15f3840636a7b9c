"""Samples of one length, cut from arrays of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import attrs
import numpy as np

from forge_core.contracts.data_source import Split
from forge_core.errors import ConfigError
from forge_plugins_data.packing import document_inputs
from forge_plugins_data.token_samples import TokenFacts, TokenSamples


@attrs.frozen
class Span:
    """Consecutive windows of one array: those from ``first`` up to, not including, ``stop``."""

    tokens: np.ndarray
    """``(N,)``, any integer type; possibly memory-mapped."""
    first: int
    stop: int
    where: str = "the data"
    """For messages: the file."""


class TokenWindows(TokenSamples):
    """Windows of equal length.

    Window ``w`` of an array is the tokens from ``w · S`` to ``w · S + S``, both included: the last is a target only,
    and the first token of the next window. So each token but an array's first is the target once, and only a rest of
    fewer than ``S`` tokens at an array's end is never used.
    """

    def __init__(self, spans: Sequence[Span], facts: TokenFacts) -> None:
        """Args: ``spans`` are in order, with at least one window altogether."""
        super().__init__(facts)
        self._spans = [span for span in spans if span.stop > span.first]
        self._starts = np.array([0, *accumulate(span.stop - span.first for span in self._spans)], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        shape = (len(indices), self.seq_len)
        tokens, targets = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int64)
        self.read_into(indices, tokens, targets, range(len(indices)))
        self.refuse_strangers(indices, tokens, targets)
        batch = {"tokens": tokens, "targets": targets}
        if self._separator is not None:
            batch |= document_inputs(tokens, targets, self._separator)
        return batch

    def read_into(self, indices: np.ndarray, tokens: np.ndarray, targets: np.ndarray, rows: Sequence[int]) -> None:
        """Same as ``read``, into rows of arrays ``(B, S)`` int64, and without a look at the ids."""
        which = np.searchsorted(self._starts, indices, side="right") - 1
        windows = indices - self._starts[which]
        self._touch({self._spans[index].where for index in set(which.tolist())})
        for row, index, window in zip(rows, which.tolist(), windows.tolist(), strict=True):
            span = self._spans[index]
            start = (span.first + window) * self.seq_len
            stop = start + self.seq_len
            tokens[row] = span.tokens[start:stop]
            targets[row] = span.tokens[start + 1 : stop + 1]

    @property
    def is_plain(self) -> bool:
        """Return whether a sample is its tokens and targets alone."""
        return self._separator is None

    def _place(self, index: int, column: int) -> tuple[str, int]:
        which = int(np.searchsorted(self._starts, index, side="right")) - 1
        span = self._spans[which]
        return span.where, (span.first + index - int(self._starts[which])) * self.seq_len + column


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
