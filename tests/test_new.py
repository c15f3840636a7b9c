"""``forge new`` writes packages that work as they are, for every kind."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

import fork_server
from forge_core.cli import main
from forge_core.registry.hookspecs import CORE_KINDS
from forge_testing.scaffold.package import HOOKS, WITHOUT_PACKAGE, write_package
from forge_testing.scaffold.plugin_file import kinds_with_file

KINDS = [*(kind.name for kind in CORE_KINDS if kind.name not in WITHOUT_PACKAGE), "command", "check"]
WITH_EXAMPLE = [kind for kind in KINDS if kind not in ("command", "check")]


def name_of(kind: str) -> str:
    return f"acme-{kind.replace('_', '-')}"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one package for each kind."""
    folder = tmp_path_factory.mktemp("packages")
    for kind in KINDS:
        write_package(kind, name_of(kind), folder)
    return folder


@pytest.fixture(scope="module")
def environment(packages: Path) -> dict[str, str]:
    """Environment variables under which all packages are installed: what an editable installation leaves, by hand."""
    sources = [str(installed_by_hand(packages / name_of(kind))) for kind in KINDS]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sources), "OMP_NUM_THREADS": "1"}


def installed_by_hand(package: Path) -> Path:
    """Leave what an editable installation leaves; returns the folder to import from."""
    source = package / "src"
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    information = source / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    information.mkdir()
    requirements = "".join(f"Requires-Dist: {requirement}\n" for requirement in project["dependencies"])
    (information / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n{requirements}"
    )
    ((group, points),) = project["entry-points"].items()
    lines = [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    (information / "entry_points.txt").write_text("\n".join(lines))
    return source


@pytest.fixture(scope="module")
def outcomes(packages: Path, environment: dict[str, str]) -> dict[str, list[str]]:
    """What pytest says of each package's tests, all run in one process."""
    options = ["-v", "-W", "error", "-W", fork_server.ALREADY, "-p", "no:cacheprovider", "--import-mode=importlib"]
    options += ["--rootdir", str(packages)]
    forked = os.pathsep.join([environment["PYTHONPATH"], str(Path(fork_server.__file__).parent)])
    run = fork_server.run(
        [sys.executable, "-m", "pytest", *options, "-p", "forked_ranks", *(name_of(kind) for kind in KINDS)],
        cwd=packages,
        env={**environment, "PYTHONPATH": forked},
        capture_output=True,
        text=True,
    )
    lines = re.findall(r"^([\w-]+)/tests/\S+ (PASSED|SKIPPED|FAILED|ERROR|XFAIL|XPASS)", run.stdout, re.MULTILINE)
    assert lines, run.stdout + run.stderr
    found: dict[str, list[str]] = {name: [] for name, _ in lines}
    for name, outcome in lines:
        found[name].append(outcome)
    if run.returncode:
        print(run.stdout)  # with the kit's sentences
    return found


def test_there_is_a_package_for_every_kind() -> None:
    assert list(HOOKS) == KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_its_tests_pass_at_once(kind: str, outcomes: dict[str, list[str]]) -> None:
    passed = outcomes[name_of(kind)]

    assert set(passed) <= {"PASSED", "SKIPPED"}
    assert passed.count("PASSED") > 12


def test_its_code_is_formatted_and_clean(packages: Path) -> None:
    ruff = [sys.executable, "-m", "ruff"]
    rules = ["--select", "A,B,C4,E,F,I,N,PIE,PT,PTH,RET,SIM,UP,W", "--ignore", "N812"]
    style = ["--isolated", "--no-cache", "--config", "line-length = 120"]

    for kind in KINDS:  # one at a time, so that each package is its own first party
        package = packages / name_of(kind)
        checked = subprocess.run([*ruff, "check", *style, *rules], cwd=package, capture_output=True, text=True)
        formatted = subprocess.run([*ruff, "format", "--diff", *style], cwd=package, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout
        assert formatted.returncode == 0, formatted.stdout


def test_its_example_runs(packages: Path, environment: dict[str, str], tmp_path: Path) -> None:
    """For every kind that can have one, in one process."""
    program = f"""
import os
from forge_core.cli import main
for name in {[name_of(kind) for kind in WITH_EXAMPLE]}:
    os.chdir({str(packages)!r} + "/" + name)
    assert main(["run", "example.toml", "--run.dir={tmp_path}", f"--run.name={{name}}"]) == 0, name
"""
    run = fork_server.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)

    assert run.returncode == 0, run.stdout + run.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(name_of(kind) for kind in WITH_EXAMPLE)


@pytest.mark.nightly
@pytest.mark.slow
def test_it_can_be_installed(tmp_path: Path) -> None:
    """For every kind, as the printed commands say, with nothing installed by hand."""
    for kind in KINDS:
        write_package(kind, name_of(kind), tmp_path)
    packages = [str(tmp_path / name_of(kind)) for kind in KINDS]
    python = environment_like_this_one(tmp_path / "venv")

    editable = [argument for package in packages for argument in ("-e", package)]
    installed = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            python,
            "install",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            *editable,
        ],
        capture_output=True,
        text=True,
    )
    assert installed.returncode == 0, installed.stderr
    plugin_tests = [f"{package}/tests/test_plugin.py" for package in packages]
    tested = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", *plugin_tests],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )

    assert tested.returncode == 0, tested.stdout


