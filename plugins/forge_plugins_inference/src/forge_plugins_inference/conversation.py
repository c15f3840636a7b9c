"""A conversation with a model, written by its own chat template."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

from forge_core.contracts.model import GenerativeModel
from forge_core.contracts.tokenizer import Tokenizer
from forge_core.errors import ConfigError
from forge_plugins_inference.generation import generate_steps

_UNFINISHED = "\ufffd"
"""The text of a token that is a part of a character."""


class Conversation:
    """The messages so far. Each answer is sampled after all of them, as far as they fit.

    Args:
        tokenizer: with ``chat_template``, and with the ids in ``ends_of_turn`` if it knows any; an answer ends with one
            of them, with the end of a document, or with what the template writes behind an answer.
        system: the first message, which is never dropped.
        say: is told of messages that are dropped.
        settings: of ``generate_steps``.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """

    def __init__(
        self,
        model: GenerativeModel,
        tokenizer: Tokenizer,
        *,
        max_new_tokens: int,
        system: str | None = None,
        say: Callable[[str], None],
        **settings: Any,
    ) -> None:
        self._template: Any = getattr(tokenizer, "chat_template", None)
        if self._template is None:
            raise ConfigError(
                "the tokenizer has no chat template; train on data whose tokenizer has the key chat_template, or "
                "convert a model that brings chat_template.jinja or a tokenizer_config.json with one"
            )
        self._model = model
        self._tokenizer = tokenizer
        self._settings = settings
        self._max_new_tokens = max_new_tokens
        self._say = say
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._turns: list[dict[str, str]] = []
        self._end_of_turn: str = self._template.end_of_turn()
        self._ends = {tokenizer.end_of_document, *getattr(tokenizer, "ends_of_turn", ())}

    def answer(self, text: str) -> Iterator[str]:
        """Say something to the model, and yield its answer in parts. The message is taken back if this fails.

        Raises:
            ConfigError: the template refuses the conversation, or this message alone does not fit.
        """
        before = [*self._turns]
        self._turns.append({"role": "user", "content": text})
        try:
            prompt = self._prompt()
            parts = []
            for part in self._answer(prompt):
                parts.append(part)
                yield part
        except ConfigError:
            self._turns = before
            raise
        self._turns.append({"role": "assistant", "content": "".join(parts)})

    def _prompt(self) -> Sequence[int]:
        """The ids of the conversation, without its oldest turns if there is no room for an answer after all of it."""
        longest, dropped = self._model.max_seq_len, 0
        while True:
            rendered = self._template.render([*self._system, *self._turns], add_generation_prompt=True)
            prompt: list[int] = self._tokenizer.encode(rendered.text).tolist()
            if len(prompt) + self._max_new_tokens <= longest or len(self._turns) == 1:
                break
            del self._turns[:2]
            dropped += 1
        if len(prompt) >= longest:
            raise ConfigError(f"the message has {len(prompt)} tokens as it is written, and max_seq_len is {longest}")
        if dropped:
            turns = "the oldest message and its answer are" if dropped == 1 else f"the {dropped} oldest exchanges are"
            self._say(f"{turns} dropped: the model takes max_seq_len = {longest} tokens, with those of an answer")
        return prompt

    def _answer(self, prompt: Sequence[int]) -> Iterator[str]:
        room = min(self._max_new_tokens, self._model.max_seq_len - len(prompt))
        steps = generate_steps(self._model, [prompt], max_new_tokens=room, **self._settings)
        ids: list[int] = []
        text, shown = "", 0
        with closing(steps):
            for step in steps:
                if (token := int(step[0])) in self._ends:
                    break
                ids.append(token)
                text = self._tokenizer.decode(ids)
                if self._end_of_turn and self._end_of_turn in text:
                    text = text.partition(self._end_of_turn)[0]
                    break
                whole = len(text) - self._held_back(text)
                if whole > shown:
                    yield text[shown:whole]
                    shown = whole
        if text[shown:]:
            yield text[shown:]

    def _held_back(self, text: str) -> int:
        """Characters at the end that may change, or may turn out to be the beginning of the end."""
        end = self._end_of_turn
        begun = next((n for n in range(min(len(end), len(text)), 0, -1) if text.endswith(end[:n])), 0)
        return max(begun, len(text) - len(text.rstrip(_UNFINISHED)))
