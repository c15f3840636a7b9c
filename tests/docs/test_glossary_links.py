"""Words of the glossary are links where a page first uses them."""

from __future__ import annotations

import re
import sys

import pytest

from doc_pages import DOCS

sys.path.insert(0, str(DOCS))

import glossary_links  # it lies beside the pages

pytestmark = pytest.mark.filterwarnings("ignore:.*Check CHANGES for Sphinx API")  # of MyST

PAGE = """\
# A mesh in a heading

`mesh` in code, then a mesh, and the mesh again. Meshes too.

```
a microbatch in a block
```

[a lease](page.md) in a link, the lease outside. Pipelines run; a run ends. Ranks pass on what a pass is: the pass.
Adapters of rank 16, and each rank. A grace time. The step
timeout is there, and a step timeout again; its run directory.

The mesh in another paragraph, and a run.
"""


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A site of a page and the glossary, built."""
    from sphinx.application import Sphinx

    folder = tmp_path_factory.mktemp("site")
    (folder / "conf.py").write_text(
        f"import sys\nsys.path.insert(0, {str(DOCS)!r})\nextensions = ['myst_parser', 'glossary_links']\n"
    )
    (folder / "index.md").write_text("# Home\n\n```{toctree}\nglossary\npage\n```\n")
    (folder / "page.md").write_text(PAGE)
    (folder / "glossary.md").write_text((DOCS / "glossary.md").read_text(encoding="utf-8"))
    app = Sphinx(folder, folder, folder / "out", folder / "trees", "html", status=None, warning=None)
    app.build()
    return {name: (folder / "out" / f"{name}.html").read_text(encoding="utf-8") for name in ("page", "glossary")}


def links(page: str) -> list[tuple[str, str]]:
    found = re.findall(r'<a class="glossary-term[^"]*" href="glossary.html#term-([\w-]+)">([^<]+)</a>', page)
    return sorted((term, " ".join(text.split())) for term, text in found)


def test_the_first_use_of_a_term_is_a_link_and_no_other(html):
    assert links(html["page"]) == [
        ("grace-time", "grace time"),
        ("lease", "lease"),
        ("mesh", "mesh"),
        ("pass", "pass"),
        ("rank", "rank"),
        ("run", "run"),
        ("run-directory", "run directory"),
        ("step-timeout", "step timeout"),
    ]
    assert "then a <a" in html["page"]
    assert "each <a" in html["page"]


def test_every_linked_term_has_its_row(html):
    for term in glossary_links.PATTERNS:
        assert f'id="{glossary_links.anchor(term)}"' in html["glossary"], term


def test_the_words_that_newcomers_ask_for_are_linked():
    asked = {"pass", "mesh", "kind", "job", "run", "microbatch", "lease", "grace time", "rank", "pipeline stage"}
    assert asked <= set(glossary_links.PATTERNS)
