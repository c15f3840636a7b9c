"""The core's sentences: a docstring begins with a verb or a noun, and some words are left out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

CORE = Path(__file__).resolve().parent.parent / "forge_core"
SOURCES = sorted(CORE.rglob("*.py"))
BEGINNINGS = re.compile(r"(What|Of|As|Whether|Whose|That)\b")
WORDS = re.compile(r"whatever|those that|told apart|nobody", re.IGNORECASE)


def test_a_docstring_begins_with_a_verb_or_a_noun():
    wrong = []
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            text = getattr(node.value, "value", None) if isinstance(node, ast.Expr) else None
            if isinstance(text, str) and BEGINNINGS.match(text.strip()):
                wrong.append(f"{file.relative_to(CORE)}:{node.lineno}: {text.strip().splitlines()[0]}")
    assert wrong == []


def test_some_words_are_left_out():
    wrong = [
        f"{file.relative_to(CORE)}:{number}: {line.strip()}"
        for file in SOURCES
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if WORDS.search(line)
    ]
    assert wrong == []
