"""``forge docs``: pages of the documentation in the terminal, from a checkout and from a wheel."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from forge_core.cli import main
from forge_plugins_monitor.pages import command, library
from forge_plugins_monitor.pages.library import pages, sections
from forge_plugins_monitor.pages.terminal import markdown, see_also

PACKAGE = Path(__file__).parents[1]
DOCS = PACKAGE.parents[1] / "docs"
GLOBS = ("*.md", "hooks/*.md", "how-to/*.md")
FILES = sorted(path.relative_to(DOCS).as_posix() for glob in GLOBS for path in DOCS.glob(glob) if path.stem != "index")


def test_pages_hooks_and_kinds_are_listed(capsys):
    assert main(["docs"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["running", "Running"] in rows
    assert ["forge_routers", "router", "Routers"] in rows
    assert ["report-a-bug", "Report", "a", "bug"] in rows

    assert main(["docs", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {"name": "running", "title": "Running"} in listed
    assert len(listed) == len(FILES)


@pytest.mark.parametrize("name", ["forge_routers", "router", "hooks/forge_routers.md"])
def test_a_hook_is_found_by_its_name_and_that_of_its_kind(name, capsys):
    assert main(["docs", name]) == 0
    assert capsys.readouterr().out.startswith("# Routers\n\n## `forge_routers() -> Iterable[Component]`\n")


@pytest.mark.parametrize("name", ["exit-codes", "Exit codes", "running#exit-codes", "running.md#exit-codes"])
def test_a_section_is_found_by_its_heading(name, capsys):
    assert main(["docs", name]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("## Exit codes\n")
    assert "| 5 | lost another rank |" in shown
    assert "\n## " not in shown
    assert "See also: `forge docs running`" in shown


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("rooter", "there is no page 'rooter'; did you mean 'router'?"),
        ("muon", "there is no page 'muon'; it names a component: forge plugins show optimizer muon"),
        ("xyzzy", "there is no page 'xyzzy'; forge docs lists them"),
        ("running#nothing", "there is no page 'running#nothing'; did you mean 'running'?"),
    ],
)
def test_a_name_without_a_page_is_refused_with_what_may_be_meant(name, sentence, capsys):
    assert main(["docs", name]) == 2
    assert capsys.readouterr().err == f"error: {sentence}\n"


@pytest.mark.parametrize("page", pages().values(), ids=lambda page: page.name)
def test_no_page_shows_what_only_sphinx_understands(page):
    text = markdown(page)

    assert not re.search(r"^```\{|^:caption:|^\.\. auto|toctree", text, re.M)
    assert not re.search(r"\]\((?!https?:)[^)`]*\.md", text)
    assert text.count("```") % 2 == 0
    assert set(see_also(page, pages())) <= {*pages()} - {page.name}


def test_captions_and_contracts_stay(capsys):
    text = markdown(pages()["forge_routers"])

    assert re.search(r"^`[\w/]+\.py`:\n\n```python\n", text, re.M)
    assert "- `forge_core.contracts.router." in text


def test_a_comment_of_code_is_no_heading():
    page = library.Page("x", "X", Path("x.md"), "# X\n\n## One\n\n```sh\n## not one\n```\n\n### Inner\n\n## Two\n")

    assert [*sections(page)] == ["one", "inner", "two"]
    assert "not one" in sections(page)["one"].text
    assert "Inner" in sections(page)["one"].text


def test_a_browser_is_opened_where_html_was_built(tmp_path, capsys, monkeypatch):
    opened = []
    monkeypatch.setattr(command.webbrowser, "open", opened.append)
    monkeypatch.setattr(command, "SOURCES", tmp_path)
    assert main(["docs", "router", "--browser"]) == 2
    assert f"no HTML was built in {tmp_path / '_build/html'}; make docs" in capsys.readouterr().err

    (tmp_path / "_build/html/hooks").mkdir(parents=True)
    for name in ("index.html", "running.html", "hooks/forge_routers.html"):
        (tmp_path / "_build/html" / name).touch()
    for words in (["router"], ["exit-codes"], []):
        assert main(["docs", *words, "--browser"]) == 0
    base = (tmp_path / "_build/html").as_uri()
    assert opened == [f"{base}/hooks/forge_routers.html", f"{base}/running.html#exit-codes", f"{base}/index.html"]


@pytest.fixture
def in_wheels(tmp_path, monkeypatch):
    """``forge docs`` as from a wheel; returns the files of the pages that it has."""
    spec = importlib.util.spec_from_file_location("hatch_build", PACKAGE / "hatch_build.py")
    hatch_build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hatch_build)
    packaged = tmp_path / "text.bz2"
    packaged.write_bytes(hatch_build.archive({name: DOCS / name for name in FILES}))
    monkeypatch.setattr(library, "PACKAGED", packaged)
    return hatch_build.IN_WHEELS


def test_wheels_have_some_pages_and_say_that_others_are_on_the_site(in_wheels, capsys):
    assert {*in_wheels} < {*FILES}
    assert {page.file.as_posix() for page in pages().values()} == {*in_wheels}
    for name in {*FILES} - {*in_wheels}:
        assert main(["docs", name.removesuffix(".md")]) == 2
        assert capsys.readouterr().err.endswith(
            f"is not in the wheels, but on the site, and in a checkout: docs/{name}\n"
        )
    for name in ("scale#x", "tokenizer"):
        assert main(["docs", name]) == 2
        assert f"the page '{name}' is not in the wheels" in capsys.readouterr().err


def test_an_installation_without_pages_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(library, "PACKAGED", tmp_path / "a")
    monkeypatch.setattr(library, "SOURCES", tmp_path / "b")

    assert main(["docs"]) == 2
    assert "this installation has no pages" in capsys.readouterr().err


def test_wheels_of_a_source_distribution_have_the_same_pages(tmp_path, monkeypatch):
    in_checkout = pages()
    monkeypatch.setattr(library, "SOURCES", tmp_path / "nowhere")
    source = build("build_sdist", PACKAGE, tmp_path)
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = (path for path in tmp_path.iterdir() if path.is_dir())

    for folder in (PACKAGE, unpacked):
        with zipfile.ZipFile(build("build_wheel", folder, tmp_path / "wheels")) as wheel:
            packaged = wheel.extract("forge_plugins_monitor/pages/text.bz2", tmp_path / folder.name)
            assert "forge_plugins_monitor/plugin.py" in wheel.namelist()
        monkeypatch.setattr(library, "PACKAGED", Path(packaged))
        assert pages().items() <= in_checkout.items()
        assert len(pages()) + len(library.elsewhere()) == len(FILES)
    assert [path.suffix for path in (tmp_path / "wheels").iterdir()] == [".whl"]


def build(what: str, folder: Path, out: Path) -> Path:
    program = f"from hatchling.build import {what}; print({what}({str(out)!r}))"
    out.mkdir(exist_ok=True)
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=True)
    return out / done.stdout.split()[-1]
