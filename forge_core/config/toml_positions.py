"""On which line a TOML file says what. ``tomllib`` does not tell, and stays the only parser: this is a locator."""

from __future__ import annotations

import tomllib
from collections import defaultdict, deque
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
        self._remaining = deque([*tokens, ("", 0)])
        self._tables_in: defaultdict[KeyPath, int] = defaultdict(int)
        table: KeyPath = ()
        while token := self._peek_past_newlines():
            if token == "[":
                table = self._header()
            else:
                self._value(self._key(table, "="))

    def _header(self) -> KeyPath:
        _, line = self._remaining.popleft()
        is_of_array = self._peek() == "["
        if is_of_array:
            self._remaining.popleft()
        path = self._key((), "]")
        if is_of_array:
            self._remaining.popleft()
            self._tables_in[path] += 1
        path = self._inside(path)
        self.lines[path] = line
        return path

    def _key(self, table: KeyPath, end: str) -> KeyPath:
        """The way to a key, up to the token behind it."""
        path, behind = table, ""
        while behind != end:
            part, line = self._remaining.popleft()
            path = (*self._inside(path), _key_part(part))
            self.lines.setdefault(path, line)
            behind, _ = self._remaining.popleft()
        return path

    def _inside(self, path: KeyPath) -> KeyPath:
        """The last table of an array of tables; any other path is itself."""
        count = self._tables_in.get(path, 0)
        return (*path, count - 1) if count else path

    def _value(self, path: KeyPath) -> None:
        opening = self._peek()
        if opening not in ("[", "{"):
            while self._peek() not in ("\n", ",", "]", "}", ""):
                self._remaining.popleft()
            return
        self._remaining.popleft()
        index = 0
        while (token := self._peek_past_newlines()) not in ("]", "}"):
            if token == ",":
                self._remaining.popleft()
                index += 1
            elif opening == "{":
                self._value(self._key(path, "="))
            else:
                self.lines[*path, index] = self._remaining[0][1]
                self._value((*path, index))
        self._remaining.popleft()

    def _peek(self) -> str:
        return self._remaining[0][0]

    def _peek_past_newlines(self) -> str:
        while self._peek() == "\n":
            self._remaining.popleft()
        return self._peek()


def _key_part(token: str) -> str:
    """A bare key is itself; a quoted one is decoded as TOML does it."""
    return next(iter(tomllib.loads(f"{token} = 0"))) if token[0] in "\"'" else token
