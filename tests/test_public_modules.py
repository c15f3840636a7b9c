"""Our packages import those modules of the core that the documentation calls public, and no others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "hooks" / "public-modules.md"
PUBLIC = re.findall(r"^\| `(forge_core\.[\w.*]+)` \|", PAGE.read_text(encoding="utf-8"), re.M)
"""Modules, and ``*`` for all of a folder."""
OF_PACKAGES = re.findall(r"^\| `(forge_plugins_[\w.*]+)` \|", PAGE.read_text(encoding="utf-8"), re.M)
"""The same of our packages."""
SOURCES = sorted(
    file
    for pattern in ("plugins/*/src", "forge_plugins_*/src")
    for folder in ROOT.glob(pattern)
    for file in folder.rglob("*.py")
)
"""Of our packages. The conformance kit tests the core, and tests may look into it."""


def test_packages_import_public_modules_only():
    wrong = {
        f"{package(file)} imports {module}"
        for file in SOURCES
        for module in imports(file)
        if not any(fnmatch(module, public) for public in PUBLIC)
    }

    assert wrong == set()


@pytest.mark.parametrize("module", [*PUBLIC, *OF_PACKAGES])
def test_a_public_module_is_there(module):
    assert find_spec(module.removesuffix(".*")) is not None


def package(file: Path) -> str:
    return file.parts[file.parts.index("src") + 1]


def imports(file: Path) -> Iterator[str]:
    """The modules of the core that a file imports, also for types alone and within functions."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == "forge_core")
        elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "forge_core":
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                is_module = any((ROOT / inner.replace(".", "/")).with_suffix(end).exists() for end in ("", ".py"))
                yield inner if is_module else str(node.module)
