"""The data source ``text_files``: text in, samples out, nothing on disk."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from forge_core.contracts.builder import Builder
from forge_core.contracts.data_source import Split
from forge_core.contracts.tokenizer import Tokenizer
from forge_core.errors import ConfigError
from forge_plugins_data.config import TextFilesConfig
from forge_plugins_data.encoding import encode_document, reads_bytes
from forge_plugins_data.file_selection import SelectedFile, is_folder, select_files
from forge_plugins_data.plain_text import refuse_json_lines, refuse_what_is_no_text
from forge_plugins_data.token_format import smallest_dtype
from forge_plugins_data.unpacking import open_unpacked
from forge_plugins_data.windows import Span, TokenWindows, count_windows, require_held_out, too_small

DEFAULT_PATTERN = "**/*.txt"


def open_text_files(
    config: TextFilesConfig, /, *, seq_len: int, split: Split, build: Builder, **_: object
) -> TokenWindows:
    """Read and tokenise the files of a split, one document each, in the order of their relative names.

    Raises:
        ConfigError: no such files, a pattern that chooses among none, no text or not UTF-8, too few files to hold any
            out, or too little text for one sample.
    """
    require_held_out(config.validation, split)
    tokenizer = build(config.tokenizer, base=Path())
    if reads_bytes(tokenizer) and config.encoding_errors != "strict":
        raise ConfigError(
            f"encoding_errors = {config.encoding_errors!r} has no effect: this tokenizer reads bytes and decodes "
            "nothing; remove it"
        )
    _refuse_idle_pattern(config)
    selected = select_files(config.path, config.pattern or DEFAULT_PATTERN, config.exclude)
    files = split_files(selected, config.validation, split)
    tokens = _tokenise(files, tokenizer, config)
    windows = count_windows(len(tokens), seq_len)
    if windows == 0:
        part = "the text" if split == "all" else f"the {split} part of the text"
        raise too_small(f"{part} ({len(files)} file{'s' * (len(files) != 1)})", seq_len, len(tokens))
    return TokenWindows(
        [Span(tokens, 0, windows)],
        seq_len=seq_len,
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer,
        separator=tokenizer.end_of_document if config.document_mask else None,
        identity=["text_files", tokenizer.fingerprint, hashlib.sha256(tokens.data).hexdigest()],
    )


def _refuse_idle_pattern(config: TextFilesConfig) -> None:
    paths = (config.path,) if isinstance(config.path, str) else config.path
    if config.pattern is not None and not any(map(is_folder, paths)) and select_files(paths, ()):
        raise ConfigError(
            f"pattern = {config.pattern!r} has no effect: it chooses among the files of a folder, and path = "
            f"{config.path!r} names none; remove it"
        )


def split_files(files: list[SelectedFile], validation: float, split: Split) -> list[SelectedFile]:
    """The files of a split. Which one a file is in depends on its relative name alone, as long as neither is empty.

    Raises:
        ConfigError: there is just one file, so that none can be held out.
    """
    if split == "all" or validation == 0:
        return files
    if len(files) == 1:
        raise ConfigError(
            f"validation = {validation} holds out whole files, and there is only one: {files[0].path}. Split it in "
            "two, name data of their own under [eval.data], or set validation = 0."
        )
    by_hash = sorted(files, key=lambda file: _unit_hash(file.relative))
    below = sum(_unit_hash(file.relative) < validation for file in files)
    held_out = set(by_hash[: min(max(below, 1), len(files) - 1)])
    return [file for file in files if (file in held_out) == (split == "validation")]


def _unit_hash(name: str) -> float:
    """Uniform in [0, 1)."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48


def _tokenise(files: list[SelectedFile], tokenizer: Tokenizer, config: TextFilesConfig) -> np.ndarray:
    dtype = smallest_dtype(tokenizer.vocab_size)
    end = np.array([tokenizer.end_of_document], dtype=dtype)
    parts: list[np.ndarray] = []
    for file in files:
        content = _read(file.path, binary=config.binary)
        ids = encode_document(tokenizer, content, config.encoding_errors, str(file.path))
        if ids is not None and len(ids):
            parts += [ids.astype(dtype), end]
    return np.concatenate(parts) if parts else np.empty(0, dtype=dtype)


def _read(file: Path, *, binary: bool) -> bytes:
    if binary:
        try:
            return file.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    refuse_json_lines(file)
    with open_unpacked(file) as unpacked:
        content = unpacked.read()
    refuse_what_is_no_text(content, str(file))
    return content
