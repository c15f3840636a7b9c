"""Chat templates: conversations as text, as ``transformers`` renders them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import attrs

from forge_core.errors import ConfigError

Messages = Sequence[Mapping[str, Any]]
"""Each with ``role`` and, as a rule, ``content``."""


@attrs.frozen
class Rendered:
    """A conversation as text."""

    text: str
    marks: tuple[tuple[int, int], ...]
    """Where the blocks ``{% generation %}`` begin and end in it, in characters; none where the template has none."""


class ChatTemplate:
    """The Jinja template of a model.

    Args:
        source: the template.
        where: the file, for messages.
        variables: special tokens by their names in templates, such as ``bos_token``.

    Raises:
        ConfigError: it is no template, or jinja2 is not installed.
    """

    def __init__(self, source: str, where: str, variables: Mapping[str, str]) -> None:
        try:
            from forge_plugins_data import jinja_environment as jinja  # text does without it
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"{where} needs the package {error.name}, which is not installed: "
                "pip install 'forge-plugins-data[chat]'"
            ) from error
        self.where = where
        self._jinja = jinja
        self._variables = dict(variables)
        try:
            self._template = jinja.chat_environment().from_string(source)
        except jinja.TemplateError as error:
            raise ConfigError(f"{where} is not a template of Jinja: {error}") from error

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        now: Callable[[], datetime] = datetime.now,
    ) -> Rendered:
        """Write a conversation.

        Args:
            add_generation_prompt: end with the beginning of an answer.
            now: the time, for templates that write it down.

        Raises:
            ConfigError: the template refuses the conversation.
        """
        written: list[str] = []
        marks: list[tuple[int, int]] = []
        given = {
            **self._variables,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": lambda words: now().strftime(words),
            self._jinja.WRITTEN: written,
            self._jinja.MARKS: marks,
        }
        try:
            for part in self._template.generate(given):
                written.append(part)  # the template looks at what is there so far
        except self._jinja.ERRORS as error:
            raise ConfigError(f"{self.where} refuses the conversation: {error}") from error
        return Rendered("".join(written), tuple(marks))

    def end_of_turn(self) -> str:
        """What stands right behind an answer, without spaces: ``<|im_end|>``. Empty if there is nothing."""
        answer = "Yes"
        try:
            text = self.render([{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]).text
        except ConfigError:
            return ""
        return text.rpartition(answer)[2].strip()
