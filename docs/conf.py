"""Sphinx configuration: ``sphinx-build -W --keep-going -q -b html docs docs/_build/html``."""

import sys
from pathlib import Path
from typing import Any

import forge_core

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from generate_reference import write_reference  # noqa: E402  # it lies beside this file

write_reference(HERE / "generated")

project = "Forge"
author = "the Forge developers"
version = release = forge_core.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "glossary_links"]
exclude_patterns = ["_build", "generated/smallest.md"]  # the second is a part of a page
source_suffix = {".md": "markdown"}

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "undoc-members": True}
napoleon_numpy_docstring = False
napoleon_use_rtype = False

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["versions.js", "version_switcher.js", "keyboard_scrolling.js"]
html_favicon = "_static/favicon.svg"  # without one, browsers ask for what is not there
html_title = f"Forge {release}"


def without_constructors_of_protocols(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str, str | None] | None:
    """A protocol is never constructed, and what Python makes up as its signature would only puzzle."""
    return ("", None) if what == "class" and getattr(obj, "_is_protocol", False) else None


class AttributesAsWritten:
    """Napoleon takes what stands before a colon in an attribute's docstring for its type: ``Scalar, fp32: the sum``.

    So the lines are put aside before it sees them, and back in their place afterwards.
    """

    def __init__(self) -> None:
        self._lines: list[str] = []

    def put_aside(self, app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
        """Called before Napoleon."""
        self._lines = list(lines)

    def put_back(self, app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
        """Called after it."""
        if what in ("attribute", "data"):
            lines[:] = self._lines


def with_levels_of_captions(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Sphinx calls the caption of a list of pages a heading of no level, which a screen reader cannot place."""
    for part in ("body", "furo_navigation_tree"):
        if part in context:
            context[part] = context[part].replace(' role="heading">', ' role="heading" aria-level="2">')


def setup(app: Any) -> None:
    """Called by Sphinx."""
    as_written = AttributesAsWritten()
    app.connect("autodoc-process-signature", without_constructors_of_protocols)
    app.connect("autodoc-process-docstring", as_written.put_aside, priority=400)  # Napoleon has 500
    app.connect("autodoc-process-docstring", as_written.put_back, priority=600)
    app.connect("html-page-context", with_levels_of_captions, priority=600)  # the theme makes its list at 500
