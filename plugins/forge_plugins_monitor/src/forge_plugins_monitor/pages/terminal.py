"""A page as a terminal can show it: without what only Sphinx understands."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator

from forge_plugins_monitor.pages.library import Page

_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])+)\]\((?!https?:)([^)\s]*)\)", re.S)


def markdown(page: Page) -> str:
    """Plain Markdown: captions stand above their code, links to other pages are their words, and what is generated
    from code is the name of that code."""
    text = re.sub(r"^```\{toctree\}.*?^```\n?", "", page.text, flags=re.S | re.M)
    text = re.sub(r"^```\{eval-rst\}\n(.*?)^```\n?", lambda found: _generated(found[1]), text, flags=re.S | re.M)
    text = re.sub(
        r"^```\{code-block\} (\w+)\n(?::caption: (.+)\n)?",
        lambda found: (f"`{found[2]}`:\n\n" if found[2] else "") + f"```{found[1]}\n",
        text,
        flags=re.M,
    )
    text = re.sub(r"^```\{[\w-]+\}.*$", "```", text, flags=re.M)
    return _LINK.sub(r"\1", text)


def see_also(page: Page, known: Container[str]) -> list[str]:
    """The names of the ``known`` pages that it links to, in their order; of a section, its own page first."""
    linked = (re.search(r"([\w-]+)\.md", target) for _, target in _LINK.findall(page.text))
    names = dict.fromkeys([page.file.stem, *(found[1] for found in linked if found)])
    return [name for name in names if name != page.name and name in known]


def _generated(text: str) -> str:
    return "".join(f"- `{name}`\n" for name in _names(text))


def _names(text: str) -> Iterator[str]:
    for found in re.finditer(r"^\.\. auto\w+:: (\S+)$", text, re.M):
        yield found[1]
