"""Write conversations about Python's standard library, made of its docstrings: ``python docstring_chats.py CHATS``.

With a second file, ``python docstring_chats.py CHATS QUESTIONS``, every twentieth conversation becomes a question with
four answers to choose from, for the task in ``tasks/``, and is not among the conversations.
"""

from __future__ import annotations

import ast
import json
import random
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

_LONGEST = 160
"""Characters of an answer."""
_HELD_OUT = 20
"""One conversation in so many becomes a question."""


def main(chats_file: Path, questions_file: Path | None = None) -> None:
    """Write a conversation a line, and a question a line."""
    every = list(chats(Path(sysconfig.get_path("stdlib"))))
    held_out = every[::_HELD_OUT] if questions_file else []
    kept = [messages for messages in every if messages not in held_out]
    write_lines(chats_file, [{"messages": messages} for messages in kept], "conversations")
    if questions_file:
        write_lines(questions_file, list(questions(held_out)), "questions")


def write_lines(path: Path, lines: Sequence[object], noun: str) -> None:
    """Write JSON Lines."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    print(f"{path}: {len(lines):,} {noun}")


def chats(library: Path) -> Iterator[list[dict[str, str]]]:
    """A question about each function and class that has a docstring, in the order of the files' names."""
    for path in sorted(library.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            answer = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
            if answer and len(answer) <= _LONGEST:
                yield [
                    {"role": "user", "content": f"What is {path.stem}.{node.name}?"},
                    {"role": "assistant", "content": answer},
                ]


def questions(held_out: Sequence[list[dict[str, str]]]) -> Iterator[dict[str, object]]:
    """Each question with its answer among three that have the same words in another order."""
    for number, (question, answer) in enumerate(held_out):
        words, draw = answer["content"].split(), random.Random(number)
        if len(words) < 4:
            continue  # other orders may be as good
        choices = [" ".join(draw.sample(words, len(words))) for _ in range(3)]
        choices.insert(number % 4, answer["content"])
        yield {"question": question["content"], "choices": choices, "answer": number % 4}


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
