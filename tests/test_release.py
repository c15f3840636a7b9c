"""What a release has beside its archives: another version everywhere, notes, and a bill of materials."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.requirements import Requirement

import bill_of_materials
import choose_torch
import forge_core
import notes
import set_version
from distributions import FOLDERS, ROOT

CHANGELOG = """\
# Changelog

## [Unreleased]

## [0.2.0] - 2027-01-31

### Added

- An entry
  that goes on.
  - And one below it.

### Fixed

- Another.

## [0.1.0] - 2026-12-01

### Added

- Everything.
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What a version is written into."""
    for folder in (*FOLDERS, ROOT / "docs" / "hooks", *ROOT.glob("tests/outsider/acme-*"), *ROOT.glob("examples/*/")):
        target = tmp_path / folder.relative_to(ROOT)
        target.mkdir(parents=True, exist_ok=True)
        for name in ("pyproject.toml", "index.md"):
            if (folder / name).exists():
                shutil.copy(folder / name, target)
    (tmp_path / "forge_core").mkdir()
    shutil.copy(ROOT / "forge_core" / "__init__.py", tmp_path / "forge_core")
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG.replace("0.2.0", "0.0.2").replace("0.1.0", "0.0.1"))
    return tmp_path


def projects(tree: Path) -> dict[str, dict]:
    return {str(file): tomllib.loads(file.read_text())["project"] for file in tree.rglob("pyproject.toml")}


@pytest.mark.parametrize(("new", "next_patch"), [("0.9.0", "0.9.3"), ("3.1.0", "3.7.2")])
def test_a_version_is_set_everywhere(tree, new, next_patch):
    set_version.main([new, "2027-01-31"], root=tree)

    assert f'__version__ = "{new}"' in (tree / "forge_core" / "__init__.py").read_text()
    assert f"## [Unreleased]\n\n## [{new}] - 2027-01-31\n" in (tree / "CHANGELOG.md").read_text()
    ours = {"forge-core", *(folder.name.replace("_", "-") for folder in FOLDERS)}
    for file, project in projects(tree).items():
        if not {"outsider", "examples"} & set(Path(file).parts):  # which have versions of their own
            assert project.get("version", new) == new, file
        for line in [*project["dependencies"], *chain(*project.get("optional-dependencies", {}).values())]:
            need = Requirement(line)
            if need.name in ours:
                assert need.specifier.contains(new), f"{file}: {line}"
                assert need.specifier.contains(next_patch) == (project["name"] != "forge-train"), f"{file}: {line}"
    page = (tree / "docs" / "hooks" / "index.md").read_text()
    assert Requirement(re.search(r'dependencies = \["(forge-core.*)"\]', page)[1]).specifier.contains(new)


def test_a_patch_leaves_what_they_accept_of_each_other(tree):
    before = projects(tree)
    major, minor, patch = forge_core.__version__.split(".")

    set_version.main([f"{major}.{minor}.{int(patch) + 1}", "2027-01-31"], root=tree)

    for file, project in projects(tree).items():
        if project["name"] != "forge-train":
            assert project["dependencies"] == before[file]["dependencies"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["0.0.1", "2027-01-31"], f"0.0.1 comes before {forge_core.__version__}, which the tree has"),
        (["0.2", "2027-01-31"], "'0.2' is not three numbers with points between them, such as 0.2.0"),
        (["0.2.0", "tomorrow"], "'tomorrow' is not a day such as 2027-01-31"),
    ],
)
def test_a_version_that_cannot_be_set_is_told(tree, capsys, arguments, said):
    with pytest.raises(SystemExit):
        set_version.main(arguments, root=tree)

    assert said in capsys.readouterr().err


def test_a_version_is_not_released_twice(tree, capsys):
    day = "2027-01-31"
    set_version.main(["0.9.0", day], root=tree)

    with pytest.raises(SystemExit):
        set_version.main(["0.9.0", day], root=tree)

    assert "the change log has 0.9.0 already" in capsys.readouterr().err


def test_notes_are_the_part_of_the_change_log_with_whole_lines():
    assert notes.notes("0.2.0", CHANGELOG) == (
        "# Forge 0.2.0 (2027-01-31)\n\n### Added\n\n- An entry that goes on.\n  - And one below it.\n\n"
        "### Fixed\n\n- Another.\n"
    )
    assert notes.notes("Unreleased", CHANGELOG) == "# Forge, unreleased\n\n\n"


def test_a_version_without_notes_and_a_section_of_no_kind_are_told():
    with pytest.raises(SystemExit, match=r"the change log has nothing about '0.3', but about Unreleased, 0.2.0, 0.1.0"):
        notes.notes("0.3", CHANGELOG)
    with pytest.raises(SystemExit, match=r"\[0.1.0\] has the section 'New'; sections are Added, Changed"):
        notes.notes("0.1.0", CHANGELOG.replace("### Added\n\n- Everything", "### New\n\n- Everything"))


def test_our_change_log_has_notes_of_every_version():
    changelog = (ROOT / "CHANGELOG.md").read_text()

    versions = re.findall(r"^## \[(.+?)\]", changelog, re.M)
    assert versions[0] == "Unreleased"
    assert any("\n### Added\n\n- " in notes.notes(version, changelog) for version in versions)


@pytest.fixture(scope="module")
def release(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("release")
    command = [sys.executable, str(ROOT / "release" / "distributions.py"), "--out", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    bill_of_materials.main([str(folder)])
    return folder


@pytest.fixture(scope="module")
def bill(release) -> dict:
    return json.loads(next(release.glob("*.cdx.json")).read_text())


def test_the_bill_of_materials_keeps_to_its_standard_and_is_the_same_each_time(release):
    (file,) = release.glob("forge-*.cdx.json")
    before = file.read_bytes()

    bill_of_materials.main([str(release)])

    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(before.decode()) is None
    assert file.read_bytes() == before


def test_it_names_each_wheel_with_its_sum_and_its_licence(release, bill):
    sums = {line.split("  ")[1]: line.split("  ")[0] for line in (release / "SHA256SUMS").read_text().splitlines()}
    ours = [one for one in bill["components"] if "version" in one]

    found = {one["name"].replace("-", "_"): one["hashes"][0]["content"] for one in ours}
    assert found == {name.split("-")[0]: digest for name, digest in sums.items() if name.endswith(".whl")}
    assert {one["licenses"][0]["expression"] for one in ours} == {"MIT"}


def test_it_names_what_others_publish_with_what_is_accepted_and_whether_it_is_needed(bill):
    others = {one["name"]: one for one in bill["components"] if "version" not in one}

    assert {"torch", "attrs", "pyarrow", "safetensors"} <= {
        name for name, one in others.items() if one["scope"] == "required"
    }
    assert {"wandb", "matplotlib"} <= {name for name, one in others.items() if one["scope"] == "optional"}
    assert others["torch"]["properties"] == [{"name": "forge:accepts", "value": ">=2.11"}]
    assert not any(name.startswith("forge") for name in others)


def test_it_says_what_needs_what(bill):
    needs = {one["ref"]: one.get("dependsOn", []) for one in bill["dependencies"]}

    version = forge_core.__version__
    own = [f"forge-{name}=={version}" for name in ("core", "plugins-dense", "plugins-weights")]
    assert needs[f"forge-plugins-moe=={version}"] == own
    assert "torch" in needs[f"forge-core=={version}"]
    assert len(needs[f"forge=={version}"]) == len(FOLDERS)


def test_a_folder_without_wheels_or_with_those_of_two_releases_is_told(tmp_path):
    with pytest.raises(SystemExit, match="has no wheels: `make dist` builds them"):
        bill_of_materials.main([str(tmp_path)])
    for version in ("0.1.0", "0.2.0"):
        with ZipFile(tmp_path / f"acme-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"acme-{version}.dist-info/METADATA", f"Name: acme\nVersion: {version}\n")
    with pytest.raises(SystemExit, match=r"has wheels of several releases: 0.1.0, 0.2.0"):
        bill_of_materials.main([str(tmp_path)])


def test_continuous_integration_runs_what_the_packages_say_they_run_with():
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    suite, checks = jobs["suite"], jobs["checks"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    said = [line.rpartition(" ")[2] for line in project["classifiers"] if re.search(r"Python :: 3\.\d", line)]
    (oldest,) = [line.partition(">=")[2] for line in project["dependencies"] if line.startswith("torch>=")]
    assert suite["strategy"]["matrix"] == {
        "python": said,
        "torch": [oldest, "newest"],
        "system": ["ubuntu-latest", "macos-latest"],
    }
    assert suite["steps"][-1] == {"run": "make test"}
    assert checks["steps"][-1] == {"run": "make lint types docs"}
    everything = (ROOT / ".ci" / "run").read_text()
    assert all(one["steps"][-1]["run"] in everything for one in (suite, checks))
    assert "://" not in text


@pytest.mark.parametrize(("asked", "constraint"), [("2.11", ["torch==2.11.*"]), ("newest", [])])
def test_another_torch_can_be_asked_for(tmp_path, asked, constraint):
    pins = ["# why", "attrs==26.1.0", "torch==2.13.0", "torchao==0.18.0", "torchft==0.2.0", "triton==3.7.1"]
    (tmp_path / "constraints.txt").write_text("\n".join(pins))

    choose_torch.main([asked], tmp_path / "constraints.txt")

    kept = ["# why", "attrs==26.1.0", "torchft==0.2.0"]
    assert (tmp_path / "constraints.txt").read_text().splitlines() == [*kept, *constraint]


def test_a_torch_that_is_none_is_told(capsys):
    with pytest.raises(SystemExit):
        choose_torch.main(["latest"])

    assert "'latest' is neither two numbers, such as 2.11, nor newest" in capsys.readouterr().err
