"""Packages from outside the tree (the folders ``acme-*`` and ``examples``), installed beside ours from wheels alone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

import fork_server
from distributions import FOLDERS, ROOT
from forge_testing.scaffold.package import write_package

HERE = Path(__file__).parent
OURS = [folder for folder in FOLDERS if folder.name != "forge_train"]
"""The core, and plugins."""
EXAMPLES = sorted(path.parent for path in ROOT.glob("examples/*/pyproject.toml"))

collect_ignore_glob = ["acme-*"]  # their tests run where they are installed


@attrs.frozen
class Installation:
    """An environment that has wheels of ours and of the outsiders, and no source tree."""

    folder: Path
    """The packages of the outsiders are in it, each under its name."""

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"

    @property
    def ours(self) -> set[str]:
        """The distributions of our plugins."""
        return {path.name.replace("_", "-") for path in OURS[1:]}

    def pip(self, *arguments: str | Path) -> str:
        """A ``pip`` command that must succeed, without a network."""
        command, *others = arguments
        return succeed(
            sys.executable, "-m", "pip", "--python", self.python, command, "--no-index", *others, cwd=self.folder
        )

    def forge(self, *arguments: str | Path, cwd: Path) -> str:
        """A ``forge`` command that must succeed; returns what it printed."""
        return succeed(self.python.with_name("forge"), *arguments, cwd=cwd)

    def trained(self, *arguments: str | Path, cwd: Path) -> str:
        """The same for a command that needs torch, by a fork of a process that has imported it."""
        return succeed(self.python, "-m", "forge_core", *arguments, cwd=cwd, run=fork_server.run)

    def interrupted(self, *arguments: str, cwd: Path) -> int:
        """The exit code of a ``forge`` command to which Ctrl-C comes after its first checkpoint."""
        command = [self.python, "-m", "forge_core", *arguments]
        process = fork_server.Popen(command, cwd=cwd, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        while process.poll() is None and not list(cwd.glob("runs/*/checkpoints/latest")):
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
        return process.returncode

    def in_turn(self, *commands: list[str], cwd: Path) -> str:
        """Commands of Python in it, which must succeed, by forks of one process that has imported what they import."""
        return succeed(self.python, self.folder / "tools" / "in_turn.py", json.dumps(commands), cwd=cwd)

    def refused(self, *arguments: str | Path, cwd: Path) -> str:
        """A ``forge`` command that must end with exit code 2; returns what it said."""
        command = [self.python.with_name("forge"), *arguments]
        done = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True)
        assert done.returncode == 2, done.stdout + done.stderr
        return " ".join(done.stderr.split())

    def tested(self, *tests: Path) -> str:
        """What pytest prints of tests of packages in it, which must pass; their ranks are forked."""
        options = ["-p", "no:cacheprovider", "-p", "forked_ranks", "-o", "pythonpath=tools"]
        options += ["--import-mode=importlib", "--rootdir=.", *map(str, tests)]
        return succeed(self.python, "-m", "pytest", *options, cwd=self.folder, run=fork_server.run)

    def succeed(self, *arguments: str | Path, cwd: Path) -> str:
        """Python in it."""
        return succeed(self.python, *arguments, cwd=cwd)


BUILD = """
import os, sys
from hatchling.build import build_wheel

wheels, *sources = sys.argv[1:]
for source in sources:
    os.chdir(source)
    build_wheel(wheels)
"""
"""What an installer does for each source, in one process."""


IN_TURN = """
import json, sys
import fork_server

for command in json.loads(sys.argv[1]):
    done = fork_server.run([sys.executable, *command], capture_output=True, text=True)
    print(done.stdout, flush=True)
    if done.returncode:
        sys.exit(f"{command} exits with {done.returncode}: {done.stderr}")
"""


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    folder = tmp_path_factory.mktemp("outsiders")
    outsiders = [shutil.copytree(path, folder / path.name) for path in sorted(HERE.glob("acme-*"))]
    outsiders.append(write_package("router", "acme-gate", folder))
    outsiders += [shutil.copytree(path, folder / path.name) for path in EXAMPLES]
    installation = fresh_environment(folder)
    installation.pip("install", "-q", *built([*outsiders, *OURS], folder / "wheels"))
    for outsider in outsiders:
        shutil.rmtree(outsider / "src")
    return installation


def built(folders: Sequence[Path], wheels: Path) -> list[Path]:
    """The wheels of packages, in a new folder."""
    wheels.mkdir()
    succeed(sys.executable, "-c", BUILD, wheels, *folders, cwd=wheels)
    return sorted(wheels.glob("*.whl"))


@pytest.fixture(scope="session")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of every distribution, as ``make dist`` builds them."""
    folder = tmp_path_factory.mktemp("index")
    succeed(sys.executable, ROOT / "release" / "distributions.py", "--out", folder, cwd=folder)
    return folder


@pytest.fixture(scope="session")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Installation]:
    """A function that makes an environment in which nothing of Forge is installed yet."""
    return lambda: fresh_environment(tmp_path_factory.mktemp("fresh"))


def fresh_environment(folder: Path) -> Installation:
    """An environment with nothing but what others have published."""
    succeed(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    see_third_parties(folder / "venv", folder / "third_parties")
    (folder / "tools").mkdir()
    for module in ("fork_server.py", "forked_ranks.py"):
        shutil.copy(Path(fork_server.__file__).with_name(module), folder / "tools")
    (folder / "tools" / "in_turn.py").write_text(IN_TURN)
    installation = Installation(folder)
    fork_server.serve(installation.python)
    return installation


def see_third_parties(venv: Path, links: Path) -> None:
    """Let the environment import what is installed here, torch above all, without Forge and what points at its tree."""
    links.mkdir()
    for site in {Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib"))}:
        for entry in site.iterdir():
            ours = entry.name.startswith(("forge", "_editable_impl_forge", "__editable__"))
            if not ours and not (links / entry.name).exists():
                (links / entry.name).symlink_to(entry)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "third_parties.pth").write_text(str(links))


def succeed(*command: str | Path, cwd: Path, run: Callable[..., Any] = subprocess.run) -> str:
    """Run a command that must succeed, and return what it printed."""
    done = run(command, cwd=cwd, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, f"{command} exits with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def environment() -> dict[str, str]:
    """The variables without those that lead to the source tree."""
    hidden = ("PYTHONPATH", "PYTEST_ADDOPTS", "COLUMNS")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return {**kept, "OMP_NUM_THREADS": "1"}
