"""The data source ``prompt_completion``: the completions of prompts are learned."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from forge_core.contracts.builder import Builder
from forge_core.contracts.data_source import Split
from forge_core.errors import ConfigError
from forge_plugins_data.answers import Answered, PackedAnswers, chosen_records, pack_answers, tokenizer_of
from forge_plugins_data.answers_config import PromptCompletionConfig


def open_prompt_completion(
    config: PromptCompletionConfig, /, *, seq_len: int, split: Split, build: Builder, **_: object
) -> PackedAnswers:
    """Read and tokenise the lines of a split.

    Raises:
        ConfigError: no such files; a line that is not JSON, not UTF-8, or without text for one of the keys, by file and
            line; one that is too long, if those are refused; nothing to learn.
    """
    texts = _texts(config, split)
    return pack_answers("prompt_completion", config, texts, tokenizer_of(config, build), seq_len, split)


def _texts(config: PromptCompletionConfig, split: Split) -> Iterator[Answered]:
    for record, where in chosen_records(config, split):
        prompt = text_of(record, config.prompt_field, "prompt_field", where)
        completion = text_of(record, config.completion_field, "completion_field", where)
        whole = prompt + completion
        yield Answered(whole, [(len(prompt), len(whole))], where, is_ended=True)


def text_of(record: dict[str, Any], field: str, key: str, where: object) -> str:
    """The text of a key.

    Raises:
        ConfigError: it has no such key, or no text in it.
    """
    if field not in record:
        raise ConfigError(f"{where} has no {field!r}; its keys are {', '.join(record)} (choose with the key {key})")
    text = record[field]
    if not isinstance(text, str):
        raise ConfigError(f"{where}: {field!r} must be text, it is {json.dumps(text)[:80]}")
    return text
