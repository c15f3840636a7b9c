"""The core imports nothing of ours and names no plugin; plugins use public names only; files have nouns for names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "forge_core"
PACKAGES = {
    package.name: package
    for pattern in ("plugins/*/src/*", "forge_plugins_*/src/*", "forge_testing/src/*")
    for package in ROOT.glob(pattern)
    if (package / "__init__.py").exists()
}
"""Every package of ours beside the core, by import name."""
SOURCES = {"forge_core": CORE, **PACKAGES}


def python_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def imports(file: Path) -> Iterator[tuple[str, str]]:
    """Module and name of every import in a file; an empty name where the module itself is imported."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield from ((node.module, alias.name) for alias in node.names)


def ours(module: str) -> str | None:
    """The package of ours that a module belongs to, also of one that is not in this tree yet."""
    package = module.partition(".")[0]
    return package if package in SOURCES or package.startswith("forge_") else None


def declared_dependencies(package: Path) -> set[str]:
    import tomllib

    project = tomllib.loads((package.parent.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [line for lines in project.get("optional-dependencies", {}).values() for line in lines]
    return {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in [*project["dependencies"], *extras]}


def test_there_is_something_to_look_at():
    assert {"forge_plugins_dense", "forge_plugins_optim", "forge_plugins_data", "forge_plugins_parallel"} <= set(
        PACKAGES
    )


@pytest.mark.parametrize("file", python_files(CORE), ids=lambda file: str(file.relative_to(ROOT)))
def test_the_core_imports_nothing_of_ours(file):
    assert {ours(module) for module, _ in imports(file)} <= {"forge_core", None}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_plugin_imports_the_core_and_what_it_declares_and_only_public_names(package):
    allowed = {package, "forge_core", *declared_dependencies(PACKAGES[package])}
    for file in python_files(PACKAGES[package]):
        for module, name in imports(file):
            owner = ours(module)
            assert owner in allowed or owner is None, f"{file} imports {module}, which {package} does not depend on"
            if owner not in (None, package):
                private = [part for part in (*module.split("."), name) if re.match(r"_(?!_)", part)]
                assert not private, f"{file} imports the private {module} {name}"


def test_the_core_names_no_plugin():
    names = {name for package in PACKAGES for name in (package, package.replace("_", "-"))}
    for file in sorted(CORE.rglob("*")):
        if file.suffix in (".py", ".toml", ".md") and file.name not in ("known_plugins.toml", "moved.toml"):
            text = file.read_text(encoding="utf-8")
            assert not [name for name in names if name in text], file


@pytest.mark.parametrize("package", SOURCES)
def test_files_are_about_a_noun(package):
    named_after_nothing = {"utils", "util", "helpers", "helper", "common", "misc", "manager"}
    assert not [file for file in python_files(SOURCES[package]) if file.stem in named_after_nothing]
