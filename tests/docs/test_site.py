"""The site as a whole: its index for machines, and what is checked of it once it is built."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from doc_pages import DOCS, ROOT


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A script of the docs, as a module."""
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module


def test_the_index_for_machines_is_that_of_the_pages(module):
    text = (ROOT / "llms.txt").read_text(encoding="utf-8")

    assert text == module("write_llms").llms_text(), "python docs/write_llms.py writes it"


def test_the_index_for_machines_has_every_page_with_a_sentence():
    text = (ROOT / "llms.txt").read_text(encoding="utf-8")
    listed = dict(re.findall(r"\]\((\S+)\): (.*)$", text, re.M))

    written = {path for path in DOCS.rglob("*.md") if not {"_build", "generated"} & set(path.parts)}
    assert {path.relative_to(ROOT).as_posix() for path in written} - set(listed) == {"docs/index.md"}
    assert [name for name, sentence in listed.items() if len(sentence) < 20] == []


def test_every_page_is_in_a_list_of_pages():
    """Sphinx says the same, but only when the site is built."""
    named = set()
    for index in DOCS.rglob("*.md"):
        for block in re.findall(r"^```\{toctree\}\n(.*?)^```$", index.read_text(encoding="utf-8"), re.M | re.S):
            named |= {(index.parent / f"{name}.md").resolve() for name in block.partition("\n\n")[2].split()}
    pages = {path.resolve() for path in DOCS.rglob("*.md") if not {"_build", "generated"} & set(path.parts)}

    assert pages - named == {(DOCS / "index.md").resolve()}


def write(site: Path, name: str, text: str) -> None:
    (site / name).parent.mkdir(parents=True, exist_ok=True)
    (site / name).write_text(text)


def test_a_site_is_checked_for_size_and_links(module, tmp_path):
    write(tmp_path, "index.html", '<h1 id="top">a</h1><a href="b/page.html#place">b</a><a href="https://x.org/y">x</a>')
    write(tmp_path, "b/page.html", '<p id="place"></p><a href="../index.html">a</a><a href="#place">c</a>')
    check = module("check_site")
    assert [*check.problems(tmp_path)] == []

    write(tmp_path, "b/page.html", '<a href="../index.html#gone">a</a><img src="no.png">' + " " * check.MAX_BYTES)

    assert [*check.problems(tmp_path)] == [
        "b/page.html has 300,052 bytes, more than 300,000",
        "b/page.html links to ../index.html#gone, and there is no such place on that page",
        "b/page.html links to no.png, which is not there",
        "index.html links to b/page.html#place, and there is no such place on that page",
    ]


def test_the_docs_are_checked_whenever_they_are_built():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "docs/check_site.py docs/_build/html" in makefile.split("\ndocs:")[1].split("\n\n")[0]


UNITS = "once tokens bytes bits FLOPs requests frames latents microbatches nats GiB MiB KB MB seconds samples ranks"
THINGS = (
    "token step rank node layer second parameter GPU row sample byte feature kind page task line file microbatch host"
)
A_FOR_PER = re.compile(
    rf"(?<![Ww]hich )(?<!the )\b(?:{'|'.join(UNITS.split())}) a (?:{'|'.join(THINGS.split())})\b(?! (?:is|has)\b)"
)


def test_pages_say_per_and_not_a():
    """Outside of blocks, which show what commands print."""
    pages = [*DOCS.glob("*.md"), *DOCS.glob("how-to/*.md"), *DOCS.glob("coming-from/*.md"), *ROOT.glob("skills/*/*.md")]
    found = []
    for page in (path for path in pages if not path.name.startswith("write-")):
        prose = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        found += [f"{page.name}: {match[0]}" for match in A_FOR_PER.finditer(prose)]
    assert found == []
    assert A_FOR_PER.search("4 bytes a parameter")
    assert not A_FOR_PER.search("at a time a rank is lost")
