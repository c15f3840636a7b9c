"""Names and patterns of sites, as they are typed."""

from __future__ import annotations

import fnmatch


def listed(text: str) -> list[str]:
    """The parts of a text with commas between them."""
    return [part.strip() for part in text.split(",") if part.strip()]


def matches(name: str, pattern: str) -> bool:
    """Return whether a pattern means the site; ``*`` stands for one part of the name, or for some of its letters."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))
