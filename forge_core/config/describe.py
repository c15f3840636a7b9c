"""Values in the words of TOML, for messages."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any


def describe(value: Any) -> str:
    """A value in words: ``the string "12"``, ``the integer 1``, ``true``, ``an array of 2``, ``a table``."""
    if isinstance(value, bool):
        return literal(value)
    if isinstance(value, str):
        shown = value if len(value) <= 80 else f"{value[:77]}..."
        return f"the string {literal(shown)}" if value else "the empty string"
    if isinstance(value, int):
        return f"the integer {literal(value)}"
    if isinstance(value, float):
        return f"the float {literal(value)}"
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, (list, tuple)):
        return f"an array of {len(value)}" if value else "an empty array"
    if isinstance(value, datetime.date):
        return f"the date {value.isoformat()}"
    if isinstance(value, datetime.time):
        return f"the time {value.isoformat()}"
    return literal(value)


def literal(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key} = {literal(item)}' for key, item in value.items())}}}"
    return str(value)


def one_of(values: Iterable[Any]) -> str:
    """Choices as a message lists them: ``'fp32', 'bf16'``."""
    return ", ".join(f"'{value}'" if isinstance(value, str) else literal(value) for value in values)


_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but for tabs and ends of lines, marks of writing direction, and halves of characters."""
_PASSWORD = re.compile(r"(://[^\s:@/'\"]*):(?!\d+/)[^\s'\"]+@")
_TOKEN = re.compile(r"([?&][^\s=&]*(?:sig|token|secret|password|passwd|key)[^\s=&]*=)[^\s&'\"]+", re.IGNORECASE)


def printable(text: str) -> str:
    """``text`` with control characters as escapes, and without the passwords of URLs."""
    return _STEERING.sub(_escaped, without_passwords(text))


def without_passwords(text: str) -> str:
    """``ftp://user:***@host/path``, in any text."""
    return _TOKEN.sub(r"\1***", _PASSWORD.sub(r"\1:***@", text)) if "://" in text else text


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
