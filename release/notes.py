"""The notes of a release, from the change log: what an announcement or a release page takes as it is.

    python release/notes.py [VERSION] > notes.md

Without a version, what is not released yet. Lines are unwrapped, since such pages break lines where the text does.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECTIONS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
"""Those of Keep a Changelog."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", nargs="?", default="Unreleased")
    print(notes(parser.parse_args(arguments).version, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")), end="")


def notes(version: str, changelog: str) -> str:
    """The part of the change log about a version.

    Raises:
        SystemExit: it has none, or a section that Keep a Changelog does not know.
    """
    parts = re.split(r"^## \[(.+?)\](?: - (.+))?\n", changelog, flags=re.M)[1:]
    known = {name: (day, text) for name, day, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True)}
    if version not in known:
        raise SystemExit(f"the change log has nothing about '{version}', but about {', '.join(known)}")
    day, text = known[version]
    if unknown := set(re.findall(r"^### (.+)$", text, re.M)) - set(SECTIONS):
        raise SystemExit(f"[{version}] has the section '{min(unknown)}'; sections are {', '.join(SECTIONS)}")
    title = f"# Forge {version} ({day})" if day else f"# Forge, {version.lower()}"
    return f"{title}\n\n{re.sub(CONTINUED, ' ', text.strip())}\n"


CONTINUED = re.compile(r"(?<=\S)\n +(?!- )(?=\S)")
"""The break before a line that goes on with the entry above it."""

if __name__ == "__main__":
    main()
