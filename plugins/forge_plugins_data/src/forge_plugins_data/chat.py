"""The data source ``chat``: the assistant's turns of conversations are learned."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from forge_core.contracts.builder import Builder
from forge_core.contracts.data_source import Split
from forge_core.contracts.tokenizer import Tokenizer
from forge_core.errors import ConfigError
from forge_plugins_data.answers import Answered, PackedAnswers, chosen_records, pack_answers, tokenizer_of
from forge_plugins_data.answers_config import AnswersConfig, ChatConfig
from forge_plugins_data.chat_template import ChatTemplate, Rendered

ASSISTANT = "assistant"
"""The role whose turns are learned."""


def open_chat(config: ChatConfig, /, *, seq_len: int, split: Split, build: Builder, **_: object) -> PackedAnswers:
    """Read, write by the template and tokenise the conversations of a split.

    Raises:
        ConfigError: no such files; the tokenizer has no chat template; by file and line, a line that is not JSON or
            UTF-8, or has no messages, one without a turn of the assistant's, one that the template refuses or whose
            turns do not add up to the whole, and one that is too long, if those are refused; nothing to learn.
    """
    tokenizer = tokenizer_of(config, build)
    texts = _texts(config, split, template_of(config, tokenizer))
    return pack_answers("chat", config, texts, tokenizer, seq_len, split)


def template_of(config: AnswersConfig, tokenizer: Tokenizer) -> ChatTemplate:
    """The chat template of a tokenizer.

    Raises:
        ConfigError: it has none.
    """
    template: ChatTemplate | None = getattr(tokenizer, "chat_template", None)
    if template is None:
        raise ConfigError(
            f"the tokenizer {config.tokenizer.name} has no chat template: put chat_template.jinja beside its "
            "tokenizer.json, or name one in its key chat_template"
        )
    return template


def _texts(config: ChatConfig, split: Split, template: ChatTemplate) -> Iterator[Answered]:
    now = clock(config.date)
    for record, where in chosen_records(config, split):
        messages = _messages(record, config.messages_field, where)
        tools = record.get("tools")

        def render(n_messages: int, *, prompt: bool = False) -> Rendered:
            return template.render(messages[:n_messages], tools=tools, add_generation_prompt=prompt, now=now)  # noqa: B023

        try:
            text = answered(messages, render, where)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        yield text


def clock(date: str | None) -> Callable[[], datetime]:
    """Tells templates the day, or refuses the ones that ask for it without one."""

    def now() -> datetime:
        if date is None:
            raise ConfigError(
                'the template writes down today\'s date, with which the data change; set date, as in "2026-01-31"'
            )
        return datetime.fromisoformat(date)

    return now


def _messages(record: dict[str, Any], field: str, where: object) -> list[dict[str, Any]]:
    if field not in record:
        keys = ", ".join(record)
        raise ConfigError(f"{where} has no {field!r}; its keys are {keys} (choose with the key messages_field)")
    messages = record[field]
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{where}: {field!r} must be an array of messages, it is {json.dumps(messages)[:80]}")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            said = json.dumps(message)[:80]
            raise ConfigError(f"{where}: message {number} must be an object with a role, it is {said}")
    if all(message["role"] != ASSISTANT for message in messages):
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise ConfigError(
            f"{where} has no message of the role {ASSISTANT!r}, so nothing to learn; its roles are {roles}"
        )
    return messages


def answered(messages: list[dict[str, Any]], render: Callable[..., Rendered], where: object) -> Answered:
    """A conversation with the assistant's turns, by the template's own marks, or as what each adds to those before it.

    Raises:
        ConfigError: the template refuses it, or its turns do not add up to the whole.
    """
    whole = render(len(messages))
    if whole.marks:
        return Answered(whole.text, whole.marks, where)
    answers = []
    for number, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        before = render(number, prompt=True).text
        through = whole.text if number + 1 == len(messages) else render(number + 1).text
        if not through.startswith(before) or not whole.text.startswith(through):
            raise ConfigError(
                f"the template's turns do not add up: message {number + 1} is written otherwise when others follow "
                "or when it is asked for, so that its tokens cannot be told; mark answers by {% generation %} … "
                "{% endgeneration %} in the template, or use another one"
            )
        answers.append((len(before), len(through)))
    return Answered(whole.text, answers, where)
