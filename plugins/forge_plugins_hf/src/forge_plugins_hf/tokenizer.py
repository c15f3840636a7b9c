"""A model's tokenizer, which travels along."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forge_core.errors import ConfigError

FILE = "tokenizer.json"
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
_COMPONENT = "forge-plugins-data:tokenizer_file"
_BESIDE = (
    *("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja"),
    *("preprocessor_config.json", "processor_config.json"),
)
"""Files that say how text, answers and inputs beside them are made; they are kept beside it."""
_OTHERS = ("tokenizer.model", "spiece.model", "tekken.json", "vocab.json", "vocab.txt")
"""Vocabularies of other libraries."""


def choose_tokenizer(folder: Path, config: Mapping[str, Any], vocab_size: int) -> dict[str, Any] | None:
    """The tokenizer of a downloaded model as a component's table with an absolute path; ``None`` if there is none.

    Args:
        config: the content of ``config.json``.
        vocab_size: the model's.

    Raises:
        ConfigError: it has more tokens than the model, or is there in another format alone.
    """
    path = folder / FILE
    if not path.exists():
        if other := next((name for name in _OTHERS if (folder / name).exists()), None):
            load = f"AutoTokenizer.from_pretrained({str(folder)!r})"
            raise ConfigError(
                f"{folder} has a tokenizer in {other} alone, and {FILE} is what travels along. Make it with "
                f"transformers: {load}.save_pretrained({str(folder)!r}); or take {other} away, for a checkpoint without"
            )
        return None
    vocabulary = token_ids(path)
    largest = max(vocabulary.values(), default=-1)
    if largest >= vocab_size:
        raise ConfigError(f"{path} has ids up to {largest}, and the model's vocabulary is {vocab_size}")
    end = _end(folder, config, vocabulary)
    found = {"end_of_document": end, "begin_of_document": _begin(path)}
    named = {key: token for key, token in found.items() if token is not None}
    return {"name": _COMPONENT, "path": str(path.resolve()), **named}


def keep_tokenizer(folder: Path, out: Path) -> None:
    """Copy the tokenizer's files."""
    out.mkdir(exist_ok=True)
    for name in (FILE, *_BESIDE):
        if (folder / name).exists():
            shutil.copyfile(folder / name, out / name)


def give_tokenizer(saved: Path, out: Path, table: Mapping[str, Any]) -> bool:
    """Copy the tokenizer of a checkpoint into a model's folder, as ``transformers`` reads it. Returns whether it has
    one in that format.

    Args:
        saved: the checkpoint's folder of it.
        table: the tokenizer's, which names the tokens that begin and end a document.
    """
    if not (saved / FILE).exists():
        return False
    for name in (FILE, *_BESIDE):
        if (saved / name).exists():
            shutil.copyfile(saved / name, out / name)
    if not (out / "tokenizer_config.json").exists():
        tokens = {"bos_token": table.get("begin_of_document"), "eos_token": table.get("end_of_document")}
        named = {key: token for key, token in tokens.items() if token is not None}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
        (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return True


def special_tokens(saved: Path, state: Mapping[str, Any], origin: Mapping[str, Any]) -> dict[str, Any]:
    """Ids for ``config.json``, where ``transformers`` would otherwise take those of its own tokenizers.

    Args:
        saved: the checkpoint's folder of the tokenizer.
        state: the checkpoint's, which names the tokens that begin and end a document.
        origin: those of the model that was downloaded. Without a tokenizer they are given back; with one, further ends
            and padding are, where it ends a document as that model does.
    """
    known: dict[str, Any] = {**dict.fromkeys(_SPECIAL), **origin}
    if (table := state.get("tokenizer")) is None:
        return known
    ids = token_ids(saved / FILE)
    begin, end = (ids.get(str(table.get(f"{which}_of_document"))) for which in ("begin", "end"))
    if end is not None and end in _listed(known["eos_token_id"]):
        return {**known, "bos_token_id": begin}
    return {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": None}


def special_tokens_in(config: Mapping[str, Any]) -> dict[str, Any]:
    """The ids of special tokens that a ``config.json`` has, of its model for text where it has several models."""
    tables = (config, config.get("text_config") or {})
    found = {key: next((one[key] for one in tables if one.get(key) is not None), None) for key in _SPECIAL}
    return {key: value for key, value in found.items() if value is not None}


def _listed(ids: Any) -> Sequence[Any]:
    return ids if isinstance(ids, list) else [ids]


def token_ids(path: Path) -> dict[str, int]:
    """Of all tokens of a ``tokenizer.json``; empty if it is not there.

    Raises:
        ConfigError: it is no such file.
    """
    if not path.exists():
        return {}
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        added = {token["content"]: token["id"] for token in table.get("added_tokens") or ()}
        vocabulary = table["model"]["vocab"]
        if isinstance(vocabulary, list):  # pieces with their scores
            vocabulary = {piece: index for index, (piece, _) in enumerate(vocabulary)}
        return {**vocabulary, **added}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a file of the tokenizers library: {error}") from error


def _begin(path: Path) -> str | None:
    """The token that the tokenizer's template puts before a text: ``transformers`` looks at nothing else."""
    processor = _table(path).get("post_processor") or {}
    for step in (processor, *processor.get("processors", ())):
        for first in step.get("single", ())[:1]:
            if "SpecialToken" in first:
                return str(first["SpecialToken"]["id"])
    return None


def _end(folder: Path, config: Mapping[str, Any], vocabulary: Mapping[str, int]) -> str | None:
    """The token that ends a document, by the tokenizer's configuration, or by the model's."""
    named = _table(folder / "tokenizer_config.json").get("eos_token")
    named = named.get("content") if isinstance(named, dict) else named
    if isinstance(named, str) and named in vocabulary:
        return named
    first, *_ = _listed(special_tokens_in(config).get("eos_token_id")) or [None]
    return next((token for token, number in vocabulary.items() if number == first), None)


def _table(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}