def environment_like_this_one(folder: Path) -> Path:
    """A new virtual environment that also sees everything that this interpreter sees."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "like_this_one.pth").write_text("\n".join(entry for entry in sys.path if entry))
    return folder / "bin" / "python"


def test_the_next_commands_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "router", "noisy-gate", "--dir", str(tmp_path)]) == 0

    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path}/noisy-gate: a package with the router 'noisy_gate'. Next:",
        f"    cd {tmp_path}/noisy-gate",
        "    pip install -e . forge-testing",
        "    pytest",
    ]


def test_a_configuration_to_start_from_is_valid_and_not_written_over(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "config", "first"]) == 0
    assert "forge run first.toml" in capsys.readouterr().out
    assert main(["validate", "first.toml"]) == 0

    assert main(["new", "config", "first.toml"]) == 2
    assert "first.toml exists already; choose another name" in capsys.readouterr().err


FILES = [pytest.param(kind, marks=() if kind == "router" else pytest.mark.nightly) for kind in HOOKS]
"""By day, the examples on the pages of hooks are plugin files of the other kinds."""


@pytest.mark.parametrize("kind", [kind for kind in FILES if kind.values[0] in kinds_with_file()])
def test_a_plugin_file_and_the_package_around_it_pass_at_once(kind, tmp_path, capsys, monkeypatch, fork_pytest) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", kind, "my-own", "--file"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"my_own.py: a plugin file with the {kind.replace('_', ' ')} 'my_own'. Next:\n")
    assert '    files = ["my_own.py"]\n' in printed

    assert main(["new", kind, "good-one", "--from", "my_own.py"]) == 0
    source = (tmp_path / "good-one" / "src" / "good_one" / f"{kind}.py").read_text()
    assert "component" not in source
    project = tomllib.loads((tmp_path / "good-one" / "pyproject.toml").read_text())["project"]
    assert ("forge-plugins-moe" in project["dependencies"]) is (kind == "router")
    passed = fork_pytest("my_own.py", "good-one")
    assert passed.keys() == {"my_own.py", "good-one/tests/test_plugin.py", f"good-one/tests/test_{kind}.py"}
    assert passed["my_own.py"] == passed[f"good-one/tests/test_{kind}.py"] > 2
    trained = fork_server.run(
        [sys.executable, "-m", "forge_core", "run", "example.toml"],
        cwd=tmp_path / "good-one",
        env={**os.environ, "PYTHONPATH": str(tmp_path / "good-one" / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert trained.returncode == 0, trained.stdout + trained.stderr


@pytest.fixture
def fork_pytest(tmp_path: Path):
    """Run pytest in this folder, with packages in it installed; returns how many tests of each file have passed."""

    def run(*paths: str) -> Counter[str]:
        sources = [str(Path(fork_server.__file__).parent)]
        for project in tmp_path.glob("*/pyproject.toml"):
            sources.append(str(installed_by_hand(project.parent)))
        options = ["-v", "-W", "error", "-W", fork_server.ALREADY, "-p", "no:cacheprovider"]
        options += ["--import-mode=importlib", "-p", "forked_ranks"]
        done = fork_server.run(
            [sys.executable, "-m", "pytest", *options, "--rootdir", str(tmp_path), *paths],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sources), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return Counter(re.findall(r"^(\S+\.py)::\S+ PASSED", done.stdout, re.MULTILINE))

    return run


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["command", "a", "--file"], "no plugin file can be written for the kind 'command'. Kinds: model, "),
        (["rooter", "a", "--file"], "no plugin file can be written for the kind 'rooter'. Did you mean 'router'?"),
        (["router", "there", "--file"], "there.py exists already; choose another name"),
        (["router", "a", "--file", "--dir", "nowhere"], "nowhere is not a directory"),
        (["router", "a", "--from", "there.py"], "there.py registers nothing: put @component(kind)"),
        (["router", "a", "--from", "where.py"], "--from where.py: there is no such file"),
        (["router", "a", "--from", "loss.py"], "--from loss.py: it registers no router; it registers: loss"),
        (["router", "a", "--from", "loss.py", "--file"], "give one of them"),
        (["loss", "a", "--from", "odd.py"], "checks of 'loss': LossConformance has no 'vocab'"),
        (["loss", "a", "--from", "act.py"], "'loss' is an activation, for which no package can be written"),
        (["loss", "a", "--from", "start.py"], "'loss' is a warm start, for which forge_testing has no kit"),
        (["config", "a", "--file"], "give one of them"),
        (["config", "a" * 300], "a.toml: File name too long"),
    ],
)
def test_what_cannot_be_written_is_told_and_nothing_is(words, sentence, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.py").write_text("x = 1\n")
    assert main(["new", "loss", "loss", "--file"]) == 0
    text = (tmp_path / "loss.py").read_text()
    (tmp_path / "odd.py").write_text(text.replace('@component("loss"', '@component("loss", checks={"vocab": 3}'))
    (tmp_path / "act.py").write_text(text.replace('@component("loss"', '@component("activation"'))
    (tmp_path / "start.py").write_text(text.replace('@component("loss"', '@component("warm_start"'))
    before = sorted(tmp_path.rglob("*"))

    assert main(["new", *words]) == 2
    assert sentence in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("words", [["config", "a"], ["loss", "a", "--file"], ["loss", "a"]])
def test_on_a_full_disk_nothing_is_left_that_the_next_try_stops_at(words, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        assert main(["new", *words]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert re.search(r"error: cannot write a(\.toml|\.py)?: File too large", capsys.readouterr().err)
    assert not [*tmp_path.iterdir()]
    assert main(["new", *words]) == 0


def test_names_follow_from_the_given_one(tmp_path: Path) -> None:
    package = write_package("router", "noisy_top2", tmp_path)

    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    assert package.name == project["name"] == "noisy-top2"
    assert project["entry-points"]["forge.v1"] == {"noisy-top2": "noisy_top2.plugin"}
    assert "class NoisyTop2(nn.Module):" in (package / "src" / "noisy_top2" / "router.py").read_text()


def test_it_is_written_here_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    assert main(["new", "loss", "focal"]) == 0
    assert (tmp_path / "focal" / "README.md").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["routr", "noisy"], "no package can be written for the kind 'routr'. Did you mean 'router'? Kinds: model, "),
        (["router", "Noisy Gate"], "'Noisy Gate' cannot be the name: write lower-case words joined by '-'"),
        (
            ["router", "random"],
            "Python has 'random' itself; add a word, such as my-random",
        ),
        (["router", "none"], "'none' cannot be the name: Python has 'None' itself; add a word, such as my-none"),
        (["router", "true", "--file"], "'true' cannot be the name: Python has 'True' itself"),
        (["model", "block"], "'block' cannot be the name: its code uses another Block; add a word, as in my-block"),
        (["data_source", "path"], "'path' cannot be the name: its code uses another Path; add a word"),
        (["tracker", "tracker", "--file"], "'tracker' cannot be the name: its code uses another Tracker; add a word"),
        (["evaluation", "evaluation"], "'evaluation' cannot be the name: its code uses another Evaluation; add"),
        (["data_source", "data-source"], "'data-source' cannot be the name: its code uses another DataSourceConfig"),
        (["router", "x" * 300], "'xxxxxxxx…' cannot be the name: it has 300 characters, of at most 64"),
        (["router", "forge-core"], "a package 'forge_core' is installed already; choose another"),
        (["router", "taken"], "taken exists already; choose another name, or remove it first"),
        (["router", "noisy", "--dir", "nowhere"], "nowhere is not a directory; make it first, or leave out --dir"),
    ],
)
def test_mistakes_are_told_and_nothing_is_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()

    assert main(["new", *arguments]) == 2

    assert sentence in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["taken"]
