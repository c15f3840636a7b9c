"""A Sphinx extension: words of the glossary are links at their first use on a page.

Once a page, never in code, headings, links or what is generated from docstrings. Words that mean something else
elsewhere, such as to run, are taken for those of the glossary behind an article or the like alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx import addnodes

GLOSSARY = "glossary"
PLAIN = re.split(
    r",\s*",
    """auxiliary loss, callback, catalog, cluster environment, conformance kit, connector, entry point, executor,
    factory, fingerprint, global batch, grace time, image processor, launcher, lease, manifest, mesh, microbatch,
    mirror, observer, parameter role, pipeline stage, plugin, qualified name, rank 0, replica, requeue, retention,
    rollback, run directory, shard role, state transfer, step guard, step module, step timeout, supervisor, time limit,
    tracker, vision encoder, warm start, watchdog, world size""",
)
"""Terms that mean one thing wherever they stand, in the singular or the plural."""
BEHIND_AN_ARTICLE = [
    *("attempt", "axis", "checkpoint", "component", "contract", "hook", "job", "kind", "pass", "rank", "run", "slot"),
    "stream",
]
"""Terms that are also verbs, or common words."""
ARTICLES = r"\b(?:an?|the|each|every|this|another|one|no|all|any|several|many|two|its) "
ELSEWHERE = (
    *(nodes.literal, nodes.literal_block, nodes.title, nodes.reference, nodes.raw, nodes.math, nodes.rubric),
    *(addnodes.desc, addnodes.toctree, addnodes.compact_paragraph, addnodes.pending_xref),
)


def anchor(term: str) -> str:
    """The name of a term's place on the page of the glossary."""
    return f"term-{term.lower().replace(' ', '-')}"


def pattern(term: str) -> re.Pattern[str]:
    """What is taken for a use of the term, which is its group ``term``."""
    before = ARTICLES if term in BEHIND_AN_ARTICLE else r"(?<![\w-])"
    return re.compile(rf"{before}(?P<term>{re.escape(term)}(?:es|s)?)(?![\w-])", re.I)


PATTERNS = {term: pattern(term) for term in (*PLAIN, *BEHIND_AN_ARTICLE)}


def link_terms(app: Any, doctree: nodes.document, docname: str) -> None:
    """Called by Sphinx for each page before it is written."""
    if docname == GLOSSARY:
        for strong in doctree.findall(nodes.strong):
            strong["ids"].append(anchor(strong.astext()))
        return
    if docname.startswith("generated/"):
        return
    address = app.builder.get_relative_uri(docname, GLOSSARY)
    missing = dict(PATTERNS)
    for text in [*doctree.findall(nodes.Text)]:
        if not _is_elsewhere(text) and (parts := [*_linked(text.astext(), missing, address)]) and len(parts) > 1:
            text.parent.replace(text, parts)


def _is_elsewhere(node: nodes.Node) -> bool:
    return isinstance(node, ELSEWHERE) or (node.parent is not None and _is_elsewhere(node.parent))


def _linked(text: str, missing: dict[str, re.Pattern[str]], address: str) -> Iterator[nodes.Node]:
    """The text in parts, with a link for each term in it that is still missing. Of two terms, the longer one counts."""
    found = {term: match for term, one in missing.items() if (match := one.search(text))}
    place = 0
    for term in sorted(found, key=lambda one: (found[one].start("term"), -len(one))):
        start, end = found[term].span("term")
        if start < place:
            continue
        del missing[term]
        yield nodes.Text(text[place:start])
        link = nodes.reference("", text[start:end], refuri=f"{address}#{anchor(term)}", internal=True)
        link["classes"].append("glossary-term")
        yield link
        place = end
    yield nodes.Text(text[place:])


def setup(app: Any) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("doctree-resolved", link_terms)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
