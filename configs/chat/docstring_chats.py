"""Write conversations about Python's standard library, made of its docstrings: ``python docstring_chats.py OUT``."""

from __future__ import annotations

import ast
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_LONGEST = 160
"""Characters of an answer."""


def main(out: Path) -> None:
    """Write a conversation a line."""
    n_chats = 0
    with out.open("w", encoding="utf-8") as file:
        for messages in chats(Path(sysconfig.get_path("stdlib"))):
            file.write(json.dumps({"messages": messages}) + "\n")
            n_chats += 1
    print(f"{out}: {n_chats:,} conversations")


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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
