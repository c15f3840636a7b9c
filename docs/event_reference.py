"""The events of ``events.jsonl``, from the calls that write them and the words of the page on running."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("forge_core", "plugins/*/src", "forge_plugins_*/src")
OUTCOMES = ("completed", "preempted", "stopped", "failed")
"""What ``forge_core/run/run.py`` calls the end of a start; it writes the one that it has come to."""


class Written(NamedTuple):
    """An event, as one call writes it."""

    name: str
    fields: tuple[str, ...]
    path: str


def written_events() -> list[Written]:
    """Every call of ``write_event`` in the source, with the names that its first argument can be."""
    found = []
    for pattern in SOURCES:
        for folder in sorted(ROOT.glob(pattern)):
            for path in sorted(folder.rglob("*.py")):
                if "write_event" in (text := path.read_text(encoding="utf-8")):
                    found += [*_events_of(ast.parse(text), path.relative_to(ROOT).as_posix())]
    return found


def _events_of(tree: ast.Module, path: str) -> Iterator[Written]:
    for node in ast.walk(tree):
        called = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and called.lstrip("_") == "write_event" and node.args:
            fields = tuple(one.arg for one in node.keywords if one.arg not in (None, "step"))
            for name in _names(node.args[0]):
                yield Written(name, tuple(field for field in fields if field), path)


def _names(argument: ast.expr) -> tuple[str, ...]:
    if isinstance(argument, ast.Constant):
        return (str(argument.value),)
    if isinstance(argument, ast.IfExp):
        return _names(argument.body) + _names(argument.orelse)
    return OUTCOMES  # a name: the test compares with what is assigned there


def event_reference() -> Iterator[str]:
    """The page."""
    described = described_events()
    writers: dict[str, set[str]] = {}
    for event in written_events():
        writers.setdefault(event.name, set()).add(event.path)
    yield "# Events"
    yield ""
    yield "Generated from the calls that write `events.jsonl` and the table on the page about"
    yield "[running](../running.md#events). Each line also has `time` (UTC) and `step`."
    yield ""
    yield "| event | when | further fields | written by |"
    yield "|---|---|---|---|"
    for name, paths in sorted(writers.items()):
        when, fields = described[name]
        yield f"| `{name}` | {_moved(when)} | {_moved(fields)} | {', '.join(f'`{path}`' for path in sorted(paths))} |"


def described_events() -> dict[str, tuple[str, str]]:
    """From the table of the page: of each event, when it is, and its fields."""
    page = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
    table = page.split("\n## Events\n")[1].split("\n## ")[0]
    return {name: (when, fields) for name, when, fields in re.findall(r"^\| `(\w+)` \| (.*?) \| (.*)\|$", table, re.M)}


def _moved(words: str) -> str:
    """Links of the page, from a folder below."""
    return re.sub(r"\]\((?!https?:)", "](../", words).replace("](../#", "](../running.md#").strip()
