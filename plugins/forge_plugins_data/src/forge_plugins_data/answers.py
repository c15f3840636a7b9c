"""Texts of which parts are learned, and samples of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from forge_core.contracts.builder import Builder
from forge_core.contracts.data_source import Split
from forge_core.contracts.tokenizer import Tokenizer
from forge_core.errors import ConfigError
from forge_plugins_data.answers_config import AnswersConfig, TooLong
from forge_plugins_data.best_fit import Documents, PackedDocuments
from forge_plugins_data.documents import read_records
from forge_plugins_data.encoding import begun, valid_text
from forge_plugins_data.file_selection import refuse_idle_pattern, select_files
from forge_plugins_data.in_memory import unit_hash
from forge_plugins_data.records import JSONL_PATTERN
from forge_plugins_data.token_format import smallest_dtype
from forge_plugins_data.token_samples import TokenFacts
from forge_plugins_data.windows import require_held_out


@attrs.frozen
class Answered:
    """A text, such as a conversation, with answers in it."""

    text: str
    answers: Sequence[tuple[int, int]]
    """Where the parts that are learned begin and end, in characters."""
    where: object
    """For messages: file and line."""
    is_ended: bool = False
    """Whether an end of document follows, which is learned."""


class PackedAnswers(PackedDocuments):
    """Samples of whole texts, each a document of its own, whose targets are the answers."""

    def __init__(self, documents: Documents, facts: TokenFacts, *, end_of_document: int, lines: Mapping[str, int]):
        super().__init__([documents], facts, end_of_document=end_of_document)
        self.lines = lines
        """How many lines there are, and how many of them have been cut or skipped."""


def pack_answers(
    source: str,
    config: AnswersConfig,
    texts: Iterable[Answered],
    tokenizer: Tokenizer,
    seq_len: int,
    split: Split,
) -> PackedAnswers:
    """Tokenise texts and pack them into samples.

    Args:
        source: the name of the data source, which is part of the fingerprint.

    Raises:
        ConfigError: a text is too long, if those are refused; there is none.
    """
    dtype = smallest_dtype(tokenizer.vocab_size)
    kept: list[tuple[np.ndarray, np.ndarray]] = []
    lines = {"lines": 0, "cut": 0, "skipped": 0}
    for text in texts:
        lines["lines"] += 1
        ids, learned = tokens_and_learned(text, tokenizer)
        if is_long := len(ids) > seq_len + 1:
            _refuse_long(text, len(ids), seq_len, config.too_long)
            ids, learned = ids[: seq_len + 1], learned[: seq_len + 1]
        if is_long and (config.too_long == "skip" or not learned[1:].any()):
            lines["skipped"] += 1
            continue
        lines["cut"] += is_long
        kept.append((ids.astype(dtype), learned))
    if not kept:
        part = "" if split == "all" else f"the {split} part of "
        left = f", as all {lines['skipped']} lines are too long for train.seq_len = {seq_len}" if lines["lines"] else ""
        raise ConfigError(f"{config.place}: {part}the data has nothing to learn{left}")
    stops = np.cumsum([len(ids) for ids, _ in kept], dtype=np.int64)
    tokens, learned = (np.concatenate(arrays) for arrays in zip(*kept, strict=True))
    facts = TokenFacts(
        seq_len=seq_len,
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer,
        separator=tokenizer.end_of_document,
        identity=[source, tokenizer.fingerprint, hashlib.sha256(tokens.data).hexdigest()],
    )
    documents = Documents(tokens, np.concatenate([[0], stops[:-1]]), stops, learned=learned)
    return PackedAnswers(documents, facts, end_of_document=tokenizer.end_of_document, lines=lines)


def chosen_records(config: AnswersConfig, split: Split) -> Iterator[tuple[dict[str, Any], object]]:
    """The lines of a split, in the order of the files' relative names, or the rows of a data set. Which one a line is
    in depends on its file's name and its number alone.

    Raises:
        ConfigError: no such files, or data set; a line that is no JSON object; nothing is held out.
    """
    require_held_out(config.validation, split)
    for name, records in _records_by_name(config):
        for number, (record, where) in enumerate(records, 1):
            is_held_out = unit_hash(f"{name}:{number}") < config.validation
            if split == "all" or is_held_out == (split == "validation"):
                yield record, where


Records = Iterator[tuple[dict[str, Any], object]]


def _records_by_name(config: AnswersConfig) -> Iterator[tuple[str, Records]]:
    if config.dataset is not None:
        from forge_plugins_data.hub_dataset import read_rows  # files do without

        yield config.dataset.split or "train", read_rows(config.dataset)
        return
    assert config.path is not None, "one of the two is given"
    refuse_idle_pattern(config.path, config.pattern)
    for file in select_files(config.path, config.pattern or JSONL_PATTERN, config.exclude):
        yield file.relative, read_records(file.path)


def tokenizer_of(config: AnswersConfig, build: Builder) -> Tokenizer:
    """The tokenizer that a configuration names.

    Raises:
        ConfigError: it does not say where its tokens end.
    """
    tokenizer: Tokenizer = build(config.tokenizer, base=Path())
    if not hasattr(tokenizer, "encode_with_ends"):
        raise ConfigError(
            f"the tokenizer {config.tokenizer.name} has no encode_with_ends, by which the tokens of an answer are "
            "told; choose another one, such as tokenizer_file"
        )
    return tokenizer


def tokens_and_learned(text: Answered, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Ids ``(N,)``, and which of them are learned ``(N,)``. A token across the border of an answer belongs to it.

    Raises:
        ConfigError: it is not UTF-8, or has nothing to learn.
    """
    content = valid_text(text.text, None, text.where)
    ids, ends = tokenizer.encode_with_ends(content)  # type: ignore[attr-defined]  # looked for before
    learned = learned_tokens(ends, text.answers)
    if text.is_ended:
        whole = begun(tokenizer, ids)
        learned = np.concatenate([np.zeros(len(whole) - len(ids), dtype=bool), learned, [True]])
        ids = np.append(whole, tokenizer.end_of_document)
    if not learned[1:].any():
        raise ConfigError(f"{text.where} has nothing to learn: its answers are empty")
    return ids, learned


def learned_tokens(ends: np.ndarray, answers: Iterable[tuple[int, int]]) -> np.ndarray:
    """Which tokens are of answers, ``(N,)`` bool. One across the border of an answer belongs to it.

    Args:
        ends: ``(N,)`` int64, where each token ends in the text, in characters.
        answers: where they begin and end.
    """
    learned = np.zeros(len(ends), dtype=bool)
    for start, stop in answers:
        if start < stop and len(ends):
            # several tokens of one character end together; the end of a text may have no token, such as a space
            last = ends[min(int(np.searchsorted(ends, stop)), len(ends) - 1)]
            learned |= (ends > start) & (ends <= last)
    return learned


def _refuse_long(text: Answered, tokens: int, seq_len: int, too_long: TooLong) -> None:
    if too_long == "refuse":
        raise ConfigError(
            f"{text.where} has {tokens:,} tokens, and a sample takes train.seq_len + 1 = {seq_len + 1:,}; raise "
            'train.seq_len, or set too_long to "cut" or "skip"'
        )
