"""Give the tree another version: every distribution, what they ask of each other, and the change log.

    python release/set_version.py 0.2.0 2027-01-31

All distributions have one version. Each takes the others within a minor version before 1.0, within a major one from
then on; ``forge-train`` takes exactly this one. What is under "Unreleased" in the change log becomes this version's.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (".", "plugins/*", "forge_*")
"""Whose ``pyproject.toml`` is that of a distribution of ours."""
WITH_RANGES = (
    "docs/**/*.md",
    "tests/outsider/*/pyproject.toml",
    "examples/*/pyproject.toml",
    *(f"{folder}/pyproject.toml" for folder in FOLDERS),
)
"""Files that ask for a range of versions of ours; pages show what an author has to write."""
CORE = "forge_core/__init__.py"
HEADING = "## [Unreleased]\n"


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", type=version, help="three numbers: 0.2.0")
    parser.add_argument("day", type=day, help="of the release: 2027-01-31")
    given = parser.parse_args(arguments)
    new = ".".join(map(str, given.version))
    (old,) = re.findall(r'^__version__ = "(.*)"$', (root / CORE).read_text(), re.M)
    if given.version < version(old):
        parser.error(f"{new} comes before {old}, which the tree has")
    if f"\n## [{new}]" in (root / "CHANGELOG.md").read_text(encoding="utf-8"):
        parser.error(f"the change log has {new} already")
    replace(root / CORE, f'"{old}"', f'"{new}"')
    for folder in FOLDERS:
        for file in root.glob(f"{folder}/pyproject.toml"):
            replace(file, f'\nversion = "{old}"\n', f'\nversion = "{new}"\n')
            replace(file, f'=={old}"', f'=={new}"')
    for pattern in WITH_RANGES:
        for file in root.glob(pattern):
            replace(file, compatible(version(old)), compatible(given.version))
    replace(root / "CHANGELOG.md", HEADING, f"{HEADING}\n## [{new}] - {given.day}\n")
    print(f"the tree was {old}, and is {new}")


def version(text: str) -> tuple[int, ...]:
    """The three numbers of a version."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", text):
        raise argparse.ArgumentTypeError(f"'{text}' is not three numbers with points between them, such as 0.2.0")
    return tuple(map(int, text.split(".")))


def day(text: str) -> date:
    """That of a release."""
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"'{text}' is not a day such as 2027-01-31") from error


def compatible(numbers: tuple[int, ...]) -> str:
    """The clauses that take what is compatible with a version."""
    major, minor, _ = numbers
    return f">=0.{minor},<0.{minor + 1}" if major == 0 else f">={major},<{major + 1}"


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    if old in text and old != new:
        file.write_text(text.replace(old, new), encoding="utf-8")


if __name__ == "__main__":
    main()
