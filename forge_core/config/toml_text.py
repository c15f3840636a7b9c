"""TOML that a stranger may have written: parsed within bounds, beyond which ``tomllib`` takes minutes or all stack."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from typing import Any

MAX_BYTES = 2**20
MAX_DEPTH = 64
MAX_TOKENS = 200_000
"""Names, values and signs."""

Token = tuple[str, int]
"""A token, and its line, from 1."""

_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?(?:"{3,5}|\Z)'  # strings of several lines; up to two quotes may stand before the closing three
    r"|'''.*?(?:'{3,5}|\Z)"
    r'|"(?:\\.|[^"\\\n])*+"?'  # one that does not end is taken whole, too, or each of its quotes would be tried
    r"|'[^'\n]*+'?"
    r"|\#[^\n]*"
    r"|[\[\]{}=,.\n]"
    r"|[^\s\[\]{}=,.\"'#]+",
    re.DOTALL,
)


def parse_toml(text: str) -> dict[str, Any]:
    """The table that ``text`` is.

    Raises:
        ValueError: it is no TOML, or goes beyond the bounds; ``(at line …)`` is at the message's end, if it is known.
    """
    if len(text) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES // 2**20} MiB, the most that is read")
    refuse_depth(toml_tokens(text))
    return tomllib.loads(text)


def toml_tokens(text: str) -> list[Token]:
    """The part of ``text`` that a locator needs, comments left out. It may be no TOML: then they mean nothing.

    Raises:
        ValueError: there are too many.
    """
    tokens: list[Token] = []
    line, end = 1, 0
    for match in _TOKEN.finditer(text):
        line += text.count("\n", end, match.start())
        end = match.start()
        if not match[0].startswith("#"):
            tokens.append((match[0], line))
            if len(tokens) > MAX_TOKENS:
                raise ValueError(f"It has more than {MAX_TOKENS:,} names, values and signs (at line {line}, column 1)")
    return tokens


def refuse_depth(tokens: Iterable[Token]) -> None:
    """Raises:
    ValueError: arrays, tables or the parts of a key go deeper than ``MAX_DEPTH``.
    """
    brackets = parts = 0
    for token, line in tokens:
        if token in ("[", "{"):
            brackets += 1
        elif token in ("]", "}"):
            brackets -= 1
        elif token == ".":
            parts += 1
        if token in ("\n", "=", ","):
            parts = 0
        if brackets + parts > MAX_DEPTH:
            raise ValueError(f"It is nested more than {MAX_DEPTH} deep (at line {line}, column 1)")
