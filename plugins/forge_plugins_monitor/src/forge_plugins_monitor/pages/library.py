"""Which pages there are, and where: in the wheel, or, where the package is installed editable, in the source tree."""

from __future__ import annotations

import bz2
import re
from collections.abc import Mapping
from pathlib import Path

import attrs

from forge_core.errors import ConfigError

PACKAGED = Path(__file__).parent / "text.bz2"
"""Made by ``hatch_build.py`` as the wheel is built."""
SOURCES = Path(__file__).parents[5] / "docs"
"""In a checkout."""


@attrs.frozen
class Page:
    """One page, or a section of one."""

    name: str
    """What one types: ``"running"``, ``"forge_routers"``."""
    title: str
    file: Path
    """Within the documentation: ``running.md``, ``hooks/forge_routers.md``."""
    text: str
    """Markdown, as Sphinx reads it (MyST)."""


def pages() -> Mapping[str, Page]:
    """All that are here, by name; those of hooks and how-to pages last.

    Raises:
        ConfigError: the package was installed in a way that has left them out.
    """
    texts = _packaged() if PACKAGED.is_file() else _in_checkout()
    if not texts:
        raise ConfigError(f"this installation has no pages: neither {PACKAGED} nor {SOURCES} is there")
    return {page.name: page for page in (_page(Path(file), text) for file, text in texts.items() if text)}


def elsewhere() -> list[str]:
    """The files of pages that wheels do not have, within the documentation."""
    return [file for file, text in _packaged().items() if not text] if PACKAGED.is_file() else []


def _packaged() -> dict[str, str]:
    """The text of each page by its file, as in a checkout; empty if it is not here."""
    parts = bz2.decompress(PACKAGED.read_bytes()).decode().split("\0")
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _in_checkout() -> dict[str, str]:
    files = [file for glob in ("*.md", "hooks/*.md", "how-to/*.md") for file in sorted(SOURCES.glob(glob))]
    pages = [file for file in files if file.stem != "index"]  # of the site
    return {file.relative_to(SOURCES).as_posix(): file.read_text(encoding="utf-8") for file in pages}


def sections(page: Page) -> Mapping[str, Page]:
    """The sections of a page, by their headings in the form of an anchor: ``"exit-codes"``."""
    found: dict[str, Page] = {}
    lines = _without_code(page.text)
    for index, line in enumerate(lines):
        heading = re.match(r"(##+) (.+)", line)
        if heading is None:
            continue
        title = heading[2].replace("`", "").strip()
        ends = (n for n in range(index + 1, len(lines)) if re.match(rf"#{{1,{len(heading[1])}}} ", lines[n]))
        text = "\n".join(page.text.splitlines()[index : next(ends, len(lines))])
        anchor = re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-")
        found.setdefault(anchor, Page(f"{page.name}#{anchor}", title, page.file, f"{text}\n"))
    return found


def _page(file: Path, text: str) -> Page:
    title = re.search(r"^# (.+)$", text, re.M)
    return Page(file.stem, title[1].replace("`", "") if title else file.stem, file, text)


def _without_code(text: str) -> list[str]:
    """The lines, with those of code empty: a comment of a shell looks like a heading."""
    lines: list[str] = []
    fence = ""
    for line in text.splitlines():
        mark = re.match(r"\s*(```+|:::+)", line)
        if mark and not fence:
            fence = mark[1]
        elif mark and fence and line.strip() == fence:
            fence = ""
        lines.append("" if fence or mark else line)
    return lines
