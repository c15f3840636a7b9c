"""Tokenizers: text to token ids and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np


class Tokenizer(Protocol):
    """Reversible: ``decode(encode(text))`` is ``text`` wherever ``text`` can be expressed at all."""

    vocab_size: int
    """All ids are below this."""
    end_of_document: int
    """The id that ends a document; sources append it, generation stops at it."""
    fingerprint: str
    """A hash of everything that decides the ids; equal for equal tokenizers on any machine."""

    def encode(self, text: str) -> np.ndarray:
        """Ids of ``text`` ``(N,)`` int64, nothing added at either end."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``; malformed UTF-8 becomes U+FFFD, ``end_of_document`` becomes nothing."""

    def save(self, directory: Path) -> Mapping[str, Any]:
        """Write what is needed to build this tokenizer again into ``directory`` (which exists), and return the TOML
        table that does so, with ``name`` and with paths relative to ``directory``."""


class TokenizerFactory(Protocol):
    """The signature of the factory that a description names."""

    def __call__(self, config: Any, /, *, base: Path) -> Tokenizer:
        """Build the tokenizer; relative paths in its config are relative to ``base``.

        Raises:
            ConfigError: a file is missing or not a tokenizer.
        """
