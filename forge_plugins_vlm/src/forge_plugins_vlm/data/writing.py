"""Conversations as text, with placeholders where images are, and which parts of it are learned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

import attrs

from forge_core.contracts.tokenizer import Tokenizer
from forge_core.errors import ConfigError
from forge_plugins_data.chat import answered, clock, template_of
from forge_plugins_data.chat_template import ChatTemplate, Rendered
from forge_plugins_vlm.data.config import ImageTextConfig
from forge_plugins_vlm.data.sample import ASSISTANT, Message, Sample


@attrs.frozen
class Written:
    """A conversation as text."""

    text: str
    answers: Sequence[tuple[int, int]]
    """Where the parts that are learned begin and end, in characters."""
    ends: Sequence[int] = ()
    """Where an end of document stands, in characters; it is learned."""


Write = Callable[[Sample], Written]


def writer(config: ImageTextConfig, tokenizer: Tokenizer) -> Write:
    """What writes conversations as a configuration wants them.

    Raises:
        ConfigError: the tokenizer has no chat template, and it is to be used. Writing: the placeholder stands in a
            text; there is no answer; the template refuses a conversation, or loses or invents a placeholder, or its
            turns do not add up to the whole.
    """
    chat = template_of(config, tokenizer) if config.chat_template else None
    now = clock(config.date)

    def write(sample: Sample) -> Written:
        refuse_placeholders(sample, config.placeholder)
        if all(message.role != ASSISTANT for message in sample.messages):
            roles = ", ".join(dict.fromkeys(message.role for message in sample.messages)) or "none"
            raise ConfigError(
                f"{sample.where} has no message of the role {ASSISTANT!r} to learn; its roles are {roles}"
            )
        if chat is None:
            return write_plain(sample.messages, config.prompt_template, config.placeholder)
        written = write_chat(sample, chat, config.placeholder, now)
        found, images = written.text.count(config.placeholder), len(sample.references)
        if found != images:
            raise ConfigError(
                f"{sample.where} has {images} images, and the chat template writes {found} placeholders "
                f"{config.placeholder!r} for them"
            )
        return written

    return write


def refuse_placeholders(sample: Sample, placeholder: str) -> None:
    """
    Raises:
        ConfigError: a text has the placeholder in it.
    """
    for number, message in enumerate(sample.messages, 1):
        if any(isinstance(part, str) and placeholder in part for part in message.content):
            kind = "an answer" if message.role == ASSISTANT else "a text"
            raise ConfigError(
                f"{sample.where}: the placeholder {placeholder!r} stands in {kind}, message {number}, where no image "
                "is; remove it, or choose another one with the key placeholder"
            )


def write_plain(messages: Sequence[Message], template: str, placeholder: str) -> Written:
    """Each answer with what stands before it, by a template such as ``"{prompt} {answer}"``, and an end of document.

    Several messages before an answer are lines of one prompt.
    """
    before, _, between = template.removesuffix("{answer}").partition("{prompt}")
    text, answers, ends = "", [], []
    prompts: list[str] = []
    for message in messages:
        said = _content(message, placeholder)
        if message.role != ASSISTANT:
            prompts.append(said)
            continue
        if any(prompts):
            text += before + "\n".join(prompts) + between
        answers.append((len(text), len(text) + len(said)))
        text += said
        ends.append(len(text))
        prompts = []
    return Written(text, answers, ends)


def write_chat(sample: Sample, template: ChatTemplate, placeholder: str, now: Callable[[], datetime]) -> Written:
    """By a chat template; an answer is what it adds to the conversation before it.

    Raises:
        ConfigError: it refuses the conversation, or its turns do not add up to the whole.
    """
    messages = [{"role": one.role, "content": _content(one, placeholder)} for one in sample.messages]

    def render(n_messages: int, *, prompt: bool = False) -> Rendered:
        return template.render(messages[:n_messages], add_generation_prompt=prompt, now=now)

    try:
        found = answered(messages, render, sample.where)
    except ConfigError as error:
        raise ConfigError(f"{sample.where}: {error}") from error
    return Written(found.text, found.answers)


def _content(message: Message, placeholder: str) -> str:
    return "".join(part if isinstance(part, str) else placeholder for part in message.content)
