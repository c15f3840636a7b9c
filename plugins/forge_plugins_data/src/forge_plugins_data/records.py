"""The data sources ``jsonl`` and ``parquet``: a document a line, or a row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from forge_core.contracts.builder import Builder
from forge_core.contracts.data_source import Split
from forge_plugins_data.config import RecordsConfig
from forge_plugins_data.documents import PARQUET, Document, read_documents, units_of
from forge_plugins_data.file_selection import SelectedFile, refuse_idle_pattern, select_files
from forge_plugins_data.in_memory import InMemory, unit_hash
from forge_plugins_data.plain_text import JSON_LINES
from forge_plugins_data.token_samples import TokenSamples
from forge_plugins_data.unpacking import COMPRESSED
from forge_plugins_data.windows import require_held_out

JSONL_PATTERN = tuple(f"**/*{ending}{packed}" for ending in JSON_LINES for packed in ("", *COMPRESSED))
"""What is taken from a folder of JSON Lines unless something else is asked for."""
_PATTERNS = {
    "jsonl": JSONL_PATTERN,
    "parquet": tuple(f"**/*{ending}" for ending in PARQUET),
}


def open_jsonl(config: RecordsConfig, /, *, seq_len: int, split: Split, build: Builder, **_: object) -> TokenSamples:
    """Read and tokenise the lines of a split, in the order of the files' relative names.

    Raises:
        ConfigError: no such files; a line that is not JSON, not UTF-8, without the key ``text_field`` or with something
            else than text there, by file and line; too little text for one sample.
    """
    return _open("jsonl", config, seq_len, split, build)


def open_parquet(config: RecordsConfig, /, *, seq_len: int, split: Split, build: Builder, **_: object) -> TokenSamples:
    """Read and tokenise the rows of a split, in the order of the files' relative names.

    Raises:
        ConfigError: no such files; a damaged file, or one without a column ``text_field`` of text; too little text for
            one sample.
    """
    return _open("parquet", config, seq_len, split, build)


def _open(
    kind: Literal["jsonl", "parquet"], config: RecordsConfig, seq_len: int, split: Split, build: Builder
) -> TokenSamples:
    require_held_out(config.validation, split)
    refuse_idle_pattern(config.path, config.pattern)
    files = select_files(config.path, config.pattern or _PATTERNS[kind], config.exclude)
    in_memory = InMemory(
        source=kind,
        tokenizer=build(config.tokenizer, base=Path()),
        encoding_errors=config.encoding_errors,
        document_mask=config.document_mask,
        packing=config.packing,
        seq_len=seq_len,
        split=split,
    )
    chosen = (document for file in files for document in _documents(kind, file, config, split))
    return in_memory.samples(chosen, f"{len(files)} file{'s' * (len(files) != 1)}")


def _documents(
    kind: Literal["jsonl", "parquet"], file: SelectedFile, config: RecordsConfig, split: Split
) -> Iterator[Document]:
    """The documents of a split. Which one a document is in depends on its file's name and its number alone."""
    number = 0
    for unit in units_of(file.path, kind, config.text_field):
        for document in read_documents(unit, config.text_field, config.encoding_errors):
            number += 1
            is_held_out = unit_hash(f"{file.relative}:{number}") < config.validation
            if split == "all" or is_held_out == (split == "validation"):
                yield document
