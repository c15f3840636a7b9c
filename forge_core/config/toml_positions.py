"""On which line a TOML file says what. ``tomllib`` does not tell, and stays the only parser: this is a locator."""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Sequence

from forge_core.config.problems import KeyPath
from forge_core.config.toml_text import Token


def key_lines(tokens: Sequence[Token]) -> dict[KeyPath, int]:
    """The line, from 1, of every table, key and array element.

    Args:
        tokens: of TOML that ``tomllib`` has accepted.
    """
    return _Scan(tokens).lines


class _Scan:
    def __init__(self, tokens: Sequence[Token]) -> None:
        self.lines: dict[KeyPath, int] = {}
        self._tokens = tokens
        self._next = 0
        self._tables_in: defaultdict[KeyPath, int] = defaultdict(int)
        self._statements()

    def _statements(self) -> None:
        table: KeyPath = ()
        while token := self._peek_past_newlines():
            if token == "[":
                table = self._header()
            else:
                self._value(self._key(table))

    def _header(self) -> KeyPath:
        line = self._tokens[self._next][1]
        brackets = 0
        while self._peek() == "[":
            self._take()
            brackets += 1
        path: KeyPath = ()
        while (token := self._take()) != "]":
            if token != ".":
                path = (*self._inside(path), _key_part(token))
                self.lines.setdefault(path, line)
        if brackets == 2:
            self._take()
            self._tables_in[path] += 1
        path = self._inside(path)
        self.lines[path] = line
        return path

    def _inside(self, path: KeyPath) -> KeyPath:
        """The last table of an array of tables; any other path is itself."""
        count = self._tables_in.get(path, 0)
        return (*path, count - 1) if count else path

    def _key(self, table: KeyPath) -> KeyPath:
        path = table
        while True:
            line = self._tokens[self._next][1]
            path = (*path, _key_part(self._take()))
            self.lines.setdefault(path, line)
            if self._take() == "=":
                return path

    def _value(self, path: KeyPath) -> None:
        if self._peek() == "[":
            self._array(path)
        elif self._peek() == "{":
            self._inline_table(path)
        else:
            while self._peek() not in ("\n", ",", "]", "}", ""):
                self._take()

    def _array(self, path: KeyPath) -> None:
        self._take()
        index = 0
        while (token := self._peek_past_newlines()) != "]":
            if token == ",":
                self._take()
                index += 1
            else:
                self.lines[*path, index] = self._tokens[self._next][1]
                self._value((*path, index))
        self._take()

    def _inline_table(self, path: KeyPath) -> None:
        self._take()
        while (token := self._peek_past_newlines()) != "}":
            if token == ",":
                self._take()
            else:
                self._value(self._key(path))
        self._take()

    def _peek(self) -> str:
        return self._tokens[self._next][0] if self._next < len(self._tokens) else ""

    def _peek_past_newlines(self) -> str:
        while self._peek() == "\n":
            self._take()
        return self._peek()

    def _take(self) -> str:
        token = self._peek()
        self._next += 1
        return token


def _key_part(token: str) -> str:
    """A bare key is itself; a quoted one is decoded as TOML does it."""
    return next(iter(tomllib.loads(f"{token} = 0"))) if token[0] in "\"'" else token
