"""Samples of one length, of arrays of tokens."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any

import attrs
import numpy as np

from forge_core.contracts.loss import IGNORED
from forge_core.contracts.tokenizer import Tokenizer
from forge_core.errors import ConfigError
from forge_plugins_data.verification import Verification


@attrs.frozen(kw_only=True)
class TokenFacts:
    """Facts about samples that do not depend on how they are cut."""

    seq_len: int
    """``S``, tokens a sample."""
    vocab_size: int
    tokenizer: Tokenizer | None
    separator: int | None
    """The id that ends a document, if documents are to be kept apart."""
    identity: Sequence[Any]
    """JSON values that decide the samples, beside ``seq_len`` and ``separator``."""
    verification: Verification | None = None
    """Told which files are read."""
    documents: int | None = None
    """How many there are, if that is known."""


class TokenSamples(ABC):
    """The data source that every source of this package is once its tokens are found; classes of it cut samples."""

    def __init__(self, facts: TokenFacts) -> None:
        self.vocab_size = facts.vocab_size
        self.tokenizer = facts.tokenizer
        self.seq_len = facts.seq_len
        self.documents = facts.documents
        self._separator = facts.separator
        self._verification = facts.verification
        content = json.dumps([*facts.identity, facts.seq_len, facts.separator], sort_keys=True)
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()

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

    def refuse_strangers(self, indices: np.ndarray, tokens: np.ndarray, targets: np.ndarray) -> None:
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
