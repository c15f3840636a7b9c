"""Files beside a tokenizer.json: how a model's conversations are written, what ends an answer, and how its pictures are
made."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from forge_core.errors import ConfigError
from forge_plugins_data.chat_template import ChatTemplate

TEMPLATE = "chat_template.jinja"
_CONFIG, _SPECIAL, _GENERATION = "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"
_OF_PICTURES = ("preprocessor_config.json", "processor_config.json")
"""Nothing here reads them; a trained model that is given away has them again."""
_BESIDE = "tokenizer.json"
"""Files lie beside one of this name: a folder with others may be that of several tokenizers."""


@attrs.frozen
class CompanionFile:
    """A file that is kept in memory."""

    path: Path
    content: bytes


@attrs.frozen
class Companions:
    """These files, which are saved with the tokenizer."""

    files: Mapping[str, CompanionFile] = attrs.Factory(dict)
    """By the names that they are saved under."""

    def chat_template(self, variables: Mapping[str, str]) -> ChatTemplate | None:
        """The template, of a file of its own or else of the tokenizer's configuration.

        Args:
            variables: special tokens, for the ones that no file names.

        Raises:
            ConfigError: it is damaged, or jinja2 is not installed.
        """
        named = {**variables, **self._special_tokens()}
        if TEMPLATE in self.files:
            return ChatTemplate(_text(self.files[TEMPLATE]), str(self.files[TEMPLATE].path), named)
        kept = self._table(_CONFIG).get("chat_template")
        if isinstance(kept, list):  # several by name
            kept = next((one.get("template") for one in kept if one.get("name") == "default"), None)
        return ChatTemplate(kept, str(self.files[_CONFIG].path), named) if isinstance(kept, str) else None

    def eos_ids(self) -> list[int]:
        """The ids at which ``transformers`` ends an answer."""
        ids = self._table(_GENERATION).get("eos_token_id")
        return [one for one in (ids if isinstance(ids, list) else [ids]) if isinstance(one, int)]

    def eos_tokens(self) -> list[str]:
        """The tokens that end a text by the tokenizer's configuration."""
        return [text for name, text in self._special_tokens().items() if name == "eos_token"]

    def save(self, directory: Path) -> None:
        """Write all of them."""
        for name, file in self.files.items():
            (directory / name).write_bytes(file.content)

    def _special_tokens(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for name in (_SPECIAL, _CONFIG):
            found |= dict(_tokens_in(self._table(name)))
        return found

    def _table(self, name: str) -> dict[str, Any]:
        if name not in self.files:
            return {}
        try:
            table = json.loads(self.files[name].content)
        except ValueError as error:
            raise ConfigError(f"{self.files[name].path} is not JSON: {error}") from error
        return table if isinstance(table, dict) else {}


def read_companions(tokenizer: Path | None, template: Path | None) -> Companions:
    """The files beside a tokenizer's.

    Args:
        template: a file in place of the template beside it.

    Raises:
        ConfigError: a file cannot be read.
    """
    paths: dict[str, Path] = {}
    if tokenizer is not None and tokenizer.name == _BESIDE:
        names = (_CONFIG, _SPECIAL, _GENERATION, TEMPLATE, *_OF_PICTURES)
        beside = {name: tokenizer.with_name(name) for name in names}
        paths = {name: path for name, path in beside.items() if path.is_file()}
    if template is not None:
        paths[TEMPLATE] = template
    return Companions({name: CompanionFile(path, _content(path)) for name, path in paths.items()})


def _tokens_in(table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in table.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            yield name, text


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def _text(file: CompanionFile) -> str:
    try:
        return file.content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file.path} is not UTF-8: {error}") from error
