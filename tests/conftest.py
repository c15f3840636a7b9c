from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from textwrap import dedent
from typing import Protocol

import pytest

import fork_server


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
def run_ranks() -> Callable[..., list[str]]:
    """Run a Python file in ``world_size`` ranks; returns what each printed, or fails with what it said."""

    def run(script: Path, world_size: int, *arguments: object, timeout: float = 120) -> list[str]:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch forgets to export it

        # here and not on rank 0, which may end while others look there for whom they have not talked to yet
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        common = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
        common["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        ranks = [
            fork_server.Popen(
                [sys.executable, str(script), *map(str, arguments)],
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
        ]
        try:
            said = [rank.communicate(timeout=timeout) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        errors = [
            f"[rank {i}] {err[-3000:]}"
            for i, (rank, (_, err)) in enumerate(zip(ranks, said, strict=True))
            if rank.returncode
        ]
        assert not errors, "\n".join(errors)
        return [out for out, _ in said]

    return run


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
