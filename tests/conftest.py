from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import dedent
from typing import Protocol

import pytest


class MakeDistribution(Protocol):
    def __call__(
        self, name: str, version: str = "1.0", files: Mapping[str, str] | None = None, group: str = "forge.v1"
    ) -> Path: ...


@pytest.fixture
def make_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeDistribution]:
    """Installs a distribution for one test, as an installer would: a ``.dist-info`` and its files on ``sys.path``.

    ``files`` are sources by path. The entry point is ``<name_with_underscores>.plugin``, unless ``files`` holds an
    ``entry_points.txt``. The returned directory can be given to a subprocess in ``PYTHONPATH``.
    """

    def make(name: str, version: str = "1.0", files: Mapping[str, str] | None = None, group: str = "forge.v1") -> Path:
        package = name.replace("-", "_").lower()
        site = tmp_path / "sites" / f"{len(list(tmp_path.glob('sites/*')))}-{name}"
        information = f"{name.replace('-', '_')}-{version}.dist-info"
        announced = f"[{group}]\n{name} = {package}.plugin\n"
        contents = dict(files or {})
        contents[f"{information}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        contents[f"{information}/entry_points.txt"] = contents.pop("entry_points.txt", announced)
        for path, text in contents.items():
            target = site / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(dedent(text), encoding="utf-8")
            if target.suffix == ".py":
                (target.parent / "__init__.py").touch()
        monkeypatch.syspath_prepend(site)
        return site

    yield make

    for loaded, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[loaded]
    importlib.invalidate_caches()


@pytest.fixture
def aborting_teardown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes abort as the interpreter takes its modules down: those do sometimes that unload torch and have had a
    process group."""
    (tmp_path / "sitecustomize.py").write_text(ABORTING, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)  # some processes are given what is on this one's


ABORTING = """
import os


class Threads:
    def __del__(self, abort=os.abort):
        abort()


threads = Threads()
"""
