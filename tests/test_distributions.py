"""What is published: complete, of one version, and the same bytes wherever it is built."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

import forge_core
from distributions import FOLDERS, ROOT

PYTHONS = {f"Programming Language :: Python :: 3.{minor}" for minor in range(11, 15)}
CLASSIFIERS = PYTHONS | {
    "Development Status :: 3 - Alpha",
    "Environment :: Console",
    "Intended Audience :: Developers",
    "Intended Audience :: Science/Research",
    "Operating System :: POSIX :: Linux",
    "Programming Language :: Python :: 3 :: Only",
    "Topic :: Scientific/Engineering :: Artificial Intelligence",
}
META = "forge-train"
MOE = f"forge_plugins_moe-{forge_core.__version__}"
BUILD_ONE = """
import os, sys
from hatchling.build import build_wheel

os.chdir(sys.argv[1])
build_wheel(sys.argv[2])
"""


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as ``make dist`` fills it."""
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder)
    return folder


@pytest.fixture(scope="module")
def metadata(archives: Path) -> dict[str, Message]:
    """That of each wheel, by the name of its distribution."""
    found = {}
    for wheel in archives.glob("*.whl"):
        with ZipFile(wheel) as archive:
            (file,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
            message = message_from_bytes(archive.read(file))
        found[message["Name"]] = message
    return found


def build(tree: Path, out: Path, **variables: str) -> None:
    command = [sys.executable, str(tree / "release" / "distributions.py"), "--out", str(out)]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def requirements(message: Message) -> list[Requirement]:
    return [Requirement(line) for line in message.get_all("Requires-Dist", [])]


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_each_is_a_wheel_and_a_source_distribution(archives):
    assert len(list(archives.glob("*.whl"))) == len(list(archives.glob("*.tar.gz"))) == len(FOLDERS) == 19


def test_they_are_the_same_bytes_in_another_folder_on_another_day(archives, tmp_path):
    tracked = ("git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in filter(None, subprocess.check_output(tracked, text=True).split("\0")):
        if (ROOT / name).exists():
            (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tmp_path / "tree" / name)
            (tmp_path / "tree" / name).chmod((ROOT / name).stat().st_mode & 0o700)
    when = subprocess.check_output(("git", "-C", str(ROOT), "log", "-1", "--format=%ct"), text=True).strip()

    build(tmp_path / "tree", tmp_path / "dist", SOURCE_DATE_EPOCH=when, TZ="Asia/Tokyo")

    assert digests(tmp_path / "dist") == digests(archives)


def test_a_tree_without_a_commit_needs_to_be_told_a_time(tmp_path):
    shutil.copytree(ROOT / "release", tmp_path / "release")

    command = [sys.executable, str(tmp_path / "release" / "distributions.py"), "--out", str(tmp_path / "dist")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    assert done.returncode == 1
    assert (
        done.stderr == "there is no git checkout whose last commit gives archives their time: set SOURCE_DATE_EPOCH\n"
    )


def test_a_wheel_can_be_built_from_the_source_distribution(archives, tmp_path):
    """As installers do where only that is taken."""
    with tarfile.open(archives / f"{MOE}.tar.gz") as source:
        when = str(int(source.getmembers()[0].mtime))
        source.extractall(tmp_path, filter="data")

    command = [sys.executable, "-c", BUILD_ONE, str(tmp_path / MOE), str(tmp_path)]
    subprocess.run(command, env={**os.environ, "SOURCE_DATE_EPOCH": when}, check=True, capture_output=True)

    name = f"{MOE}-py3-none-any.whl"
    assert (tmp_path / name).read_bytes() == (archives / name).read_bytes()


def test_what_is_there_of_an_earlier_build_is_not_published_again(archives, tmp_path):
    (tmp_path / "forge_core-0.0.9-py3-none-any.whl").touch()

    build(ROOT, tmp_path)

    assert set(digests(tmp_path)) == set(digests(archives))


def test_the_sums_are_those_of_the_archives(archives):
    stated = dict(reversed(line.split("  ")) for line in (archives / "SHA256SUMS").read_text().splitlines())

    assert {**stated, "SHA256SUMS": digests(archives)["SHA256SUMS"]} == digests(archives)


def test_each_says_what_it_is_and_for_whom(metadata):
    for name, message in metadata.items():
        assert message["Summary"].endswith("."), name
        assert message["License-Expression"] == "MIT", name
        assert message["Requires-Python"] == ">=3.11", name
        assert len(message["Keywords"].split(",")) >= 4, name
        assert set(message.get_all("Classifier")) - {"Framework :: Pytest", "Typing :: Typed"} == CLASSIFIERS, name
        assert message.get_payload().lstrip().startswith(("# Forge\n", f"# {name}\n")), name


def test_all_name_the_same_addresses(metadata):
    """None until there are some; then each in every ``pyproject.toml``."""
    assert len({tuple(sorted(message.get_all("Project-URL", []))) for message in metadata.values()}) == 1


def test_each_holds_the_licence_and_says_that_it_is_typed_where_it_is(archives, metadata):
    for wheel in archives.glob("*.whl"):
        with ZipFile(wheel) as archive:
            (licence,) = [name for name in archive.namelist() if name.endswith("/licenses/LICENSE")]
            assert archive.read(licence) == (ROOT / "LICENSE").read_bytes(), wheel.name
            typed = any(name.endswith("/py.typed") for name in archive.namelist())
        name = wheel.name.split("-")[0].replace("_", "-")
        assert typed == ("Typing :: Typed" in metadata[name].get_all("Classifier")) == (name != META), wheel.name


def test_none_holds_what_nobody_published(archives):
    """Caches, runs and files that an editor has left."""
    for archive in archives.glob("*.tar.gz"):
        with tarfile.open(archive) as source:
            names = source.getnames()
        assert not [name for name in names if {"__pycache__", "runs", ".venv"} & set(name.split("/"))], archive.name


def test_all_have_one_version_and_accept_each_other(metadata):
    assert {message["Version"] for message in metadata.values()} == {forge_core.__version__}
    for name, message in metadata.items():
        for one in requirements(message):
            if one.name in metadata:
                assert one.specifier.contains(forge_core.__version__), f"{name} needs {one}"
            else:
                assert not one.name.startswith("forge"), f"{name} needs {one}, which is none of ours"


def test_the_one_that_names_all_names_these_versions(metadata):
    """And every package of ours: at once, or by an extra."""
    ours = [one for one in requirements(metadata[META]) if one.name in metadata]

    assert {str(one.specifier) for one in ours} == {f"=={forge_core.__version__}"}
    assert {META, *(one.name for one in ours)} == set(metadata)
    assert set(metadata[META].get_all("Provides-Extra")) == {"hf", "interp", "moe", "testing", "torchft", "vlm"}


def test_the_installation_from_the_tree_has_all_that_have_code():
    named = {
        line.split()[1].split("[")[0] for line in (ROOT / "requirements.txt").read_text().splitlines() if line[0] == "-"
    }

    folders = {str(folder.relative_to(ROOT)) for folder in FOLDERS}
    assert named == folders - {"forge_train"}
    assert not tomllib.loads((ROOT / "forge_train" / "pyproject.toml").read_text())["project"].get("entry-points")


def test_all_wheels_together_are_small(archives):
    assert sum(path.stat().st_size for path in archives.glob("*.whl")) <= 2_000_000
