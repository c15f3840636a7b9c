"""The data source ``text_files``: text in, samples out, nothing on disk."""

from __future__ import annotations

from pathlib import Path

from forge_core.contracts.builder import Builder
from forge_core.contracts.data_source import Split
from forge_core.errors import ConfigError
from forge_plugins_data.config import TextFilesConfig
from forge_plugins_data.documents import Document
from forge_plugins_data.encoding import reads_bytes
from forge_plugins_data.file_selection import SelectedFile, refuse_idle_pattern, select_files
from forge_plugins_data.in_memory import InMemory, unit_hash
from forge_plugins_data.plain_text import refuse_json_lines, refuse_what_is_no_text
from forge_plugins_data.token_samples import TokenSamples
from forge_plugins_data.unpacking import open_unpacked
from forge_plugins_data.windows import require_held_out

DEFAULT_PATTERN = "**/*.txt"


def open_text_files(
    config: TextFilesConfig, /, *, seq_len: int, split: Split, build: Builder, **_: object
) -> TokenSamples:
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
    refuse_idle_pattern(config.path, config.pattern)
    selected = select_files(config.path, config.pattern or DEFAULT_PATTERN, config.exclude)
    files = split_files(selected, config.validation, split)
    in_memory = InMemory(
        source="text_files",
        tokenizer=tokenizer,
        encoding_errors=config.encoding_errors,
        document_mask=config.document_mask,
        packing=config.packing,
        seq_len=seq_len,
        split=split,
    )
    documents = (Document(_read(file.path, binary=config.binary), str(file.path)) for file in files)
    return in_memory.samples(documents, f"{len(files)} file{'s' * (len(files) != 1)}")


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
    by_hash = sorted(files, key=lambda file: unit_hash(file.relative))
    below = sum(unit_hash(file.relative) < validation for file in files)
    held_out = set(by_hash[: min(max(below, 1), len(files) - 1)])
    return [file for file in files if (file in held_out) == (split == "validation")]


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
