"""Bytes as tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forge_plugins_data.chat_template import ChatTemplate
from forge_plugins_data.file_selection import expanded
from forge_plugins_data.tokenizer_companions import TEMPLATE, read_companions
from forge_plugins_data.tokenizer_config import BytesConfig


class BytesTokenizer:
    """The bytes of UTF-8, 0 to 255, and 256 for the end of a document. Any file can be read, nothing is unknown."""

    vocab_size = 257
    end_of_document = 256
    fingerprint = "bytes-utf8-eod256"

    ends_of_turn = (256,)

    def __init__(self, config: BytesConfig, /, *, base: Path = Path(), **_: object) -> None:
        named = config.chat_template
        self._companions = read_companions(None, None if named is None else base / expanded(named))

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The template of conversations, if there is one."""
        return self._companions.chat_template({})

    def encode(self, text: str) -> np.ndarray:
        return self.encode_bytes(text.encode())

    def encode_bytes(self, content: bytes) -> np.ndarray:
        """Ids of text that need not be valid UTF-8 ``(N,)`` int64, so that a file can be read without decoding it."""
        return np.frombuffer(content, dtype=np.uint8).astype(np.int64)

    def encode_with_ends(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """The ids, and where the character of each ends in ``text``, both ``(N,)`` int64."""
        ids = self.encode(text)
        starts = (ids & 0b1100_0000) != 0b1000_0000  # all but the bytes that continue a character
        return ids, np.cumsum(starts)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in map(int, ids) if i < 256).decode("utf-8", errors="replace")

    def save(self, directory: Path) -> Mapping[str, Any]:
        self._companions.save(directory)
        return {"name": "forge-plugins-data:bytes", **({"chat_template": TEMPLATE} if self._companions.files else {})}
