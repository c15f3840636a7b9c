"""Tokenizers of the Hugging Face ``tokenizers`` library."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from forge_core.errors import ConfigError
from forge_plugins_data.chat_template import ChatTemplate
from forge_plugins_data.file_selection import expanded
from forge_plugins_data.tokenizer_companions import read_companions
from forge_plugins_data.tokenizer_config import TokenizerFileConfig

FILE_NAME = "tokenizer.json"
KNOWN_ENDS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<|endofdocument|>",
    "[EOS]",
    "<|end▁of▁sentence|>",
)
"""Names under which published vocabularies have their end of a document."""


class TokenizerFile:
    """A ``tokenizer.json``. Special tokens that are spelled out in a text are recognised, as the library does."""

    def __init__(self, config: TokenizerFileConfig, /, *, base: Path, **_: object) -> None:
        path = base / expanded(config.path)
        self._content = _content(path)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(self._content)
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{path} is not a file of the tokenizers library: {error}") from error
        # as transformers does: a file may have been saved while texts were cut or filled up to one length
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.post_processor = None  # it may take the spaces of a token out of its place in the text
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        self._end = _end_of_document(vocabulary, config.end_of_document, path)
        self.end_of_document: int = vocabulary[self._end]
        self._begin = config.begin_of_document
        self.begin_of_document: int | None = None
        digest = hashlib.sha256(self._content)
        digest.update(f"\0end_of_document={self.end_of_document}".encode())
        if self._begin is not None:
            self.begin_of_document = vocabulary[_known("begin_of_document", self._begin, vocabulary, path)]
            digest.update(f"\0begin_of_document={self.begin_of_document}".encode())
        self.fingerprint: str = digest.hexdigest()
        template = None if config.chat_template is None else base / expanded(config.chat_template)
        self._companions = read_companions(path, template)

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The template of conversations, if the model has one."""
        begin = {} if self._begin is None else {"bos_token": self._begin}
        return self._companions.chat_template({"eos_token": self._end, **begin})

    @property
    def ends_of_turn(self) -> tuple[int, ...]:
        """Ids after which an answer is complete."""
        named = [self._tokenizer.token_to_id(name) for name in self._companions.eos_tokens()]
        found = [*self._companions.eos_ids(), *(one for one in named if one is not None), self.end_of_document]
        return tuple(dict.fromkeys(found))

    def encode(self, text: str) -> np.ndarray:
        # The fast variant computes no offsets into the text: the same ids in two thirds of the time.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.int64)

    def encode_with_ends(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """The ids, and where each ends in ``text``, in characters, both ``(N,)`` int64."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ends = np.array([end for _, end in encoding.offsets], dtype=np.int64)
        return np.array(encoding.ids, dtype=np.int64), np.maximum.accumulate(ends)

    def decode(self, ids: Sequence[int]) -> str:
        kept = [i for i in map(int, ids) if i != self.end_of_document]
        return str(self._tokenizer.decode(kept, skip_special_tokens=False))

    def save(self, directory: Path) -> Mapping[str, Any]:
        (directory / FILE_NAME).write_bytes(self._content)
        self._companions.save(directory)
        table = {"name": "forge-plugins-data:tokenizer_file", "path": FILE_NAME, "end_of_document": self._end}
        return table if self._begin is None else {**table, "begin_of_document": self._begin}


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the tokenizer {path}: {error.strerror}") from error


def _end_of_document(vocabulary: Mapping[str, int], asked: str | None, path: Path) -> str:
    if asked is not None:
        return _known("end_of_document", asked, vocabulary, path)
    found = [name for name in KNOWN_ENDS if name in vocabulary]
    if len(found) != 1:
        which = f"several tokens that may end a document ({', '.join(found)})" if found else "no known end of document"
        raise ConfigError(f'{path} has {which}; say which token it is with the tokenizer\'s key end_of_document = "…"')
    return found[0]


def _known(key: str, token: str, vocabulary: Mapping[str, int], path: Path) -> str:
    if token not in vocabulary:
        near = get_close_matches(token, [*vocabulary], n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{key} = {token!r} is not in the vocabulary of {path}.{hint}")
    return token
