"""``forge generate --chat`` and ``--interactive``: line by line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence

from forge_core.config.describe import printable
from forge_core.errors import ConfigError


def converse(answer: Callable[[str], Iterator[str]], texts: Sequence[str]) -> None:
    """Print an answer, which comes in parts, to each of ``texts``, or, without any, to each line of the standard input.

    Raises:
        ConfigError: a text cannot be answered; where somebody types, they are told so, and may go on.
    """
    is_typed = not texts and sys.stdin.isatty()
    for text in texts or (_typed() if is_typed else _lines()):
        try:
            _print(answer(text))
        except ConfigError as error:
            if not is_typed:
                raise
            print(printable(str(error)), file=sys.stderr)


def _print(answer: Iterator[str]) -> None:
    is_terminal = sys.stdout.isatty()
    for part in answer:
        # a model may have learned to steer a terminal
        print(printable(part) if is_terminal else part, end="", flush=True)
    print(flush=True)


def _typed() -> Iterator[str]:
    """Lines that are typed, with their editing, until the end of input."""
    import readline  # noqa: F401  # by which input() edits lines

    while True:
        try:
            text = input("> ")
        except EOFError:
            print()
            return
        if text.strip():
            yield text


def _lines() -> Iterator[str]:
    """Lines of a pipe or file, without empty ones.

    Raises:
        ConfigError: they are not UTF-8.
    """
    try:
        for line in sys.stdin:
            if text := line.rstrip("\r\n"):
                yield text
    except UnicodeDecodeError as error:
        raise ConfigError(f"the standard input is not UTF-8: {error}") from error
