"""Writes ``llms.txt``: an index of the pages for machines (llmstxt.org), each with its first sentence.

``python docs/write_llms.py`` writes it; a test says when it is no longer that of the pages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def llms_text() -> str:
    """The whole file."""
    lines = ["# Forge", "", f"> {_first_sentence(DOCS / 'index.md')}", ""]
    lines += ["Paths are those of the repository. Assistants begin with [AGENTS.md](AGENTS.md).", ""]
    for caption, pages in _sections(DOCS / "index.md"):
        rows = [*_rows(pages)]
        if rows:
            lines += [f"## {caption}", "", *rows, ""]
    skills = sorted(ROOT.glob("skills/*/SKILL.md"))
    lines += ["## Skills", "", *(f"- [{path.parent.name}]({_path(path)}): {_description(path)}" for path in skills)]
    return "\n".join(lines) + "\n"


def _sections(index: Path) -> Iterator[tuple[str, list[Path]]]:
    """The captions of the lists of pages, and the pages."""
    for options, names in _lists(index):
        caption = re.search(r":caption: (.+)", options)
        yield caption[1] if caption else "", [index.parent / f"{name}.md" for name in names]


def _lists(index: Path) -> Iterator[tuple[str, list[str]]]:
    for block in re.findall(r"^```\{toctree\}\n(.*?)^```$", index.read_text(encoding="utf-8"), re.M | re.S):
        options, _, names = block.partition("\n\n")
        yield options, names.split()


def _rows(pages: list[Path]) -> Iterator[str]:
    for page in pages:
        if page.parent.name == "generated":  # there once the site is built
            continue
        title = re.search(r"^# (.+)$", page.read_text(encoding="utf-8"), re.M)
        assert title is not None, f"{page} has no title"
        yield f"- [{title[1].strip('`')}]({_path(page)}): {_first_sentence(page)}"
        if page.stem == "index":
            for _, names in _lists(page):
                yield from _rows([page.parent / f"{name}.md" for name in names])


def _first_sentence(page: Path) -> str:
    """Of the first paragraph of prose, without marks."""
    for paragraph in re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S).split("\n\n"):
        words = " ".join(paragraph.split())
        if words and (words[0].isalpha() or words.startswith("`forge ")):
            words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", words).replace("*", "")
            return re.split(r"(?<=[.?])\s", words)[0].rstrip(":")
    return ""


def _description(skill: Path) -> str:
    match = re.search(r"^description: (.+)$", skill.read_text(encoding="utf-8"), re.M)
    assert match is not None, f"{skill} has no description"
    return match[1]


def _path(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


if __name__ == "__main__":
    (ROOT / "llms.txt").write_text(llms_text(), encoding="utf-8")
