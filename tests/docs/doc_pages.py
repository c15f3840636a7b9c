"""What tests read of a page: its commands with their outputs, and its files."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def commands(page: str) -> list[tuple[str, list[str]]]:
    """Each command of the blocks of a page, by its path in the repository, and the lines that the page shows as its
    output."""
    found: list[tuple[str, list[str]]] = []
    text = (ROOT / page).read_text(encoding="utf-8")
    for language, block in re.findall(r"^```(.*)\n((?s:.*?))^```$", text, re.M):
        if language not in ("", "console"):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                found.append((line[2:].strip(), []))
            elif not language and re.match(r"(make|forge|pip|python3?) ", line):
                found.append((line.strip(), []))
            elif language and found:
                found[-1][1].append(line)
    return found


def files(page: str) -> dict[str, str]:
    """The texts of the blocks of a page that have a caption, by that."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return dict(re.findall(r"^```\{code-block\} \w+\n:caption: (\S+)\n(.*?)^```$", text, re.M | re.S))


def not_said(shown: list[str], said: str) -> list[str]:
    """The lines of ``shown`` that ``said`` does not have, each behind the one before it.

    ``…`` stands for anything, a line of it for any lines. Numbers with a decimal point stand for any number, runs of
    spaces for one.
    """
    lines, missing, place = [" ".join(line.split()) for line in said.splitlines()], [], 0
    for line in shown:
        pattern = _pattern(" ".join(line.split()))
        at = next((number for number in range(place, len(lines)) if re.fullmatch(pattern, lines[number])), None)
        if line.strip(" …") and at is None:
            missing.append(line)
        elif line.strip(" …") and at is not None:
            place = at + 1
    return missing


def _pattern(line: str) -> str:
    parts = re.split(r"(\s?…\s?|\d[\d,]*\.\d+(?:e[-+]?\d+)?)", line)
    return "".join(
        ".*" if "…" in part else r"\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?" if number % 2 else re.escape(part)
        for number, part in enumerate(parts)
    )
