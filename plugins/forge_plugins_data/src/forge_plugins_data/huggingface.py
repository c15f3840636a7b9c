"""The data source ``huggingface``: a data set of the ``datasets`` library, tokenised once a node into token files."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from forge_core.contracts.builder import Builder
from forge_core.contracts.data_source import Split
from forge_core.contracts.tokenizer import Tokenizer
from forge_core.errors import ConfigError
from forge_plugins_data.config import TokenFilesConfig
from forge_plugins_data.documents import Document
from forge_plugins_data.file_selection import expanded
from forge_plugins_data.hub_config import HuggingFaceConfig
from forge_plugins_data.hub_dataset import load_split
from forge_plugins_data.prepare import UNIT_SIZE
from forge_plugins_data.progress import Progress
from forge_plugins_data.token_files import open_token_files
from forge_plugins_data.token_format import INDEX, SETTINGS, VERSION, map_shard, read_header, write_atomically
from forge_plugins_data.token_samples import TokenSamples
from forge_plugins_data.tokenising import Work, alone_in, cores, tokenise, writing_in
from forge_plugins_data.windows import require_held_out

if TYPE_CHECKING:
    from datasets import Dataset  # type: ignore[import-untyped]  # it has no types

_ROWS_TOGETHER = 1000
_LOOK_AGAIN_AFTER = 0.5
_SAY_AGAIN_AFTER = 60.0
"""Seconds, while another process tokenises."""


def open_huggingface(
    config: HuggingFaceConfig, /, *, seq_len: int, split: Split, build: Builder, **_: object
) -> TokenSamples:
    """Tokenise what is not tokenised yet, or wait for the process that does, and open the files.

    Raises:
        ConfigError: the data set cannot be loaded, has no such column or no text; the disk is full; too few tokens for
            one sample.
        ForgeError: a process that tokenised was killed.
    """
    require_held_out(config.validation, split)
    tokenizer: Tokenizer = build(config.tokenizer, base=Path())
    dataset: Any = load_split(config)
    settings = _settings(dataset, config, tokenizer)
    folder = _folder(config, settings)
    if not _is_whole(folder):
        _prepare(folder, _Rows(dataset, config.column, config.words), settings, tokenizer, config)
    files = TokenFilesConfig(
        path=str(folder),
        tokenizer=config.tokenizer,
        validation=config.validation,
        document_mask=config.document_mask,
        packing=config.packing,
    )
    return open_token_files(files, seq_len=seq_len, split=split, build=build)


@attrs.frozen
class _Part:
    """Rows that become one file."""

    start: int
    stop: int
    size: int
    """Bytes, about."""


@attrs.frozen
class _Rows:
    """The texts of a data set."""

    dataset: Dataset
    column: str
    words: str

    def parts(self, part_size: int) -> list[_Part]:
        """All rows, in parts of about ``part_size`` bytes of text: a function of the data set alone."""
        rows = len(self.dataset)
        size = self.dataset.data.column(self.column).nbytes
        each = max(1, min(rows, rows * part_size // max(size, 1)))
        return [
            _Part(start, stop := min(start + each, rows), size * (stop - start) // rows)
            for start in range(0, rows, each)
        ]

    def __call__(self, part: _Part) -> Iterator[Document]:
        """The documents of a part, in order."""
        rows = self.dataset.select_columns([self.column]).with_format("arrow")
        for start in range(part.start, part.stop, _ROWS_TOGETHER):
            try:
                texts = rows[start : min(start + _ROWS_TOGETHER, part.stop)].column(0).to_pylist()
            except (OSError, ValueError) as error:  # what arrow raises is one of them
                raise ConfigError(f"{self.words} is damaged after row {start} (from 0): {error}") from error
            for number, text in enumerate(texts, start):
                yield Document(text, f"{self.words}, row {number} (from 0)")


def _settings(dataset: Dataset, config: HuggingFaceConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """All that decides the token files, as JSON values, and what tells people whose they are."""
    files = [Path(file["filename"]) for file in dataset.cache_files]
    return {
        "path": config.path,
        "subset": config.subset,
        "split": config.split,
        "column": config.column,
        "rows": len(dataset),
        "fingerprint": dataset._fingerprint,  # the library gives it no other name
        "files": sorted([file.name, file.stat().st_size] for file in files),
        "tokenizer": tokenizer.fingerprint,
        "version": VERSION,
        "part_size": UNIT_SIZE,
    }


def _folder(config: HuggingFaceConfig, settings: dict[str, Any]) -> Path:
    """One for each data set and tokenizer, that a person recognises."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    named = "-".join(filter(None, [config.path.rstrip("/").split("/")[-1], config.subset, config.split]))
    return expanded(config.cache) / f"{re.sub(r'[^A-Za-z0-9_.]+', '-', named)}-{digest[:16]}"


def _is_whole(folder: Path) -> bool:
    if not (folder / INDEX).is_file():
        return False
    try:
        header = read_header(folder / INDEX)
        for shard in header.shards:
            map_shard(folder, header, shard)
    except ConfigError:  # removed or cut off; what is missing is made again
        return False
    return True


def _prepare(
    folder: Path, rows: _Rows, settings: dict[str, Any], tokenizer: Tokenizer, config: HuggingFaceConfig
) -> None:
    progress, said = Progress(), -_SAY_AGAIN_AFTER
    while True:
        with writing_in(folder, f"cache = {config.cache!r}"), alone_in(folder) as alone:
            if alone and not _is_whole(folder):
                progress.say(f"data: {config.words} is tokenised into {folder}, once for all ranks of this node")
                write_atomically(folder / SETTINGS, json.dumps(settings, indent=2) + "\n")
                parts = rows.parts(UNIT_SIZE)
                header = tokenise(Work.begun(folder, tokenizer, rows), parts, config.processes or cores(), progress)
                if header.tokens == 0:
                    raise ConfigError(f"{config.words} has no text: all {len(rows.dataset)} rows are empty")
            if alone:
                return
        if time.monotonic() - said >= _SAY_AGAIN_AFTER:
            said = time.monotonic()
            progress.say(f"data: waiting for another process, which tokenises {config.words} into {folder}")
        time.sleep(_LOOK_AGAIN_AFTER)
