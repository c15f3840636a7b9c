"""What tests read of a page: its commands with their outputs, and its files."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import fork_server
from forge_core.registry.hookspecs import ForgeSpecs

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [
    *(path for path in sorted(DOCS.rglob("*.md")) if not {"_build", "generated"} & set(path.parts)),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *(ROOT / name / "README.md" for name in ("forge_testing", "forge_train")),
    *sorted(ROOT.glob("plugins/*/README.md")),
    *sorted(ROOT.glob("forge_plugins_*/README.md")),
]
HOOKS = [name for name in vars(ForgeSpecs) if name.startswith("forge_")]
HOOKS_OF_PACKAGES = [
    *("forge_report_sections", "forge_representation_metrics", "forge_run_columns"),
    *("forge_activations", "forge_dispatchers", "forge_norms", "forge_sequence_mixers", "forge_weight_layouts"),
    *("forge_connectors", "forge_fusions", "forge_image_processors", "forge_vision_encoders"),
]
"""Of kinds that packages of ours add, those that have a page."""
HOOK_PAGES = [DOCS / "hooks" / f"{hook}.md" for hook in (*HOOKS, *HOOKS_OF_PACKAGES)]


def commands(page: str) -> list[tuple[str, list[str]]]:
    """Each command of the blocks of a page, by its path in the repository, and the lines that the page shows as its
    output."""
    found: list[tuple[str, list[str]]] = []
    text = (ROOT / page).read_text(encoding="utf-8")
    for _, language, block in re.findall(r"^( *)```(.*)\n((?s:.*?))^\1```$", text, re.M):
        if language not in ("", "console"):
            continue
        for line in dedent(block).replace("\\\n", " ").splitlines():
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


def type_in(command: str, folder: Path) -> tuple[int, str]:
    """Types a command of ``forge`` or ``python`` in a folder; gives back its exit code and what it said."""
    words = shlex.split(command, comments=True)
    module = ["-m", "forge_core"] if words[0] == "forge" else []
    done = fork_server.run(
        [sys.executable, *module, *words[1:]],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return done.returncode, done.stdout


def write_text(folder: Path) -> None:
    """A folder ``corpus`` with thirty files of numbers, for pages about a reader's own text."""
    (folder / "corpus").mkdir()
    for number in range(30):
        words = " ".join(str(one * one % 997) for one in range(number, number + 400))
        (folder / "corpus" / f"{number}.txt").write_text(words)


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
