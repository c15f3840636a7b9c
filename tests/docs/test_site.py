"""The site as a whole: its index for machines, and what is checked of it once it is built."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
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
    write(tmp_path, "c.html", '<p role="heading">c</p><p role="heading" aria-level="2">d</p>')

    assert [*check.problems(tmp_path)] == [
        "b/page.html has 300,052 bytes, more than 300,000",
        "b/page.html links to ../index.html#gone, and there is no such place on that page",
        "b/page.html links to no.png, which is not there",
        "c.html has 1 headings without aria-level, which screen readers cannot place",
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


@pytest.fixture
def repository(tmp_path):
    """Two tags of a project whose ``make docs`` copies pages, and counts how often it is asked."""
    folder = tmp_path / "project"
    write(
        folder,
        "Makefile",
        f"docs:\n\tmkdir -p docs/_build && cp -r pages docs/_build/html && echo x >> {tmp_path}/builds\n",
    )
    git = ["git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "-q", folder], check=True)
    for tag, page in (("v0.9.0", "old.html"), ("v0.10.0", "new.html")):
        for name in ("index.html", page):
            write(folder, f"pages/{name}", f"{tag} {name}")
        write(folder, "pages/_static/versions.js", "window.siteVersions = null;")
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-qm", tag], check=True)
        subprocess.run([*git, "tag", tag], check=True)
    return folder


def test_a_site_of_several_versions_is_built_tag_by_tag(module, repository, tmp_path, capfd):
    versions, site = module("versions"), tmp_path / "site"

    assert versions.main([str(site), "v0.9.0"], repository) == 0
    assert versions.main([str(site), "v0.9.0", "v0.10.0"], repository) == 0

    assert (tmp_path / "builds").read_text().count("x") == 2  # what was there is not built again
    assert "url=v0.10.0/index.html" in (site / "index.html").read_text()
    for version in ("v0.9.0", "v0.10.0"):
        assert (site / version / "index.html").read_text() == f"{version} index.html"
        script = (site / version / "_static/versions.js").read_text()
        assert json.loads(script.removeprefix("window.siteVersions = ").rstrip(";\n")) == {
            "current": version,
            "pages": {"v0.10.0": ["index.html", "new.html", "old.html"], "v0.9.0": ["index.html", "old.html"]},
        }
    assert "v0.10.0, v0.9.0" in capfd.readouterr().out
    assert (
        "files"
        not in subprocess.run(["git", "-C", repository, "worktree", "list"], capture_output=True, text=True).stdout
    )


def test_a_version_that_git_does_not_have_is_refused(module, repository, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        module("versions").main([str(tmp_path / "site"), "v0.8.0"], repository)

    assert ended.value.code == 2
    assert "v0.8.0: git has no such tag; it has v0.10.0, v0.9.0" in capsys.readouterr().err
    assert not (tmp_path / "site").exists()
