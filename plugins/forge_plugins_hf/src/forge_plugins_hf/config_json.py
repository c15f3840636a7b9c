"""``config.json`` of a model of Hugging Face. No key of it is ignored that changes what the model computes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from forge_core.errors import ConfigError, and_more

INCLUDE = "forge_include"
"""Patterns of the parameters that there are, where a part of a model was written."""
_SAY_NOTHING = frozenset(
    (
        INCLUDE,
        *("_name_or_path", "_attn_implementation_autoset", "architectures", "auto_map", "bos_token_id"),
        *("cache_implementation", "chunk_size", "decoder_start_token_id", "dtype", "eos_token_id", "id2label"),
        *("is_decoder", "label2id", "model_type"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id", "pretraining_tp"),
        *("problem_type", "return_dict", "router_jitter_noise", "sep_token_id", "tokenizer_class", "torch_dtype"),
        *("transformers_version", "unsloth_fixed", "use_cache", "_commit_hash", "name_or_path"),
    )
)
"""Keys about files, tokens, training and what calls return."""


class ReadKeys(Mapping[str, Any]):
    """A table that remembers which of its keys have been looked up.

    Args:
        outer: the table that it is in, and its key there.
    """

    def __init__(self, table: Mapping[str, Any], outer: tuple[ReadKeys, str] | None = None) -> None:
        self._table = table
        self._outer = outer
        self.seen: set[str] = set()
        self.last: tuple[str, Any] = ("", None)
        """The key that was looked up last, here or in a table within, and its value."""
        self.parts: dict[str, ReadKeys] = {}
        """Tables within this one that have been opened."""

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        self._note(key, self._table.get(key))
        return self._table[key]

    def _note(self, key: str, value: Any) -> None:
        self.last = key, value
        if self._outer is not None:
            outer, within = self._outer
            outer._note(f"{within}.{key}", value)

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)

    def __contains__(self, key: object) -> bool:
        return key in self._table


def part_of(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A table within a ``config.json``, such as ``text_config``. If ``config`` remembers what is looked up, so does it.

    Raises:
        KeyError: there is none.
        ConfigError: it is no table.
    """
    found = config[key]
    if not isinstance(found, Mapping):
        raise ConfigError(f"{key} must be a table, got {found!r}")
    return config.parts.setdefault(key, ReadKeys(found, (config, key))) if isinstance(config, ReadKeys) else found


def read_config(folder: Path) -> dict[str, Any]:
    """The content of ``config.json``.

    Raises:
        ConfigError: it is not there, or is no table.
    """
    path = folder / "config.json"
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give the folder of a downloaded model") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(table, dict):
        raise ConfigError(f"{path} must be a table, and is {type(table).__name__}")
    return table


def architecture_in(config: Mapping[str, Any], folder: Path) -> str:
    """
    Raises:
        ConfigError: there is none, or several.
    """
    found = config.get("architectures")
    if not isinstance(found, list) or len(found) != 1 or not isinstance(found[0], str):
        raise ConfigError(f"{folder / 'config.json'}: architectures must be an array of one name, got {found!r}")
    return found[0]


def refuse_unread(config: ReadKeys, folder: Path) -> None:
    """
    Raises:
        ConfigError: a key has not been looked up, has a value, and may change what the model computes.
    """
    unread = sorted(_unread(config))
    if unread:
        named = ", ".join(unread[:5]) + and_more(len(unread), 5)
        raise ConfigError(f"{folder / 'config.json'}: not supported by our model of this architecture: {named}")


def _unread(config: ReadKeys, within: str = "") -> Iterator[str]:
    for key in config:
        if key in config.parts:
            yield from _unread(config.parts[key], f"{within}{key}.")
        elif key not in config.seen and key not in _SAY_NOTHING and _says_something(config, key):
            yield f"{within}{key} = {json.dumps(config[key])}"


def _says_something(config: Mapping[str, Any], key: str) -> bool:
    if key == "is_causal":  # alone, for its value is as a rule true
        return config[key] is False
    return config[key] not in (None, False, 0, 0.0, {}, [])
