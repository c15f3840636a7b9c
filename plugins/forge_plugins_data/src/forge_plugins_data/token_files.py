"""The data source ``token_files``: samples from memory-mapped ids."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from forge_core.contracts.builder import Builder
from forge_core.contracts.data_source import Split
from forge_core.contracts.tokenizer import Tokenizer
from forge_core.errors import ConfigError
from forge_plugins_data.best_fit import Documents, PackedDocuments, find_documents
from forge_plugins_data.config import TokenFilesConfig
from forge_plugins_data.file_selection import expanded, select_files
from forge_plugins_data.other_formats import litdata_chunks, map_datatrove, map_litdata, map_megatron, map_raw
from forge_plugins_data.token_format import FORMAT, INDEX, SETTINGS, VERSION, Shard, TokenHeader, map_shard, read_header
from forge_plugins_data.token_samples import TokenFacts, TokenSamples
from forge_plugins_data.verification import Verification
from forge_plugins_data.windows import Span, TokenWindows, count_windows, require_held_out, too_small

_SCAN = 2**24
"""Ids looked at together when a file does not say how large its ids are."""


def open_token_files(
    config: TokenFilesConfig, /, *, seq_len: int, split: Split, build: Builder, **_: object
) -> TokenSamples:
    """Map the files. Samples are windows within a file, or documents put together. Held out are the last windows of
    each file, or documents at equal distances.

    Raises:
        ConfigError: files missing, damaged, without a description, of different vocabularies or with ids beyond it, or
            too few tokens for one sample.
    """
    require_held_out(config.validation, split)
    found = (file for path in _each(config.path) for file in _find(path, config.dtype))
    files = [*{file.path.resolve(): file for file in found}.values()]
    if config.dtype is not None and not any(file.dtype_is_stated for file in files):
        raise ConfigError(f'dtype = "{config.dtype}" has no effect: all files say what their ids are; remove it')
    meaning = _agree(files, config, _tokenizer(files, config, build))
    for file in files:
        _check_ids(file, meaning.vocab_size)
    end = meaning.end_of_document
    if end is None and (config.document_mask or config.packing == "best_fit"):
        key = "document_mask = true" if config.document_mask else 'packing = "best_fit"'
        raise ConfigError(f"{key} needs to know where documents end; set end_of_document or a tokenizer")
    if end is not None and end >= meaning.vocab_size:
        raise ConfigError(f"end_of_document = {end} is beyond the vocabulary of {meaning.vocab_size} (from 0)")
    facts = TokenFacts(
        seq_len=seq_len,
        vocab_size=meaning.vocab_size,
        tokenizer=meaning.tokenizer,
        separator=end if config.document_mask else None,
        identity=["token_files", [file.identity for file in files]],
        verification=_verification(files, config),
        documents=_number_of_documents(files),
    )
    if config.packing == "best_fit":
        assert end is not None, "it was refused"
        documents = [find_documents(file.tokens, end, str(file.path)) for file in files]
        chosen = _split_documents(documents, config.validation, split)
        packed = PackedDocuments(chosen, facts, end_of_document=end)
        if not len(packed):
            raise ConfigError(f"{_part(config, split)} has no document of two tokens; use more data")
        return packed
    spans = _split(files, seq_len, config.validation, split)
    if not any(span.stop > span.first for span in spans):
        tokens = max((len(file.tokens) for file in files), default=0)
        raise too_small(f"{_part(config, split)} (the longest of {len(files)} files)", seq_len, tokens)
    windows = [[span.first, span.stop] for span in spans]
    return TokenWindows(spans, attrs.evolve(facts, identity=[*facts.identity, windows]))


def _part(config: TokenFilesConfig, split: Split) -> str:
    return "the data" if split == "all" or config.validation == 0 else f"the {split} part of the data"


@attrs.frozen(kw_only=True)
class _TokenFile:
    """A file that has been opened, and what is known about it."""

    path: Path
    tokens: np.ndarray
    header: TokenHeader | None = None
    """``None`` for ``.npy`` and the files of other programs, which say their type at most."""
    shard: Shard | None = None
    dtype_is_stated: bool = False
    """Nothing but the key ``dtype`` says what its ids are."""

    @property
    def identity(self) -> list[Any]:
        checksum = self.shard.sha256 if self.shard is not None else None
        return [self.path.name, len(self.tokens), str(self.tokens.dtype), checksum]


@attrs.frozen(kw_only=True)
class _Meaning:
    """What all files have in common."""

    vocab_size: int
    end_of_document: int | None
    tokenizer: Tokenizer | None


def _each(path: str | Sequence[str]) -> Sequence[str]:
    return [path] if isinstance(path, str) else path


def _find(path: str, dtype: str | None) -> list[_TokenFile]:
    location = expanded(path)
    if location.is_dir():
        return _open_folder(location)
    return [_open_file(selected.path, dtype) for selected in select_files(str(location), pattern=())]


def _open_folder(folder: Path) -> list[_TokenFile]:
    index = folder / INDEX
    if index.is_file() and (chunks := litdata_chunks(index)) is not None:
        return [_TokenFile(path=chunk, tokens=map_litdata(chunk, index)) for chunk in chunks]
    if index.is_file():
        header = read_header(index)
        if not header.shards:
            raise ConfigError(f"{index} is damaged: shards: it lists no file")
        return [_open_bin(folder, header, shard) for shard in header.shards]
    if (folder / SETTINGS).is_file():
        raise ConfigError(
            f"preparing {folder} was not finished; run the same 'forge data prepare' again to complete it"
        )
    there = next((ending for ending in (".idx", ".ds", ".bin") if any(folder.glob(f"*{ending}"))), ".npy")
    raise ConfigError(
        f"the folder {folder} has no {INDEX}, so it was not written by 'forge data prepare'; "
        f'for other token files give a pattern, such as path = "{folder}/*{there}"'
    )


def _open_file(file: Path, dtype: str | None) -> _TokenFile:
    if file.suffix == ".npy":
        return _TokenFile(path=file, tokens=_map_npy(file))
    if file.suffix == ".ds":
        is_stated = not file.with_name(f"{file.name}.metadata").is_file()
        return _TokenFile(path=file, tokens=map_datatrove(file, dtype), dtype_is_stated=is_stated)
    if (index := file.with_suffix(".idx")).is_file():
        return _TokenFile(path=file.with_suffix(".bin"), tokens=map_megatron(index))
    return _open_described(file) or _open_raw(file, dtype)


def _open_described(file: Path) -> _TokenFile | None:
    """By the JSON beside it."""
    for description in (file.with_suffix(".json"), file.parent / INDEX):
        if not description.is_file():
            continue
        if (chunks := litdata_chunks(description)) is not None:
            if file.name in {chunk.name for chunk in chunks}:
                return _TokenFile(path=file, tokens=map_litdata(file, description))
            continue
        header = read_header(description)
        for shard in header.shards:
            if shard.file == file.name:
                return _open_bin(file.parent, header, shard)
    return None


def _open_raw(file: Path, dtype: str | None) -> _TokenFile:
    if dtype is not None:
        return _TokenFile(path=file, tokens=map_raw(file, np.dtype(dtype)), dtype_is_stated=True)
    sidecar = (
        f'{{"format": "{FORMAT}", "version": {VERSION}, "dtype": "uint16", "vocab_size": …, '
        f'"shards": [{{"file": "{file.name}", "tokens": …}}]}}'
    )
    raise ConfigError(
        f"{file} has no description, and the type of its ids cannot be guessed from its size. "
        f'Set dtype = "uint16" (or what it is), or write {file.with_suffix(".json").name} beside it:\n    {sidecar}\n'
        "or make files with 'forge data prepare'."
    )


def _open_bin(folder: Path, header: TokenHeader, shard: Shard) -> _TokenFile:
    return _TokenFile(path=folder / shard.file, tokens=map_shard(folder, header, shard), header=header, shard=shard)


def _map_npy(file: Path) -> np.ndarray:
    try:
        mapped = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"{file} is truncated or not a .npy file: {error}") from error
    if mapped.ndim != 1 or mapped.dtype.kind not in "iu":
        raise ConfigError(
            f"{file} must hold one row of integers; it is an array of {mapped.dtype} of shape {mapped.shape}"
        )
    return np.asarray(mapped)


def _tokenizer(files: list[_TokenFile], config: TokenFilesConfig, build: Builder) -> Tokenizer | None:
    """The one that the config names, else the one that the files carry; checked against what the files say."""
    carrier = next((file for file in files if file.header is not None and file.header.tokenizer is not None), None)
    tokenizer: Tokenizer
    if config.tokenizer is not None:
        tokenizer = build(config.tokenizer, base=Path())
    elif carrier is not None and carrier.header is not None and carrier.header.tokenizer is not None:
        tokenizer = build(build.resolve("tokenizer", carrier.header.tokenizer), base=carrier.path.parent)
    else:
        return None
    for file in files:
        made_with = file.header.tokenizer_fingerprint if file.header is not None else None
        if made_with not in (None, tokenizer.fingerprint):
            raise ConfigError(
                f"{file.path} was made with another tokenizer (fingerprint {made_with}) than the one that would be "
                f"used ({tokenizer.fingerprint}). Remove the key tokenizer to use the one beside the data, or prepare "
                "the data again."
            )
    return tokenizer


def _agree(files: list[_TokenFile], config: TokenFilesConfig, tokenizer: Tokenizer | None) -> _Meaning:
    headers = [(file.path, file.header) for file in files if file.header is not None]
    vocab_size = _one_value("vocab_size", [(path, header.vocab_size) for path, header in headers], config.vocab_size)
    end = _one_value("end_of_document", [(path, h.end_of_document) for path, h in headers], config.end_of_document)
    if tokenizer is not None:
        if vocab_size is not None and tokenizer.vocab_size > vocab_size:
            raise ConfigError(f"vocab_size = {vocab_size} is less than the {tokenizer.vocab_size} of the tokenizer")
        vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        end = tokenizer.end_of_document if end is None else end
    if vocab_size is None:
        raise ConfigError(f"{files[0].path} does not say how large its vocabulary is; set vocab_size or a tokenizer")
    return _Meaning(vocab_size=vocab_size, end_of_document=end, tokenizer=tokenizer)


def _one_value(key: str, said: Sequence[tuple[Path, int | None]], configured: int | None) -> int | None:
    """What all files that say anything agree on, else what the config says."""
    known = [(path, value) for path, value in said if value is not None]
    for path, value in known:
        if value != known[0][1]:
            raise ConfigError(f"{path} has {key} {value}, but {known[0][0]} has {known[0][1]}; they cannot be mixed")
        if configured not in (None, value):
            raise ConfigError(f"{key} = {configured} contradicts {path}, which says {value}; remove the key")
    return known[0][1] if known else configured


def _verification(files: list[_TokenFile], config: TokenFilesConfig) -> Verification | None:
    checksums = {str(file.path): file.shard.sha256 for file in files if file.shard is not None and file.shard.sha256}
    if config.verify == "before" and not checksums:
        raise ConfigError('verify = "before" has no effect: no file has a checksum in the JSON beside it; remove it')
    return Verification(checksums, before=config.verify == "before") if config.verify != "never" else None


def _number_of_documents(files: list[_TokenFile]) -> int | None:
    """What the JSON beside the files says; ``None`` if one of them has none that does."""
    numbers = [None if file.shard is None else file.shard.documents for file in files]
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None


def _check_ids(file: _TokenFile, vocab_size: int) -> None:
    if file.shard is not None and file.shard.max_id is not None:
        smallest, largest = 0, file.shard.max_id
    else:
        smallest, largest = _range(file.tokens)
    if smallest < 0 or largest >= vocab_size:
        wrong = smallest if smallest < 0 else largest
        raise ConfigError(
            f"{file.path} has the id {wrong}, but the vocabulary has {vocab_size} (ids 0 to {vocab_size - 1}). "
            f"The file was made with another tokenizer, or vocab_size{' or dtype' * file.dtype_is_stated} is wrong."
        )


def _range(tokens: np.ndarray) -> tuple[int, int]:
    smallest = largest = 0
    for start in range(0, len(tokens), _SCAN):
        part = tokens[start : start + _SCAN]
        smallest, largest = min(smallest, int(part.min())), max(largest, int(part.max()))
    return smallest, largest


def _split(files: Sequence[_TokenFile], seq_len: int, validation: float, split: Split) -> list[Span]:
    """The windows of a split in each file.

    Raises:
        ConfigError: there are fewer than two windows to divide.
    """
    counts = [count_windows(len(file.tokens), seq_len) for file in files]
    if split == "all" or validation == 0:
        return [Span(file.tokens, 0, count, str(file.path)) for file, count in zip(files, counts, strict=True)]
    total = sum(counts)
    if total < 2:
        raise ConfigError(
            f"validation = {validation} cannot hold out a sample: the data have {total} of {seq_len} tokens; use more "
            "data, a smaller train.seq_len, or validation = 0"
        )
    held_out = min(max(round(total * validation), 1), total - 1)
    # Rounding the cumulative share spreads exactly held_out windows over the files, in proportion to their size.
    ends = [round(held_out * seen / total) for seen in itertools.accumulate(counts, initial=0)]
    spans = []
    for file, count, before, after in zip(files, counts, ends, ends[1:], strict=False):
        border = count - (after - before)
        first, stop = (0, border) if split == "train" else (border, count)
        spans.append(Span(file.tokens, first, stop, str(file.path)))
    return spans


def _split_documents(files: Sequence[Documents], validation: float, split: Split) -> list[Documents]:
    """The documents of a split in each file. Held out is the share ``validation`` of them, at equal distances in the
    whole.

    Raises:
        ConfigError: there are fewer than two documents to divide.
    """
    if split == "all" or validation == 0:
        return [*files]
    ends = [0, *itertools.accumulate(len(file.stops) for file in files)]
    total = ends[-1]
    if total < 2:
        raise ConfigError(
            f"validation = {validation} cannot hold out a document: the data have {total}; use more data, or "
            "validation = 0"
        )
    number = min(max(round(total * validation), 1), total - 1)
    held_out = np.zeros(total, dtype=bool)
    held_out[((np.arange(number) + 0.5) * total / number).astype(np.int64)] = True
    chosen = ~held_out if split == "train" else held_out
    return [file.those(chosen[first:end]) for file, first, end in zip(files, ends, ends[1:], strict=False)]
