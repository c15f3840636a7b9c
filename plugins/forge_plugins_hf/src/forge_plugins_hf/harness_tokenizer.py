"""A tokenizer as lm-evaluation-harness uses one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import AutoTokenizer

from forge_core.contracts.tokenizer import Tokenizer
from forge_core.errors import ConfigError
from forge_plugins_hf.tokenizer import give_tokenizer

Messages = Sequence[Mapping[str, str]]


class HarnessTokenizer(ABC):
    """What the harness's own model for ``transformers``, ``HFLM``, does with its tokenizer."""

    end: int
    """The token that ends a text."""
    prefix: int
    """Stands before a text that has no context."""
    end_text: str | None
    """How ``end`` is spelled; ``None`` where it has no text."""

    @abstractmethod
    def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Ids, with the special tokens that the tokenizer adds, unless the text begins with ``prefix``.

        Args:
            add_special_tokens: decides it.
        """

    @abstractmethod
    def encode_prompt(self, text: str) -> list[int]:
        """Ids of what is to be continued, with the special tokens unless it begins with that of a beginning."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text without special tokens."""

    @abstractmethod
    def converse(self, messages: Messages, add_generation_prompt: bool) -> str:
        """A conversation as text, by the tokenizer's template. Without ``add_generation_prompt`` the last message is
        to be continued.

        Raises:
            ConfigError: there is no template, or it cannot do that.
        """


def harness_tokenizer(tokenizer: Tokenizer) -> HarnessTokenizer:
    """The tokenizer that ``forge convert`` would give to ``transformers``, as that loads it; for one that has no form
    there, itself."""
    with TemporaryDirectory(prefix="forge-") as saved, TemporaryDirectory(prefix="forge-") as out:
        table = tokenizer.save(Path(saved))
        if not give_tokenizer(Path(saved), Path(out), table):
            return _Ours(tokenizer)
        return _Published(AutoTokenizer.from_pretrained(out, local_files_only=True), tokenizer.end_of_document)


class _Published(HarnessTokenizer):
    """One of ``transformers``."""

    def __init__(self, tokenizer: Any, end_of_document: int) -> None:
        self._tokenizer = tokenizer
        self.end = end_of_document if tokenizer.eos_token_id is None else tokenizer.eos_token_id
        self.prefix = self.end if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        self.end_text = str(tokenizer.decode([self.end]))
        self._prefix_text = str(tokenizer.decode([self.prefix]))

    def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        if add_special_tokens is None:
            add_special_tokens = not text.startswith(self._prefix_text)
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def encode_prompt(self, text: str) -> list[int]:
        beginning = self._tokenizer.bos_token
        has_one = beginning is not None and text.startswith(beginning)
        return list(self._tokenizer.encode(text, add_special_tokens=not has_one))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def converse(self, messages: Messages, add_generation_prompt: bool) -> str:
        if self._tokenizer.chat_template is None:
            raise ConfigError(_NO_TEMPLATE)
        return str(
            self._tokenizer.apply_chat_template(
                [*messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )


class _Ours(HarnessTokenizer):
    """One that adds nothing to a text, and has no special tokens but the end of a document."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.end = self.prefix = tokenizer.end_of_document
        self.end_text = None

    def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        return [int(one) for one in self._tokenizer.encode(text)]

    def encode_prompt(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)

    def converse(self, messages: Messages, add_generation_prompt: bool) -> str:
        template: Any = getattr(self._tokenizer, "chat_template", None)
        if template is None:
            raise ConfigError(_NO_TEMPLATE)
        if not add_generation_prompt:
            raise ConfigError("a task that begins the answer (gen_prefix) needs a tokenizer of Hugging Face's format")
        return str(template.render(messages, add_generation_prompt=True).text)


_NO_TEMPLATE = "apply_chat_template: the tokenizer of the training data has no chat template; leave the key out"
