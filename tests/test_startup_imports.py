"""Commands that must answer at once import neither torch nor anything else that is large."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose torch, numpy, … tell when they are imported."""
    folder = tmp_path_factory.mktemp("poisoned")
    for library in ("torch", "numpy", "transformers", "datasets", "lm_eval", "jax", "tensorflow", "rich", "pytest"):
        (folder / library).mkdir()
        (folder / library / "__init__.py").write_text(f"raise ImportError('POISON: {library} was imported')")
    return folder


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["plugins"],
        ["plugins", "--json"],
        ["plugins", "--kind", "optimizer"],
        ["validate", "configs/demo.toml"],
        ["validate", "configs/demo.toml", "callbacks=[{name='export'}]"],
        ["config", "configs/demo.toml"],
    ],
    ids=" ".join,
)
def test_a_light_command_imports_nothing_heavy(poisoned, arguments):
    finished = subprocess.run(
        [sys.executable, "-m", "forge_core", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(poisoned)},
        capture_output=True,
        text=True,
    )

    assert "POISON" not in finished.stdout + finished.stderr
    assert finished.returncode == 0, finished.stderr


def without_notes(stderr):
    """On a machine that is busy, a plugin of ours may take half a second to import, too, which is noted."""
    return "".join(line for line in stderr.splitlines(keepends=True) if not line.startswith("note: importing "))


def test_a_run_of_a_wrong_job_is_refused_before_anything_heavy_is_imported(poisoned):
    finished = subprocess.run(
        [sys.executable, "-m", "forge_core", "run", "configs/demo.toml", "train.steps=abc"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(poisoned)},
        capture_output=True,
        text=True,
    )

    assert finished.returncode == 2, finished.stderr
    assert without_notes(finished.stderr).startswith("error: train.steps=abc: train.steps: expected an integer")


def test_every_installed_component_can_be_described_without_torch(poisoned):
    program = """if True:
        from forge_core.registry.catalog import Catalog
        from forge_core.cli import main
        from forge_core.registry.discovery import discover

        catalog = discover()
        for kind in catalog.kinds:
            for provided in catalog.components(kind):
                assert main(["plugins", "show", kind, provided.qualified_name]) == 0, provided.qualified_name
    """

    finished = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(poisoned)},
        capture_output=True,
        text=True,
    )

    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize(
    "line",
    [
        "forge ",
        "forge run c",
        "forge run configs/demo.toml optimizer.",
        "forge replicas --",
        "forge eval --",
        "forge new ",
    ],
)
def test_completing_a_line_imports_nothing_heavy(poisoned, line):
    finished = subprocess.run(
        [sys.executable, "-m", "forge_core", "completion", "zsh", "--words"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(poisoned), "COMP_LINE": line},
        capture_output=True,
        text=True,
    )

    assert (without_notes(finished.stderr), finished.returncode) == ("", 0)
    assert finished.stdout
