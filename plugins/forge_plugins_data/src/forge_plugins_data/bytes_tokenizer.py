"""Bytes as tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forge_plugins_data.config import BytesConfig


class BytesTokenizer:
    """The bytes of UTF-8, 0 to 255, and 256 for the end of a document. Any file can be read, nothing is unknown."""

    vocab_size = 257
    end_of_document = 256
    fingerprint = "bytes-utf8-eod256"

    def __init__(self, config: BytesConfig, /, **_: object) -> None:
        del config  # it has nothing to choose

    def encode(self, text: str) -> np.ndarray:
        return self.encode_bytes(text.encode())

    def encode_bytes(self, content: bytes) -> np.ndarray:
        """Ids of text that need not be valid UTF-8 ``(N,)`` int64, so that a file can be read without decoding it."""
        return np.frombuffer(content, dtype=np.uint8).astype(np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in map(int, ids) if i < 256).decode("utf-8", errors="replace")

    def save(self, directory: Path) -> Mapping[str, Any]:
        del directory  # the name says everything
        return {"name": "forge-plugins-data:bytes"}
