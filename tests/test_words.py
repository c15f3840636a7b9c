"""Sentences: a docstring of the core begins with a verb or a noun, and some words are left out everywhere."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "forge_core"
SOURCES = sorted(CORE.rglob("*.py"))
PACKAGES = [*ROOT.glob("forge_*/src"), *ROOT.glob("plugins/*/src"), ROOT / "forge_train"]
PAGES = ["README.md", "CONTRIBUTING.md", "docs/**/*.md", "skills/**/*.md", "forge_*/README.md", "plugins/*/README.md"]
READ = [
    *SOURCES,
    *(file for one in PACKAGES for file in one.rglob("*.py")),
    *(p for one in PAGES for p in ROOT.glob(one)),
]
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
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in sorted(READ)
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if WORDS.search(line) and not {"generated", "_build"} & {*file.parts}
    ]
    assert wrong == []
