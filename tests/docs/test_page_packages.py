"""What pages show runs: the packages that they build up, configurations, Python."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import pytest

import fork_server
from doc_pages import DOCS, HOOK_PAGES, PAGES, ROOT
from forge_core.cli import main
from forge_core.config.builder import ComponentBuilder
from forge_core.config.sections import CheckpointSection
from forge_core.contracts.checkpoint_mirror import MirrorContext, MirrorStart
from forge_core.job import load_job
from forge_core.registry.catalog import Catalog
from forge_core.registry.discovery import discover
from forge_plugins_weights.export import write_checkpoint
from forge_testing.scaffold.plugin_file import write_package_from

AFTERNOONS = [
    DOCS / f"{name}.md" for name in ("write-a-router", "write-an-optimizer", "write-a-mirror", "describe-a-cluster")
]

WEIGHT_LAYOUT = DOCS / "describe-a-weight-layout.md"
"""Has the package that the page of its hook leads to."""

BASE = """
[model]
name = "transformer"
dim = 2048
n_layers = 2
n_heads = 4

[data]
name = "text_files"
path = "corpus"

[train]
steps = 10_000
seq_len = 64

[optimizer]
name = "adamw"
lr = 1e-3
"""
"""What a page leaves out that shows only the section it is about."""


@attrs.frozen
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    caption: str
    """The path of the file that the block is; empty for a block that is none."""
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(
        r"^```(?:\{code-block\} )?([\w{}-]*)\n(?::caption: (\S+)\n)?(.*?)^```$", text, re.M | re.S
    ):
        yield Block(page, text.count("\n", 0, match.start()) + 1, match[1], match[2] or "", match[3])


def configurations(pages: list[Path]) -> list[Block]:
    return [block for page in pages for block in blocks(page) if block.language == "toml" and is_configuration(block)]


def is_configuration(block: Block) -> bool:
    is_typed = block.page.parent.name == "how-to" and block.caption  # by tests/docs/test_how_to.py
    return block.caption != "pyproject.toml" and not is_typed


def packages(page: Path) -> list[Block]:
    """The files of the package that a page builds up."""
    return [block for block in blocks(page) if block.caption.startswith(("src/", "tests/", "example", "pyproject"))]


def plugin_files(page: Path) -> list[Block]:
    """The plugin files that a page shows whole."""
    return [block for block in blocks(page) if re.fullmatch(r"\w+\.py", block.caption)]


def folder_of(page: Path) -> str:
    """The folder into which the reader of the page goes, which has the package's name."""
    return re.search(r"^\$ cd (\S+)$", page.read_text(encoding="utf-8"), re.M)[1]


def refusals(page: Path) -> list[tuple[str, str]]:
    """The commands of the page that print an error, each with that."""
    text = "".join(block.text for block in blocks(page) if block.language == "console")
    return re.findall(r"^\$ (.*)\n(error: .*\n)", text, re.M)


@pytest.fixture(scope="module")
def packages_of_pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a package for each page that builds one up, as ``forge new`` and the page's reader make it."""
    folder = tmp_path_factory.mktemp("pages")
    for page in AFTERNOONS:
        name = folder_of(page)
        if made := re.search(rf"^\$ forge new (\S+) {name}$", page.read_text(encoding="utf-8"), re.M):
            assert main(["new", made[1], name, "--dir", str(folder)]) == 0
        write_files(page, folder / name)
        project = tomllib.loads((folder / name / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        assert project["entry-points"]["forge.v1"] == {name: f"{name.replace('-', '_')}.plugin"}
        install(folder / name, name)
    for page in (*HOOK_PAGES, WEIGHT_LAYOUT):
        for block in plugin_files(page):
            file = folder / "files" / block.caption  # beside a package of its name, it would be imported in its place
            file.parent.mkdir(exist_ok=True)
            file.write_text(block.text, encoding="utf-8")
            kind = page.stem.removeprefix("forge_").removesuffix("s").replace("losse", "loss").replace("passe", "pass")
            package = write_package_from(file, kind, file.stem.replace("_", "-"), folder)
            install(package, package.name)
            for own in packages(page):  # in place of the one that is written
                (package / "tests" / f"test_{kind}.py").unlink()
                (package / own.caption).write_text(own.text, encoding="utf-8")
        for package in {block.caption.split("/")[1] for block in packages(page) if block.caption.startswith("src/")}:
            write_files(page, folder / package)
            install(folder / package, package.replace("_", "-"))
    return folder


def write_files(page: Path, target: Path) -> None:
    for block in packages(page):
        path = target / block.caption
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text, encoding="utf-8")
        if block.caption.startswith("src/"):
            (path.parent / "__init__.py").touch()


def install(project: Path, distribution: str) -> None:
    """What ``pip install -e`` leaves behind, without the seconds that it takes."""
    information = project / "src" / f"{distribution.replace('-', '_')}-0.1.0.dist-info"
    information.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0.1.0\nRequires-Dist: forge-core>=0.1\n"
    (information / "METADATA").write_text(metadata)
    module = distribution.replace("-", "_")
    (information / "entry_points.txt").write_text(f"[forge.v1]\n{distribution} = {module}.plugin\n")


@pytest.fixture(scope="module")
def run_python(packages_of_pages):
    """Runs Python where the packages of all pages are installed."""
    sources = [str(path) for path in packages_of_pages.glob("*/src")]

    def run(*arguments: str, folder: Path = packages_of_pages, **variables: str) -> subprocess.CompletedProcess[str]:
        path = [*sources, *([str(Path(fork_server.__file__).parent)] if "pytest" in arguments else [])]
        settings = {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
        environment = {**os.environ, **settings, **variables}
        return fork_server.run(
            [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
        )

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "chosen",
    [("-k", "not nothing_heavy and not prints_nothing"), pytest.param((), marks=pytest.mark.nightly)],
    ids=["by-day", "all"],
)
def test_the_packages_of_all_pages_keep_the_contracts(run_python, packages_of_pages, chosen):
    """By day without what starts a process for each package to see what it imports, as the kits of ours do."""
    tests = sorted(str(path) for path in packages_of_pages.glob("*/tests"))
    # test modules are named after their place below this, and `ademamix.tests` would hide the package `ademamix`
    root = f"--rootdir={packages_of_pages.parent}"

    done = run_python(
        *("-m", "pytest", "-q", "-W", "error", "-W", fork_server.ALREADY, "--import-mode=importlib"),
        *("-p", "no:cacheprovider"),
        *("-p", "forked_ranks", root, *chosen, *tests),
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert len(tests) == len(HOOK_PAGES) + 2 + len(AFTERNOONS)  # two pages have two examples


@pytest.mark.slow
@pytest.mark.parametrize("page", AFTERNOONS, ids=lambda page: page.stem)
def test_the_afternoon_ends_with_a_run(run_python, packages_of_pages, page):
    folder = packages_of_pages / folder_of(page)

    for command in ("validate", "run"):
        done = run_python("-m", "forge_core", command, "example.toml", folder=folder)
        assert done.returncode == 0, done.stdout + done.stderr

    (from_python,) = [block for block in blocks(DOCS / "checkpoints.md") if block.language == "python"]
    done = run_python("-c", from_python.text.replace("runs/demo", "runs/example"), folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = (folder / "runs" / "example" / "metrics.jsonl").read_text().splitlines()
    assert metrics[-1].startswith('{"step": 30,')


@pytest.mark.parametrize(
    ("page", "command", "error"),
    [(page, *refusal) for page in AFTERNOONS for refusal in refusals(page)],
    ids=lambda one: one.stem if isinstance(one, Path) else "",
)
def test_a_wrong_input_prints_the_sentence_of_the_page(run_python, packages_of_pages, page, command, error):
    variables, arguments = command.split("forge ", 1)
    given = dict(word.split("=") for word in variables.split())

    done = run_python("-m", "forge_core", *shlex.split(arguments), folder=packages_of_pages / folder_of(page), **given)

    assert (done.returncode, done.stderr) == (2, error)


def test_the_pages_on_a_mirror_and_a_cluster_show_a_wrong_input():
    assert [len(refusals(page)) for page in AFTERNOONS] == [0, 0, 1, 1]


@pytest.mark.slow
def test_the_mirror_of_the_page_brings_a_lost_run_back(run_python, packages_of_pages):
    folder = packages_of_pages / "second-disk"
    command = ("-m", "forge_core", "run", "example.toml", "run.name=lost")
    assert run_python(*command, "train.steps=10", folder=folder).returncode == 0
    shutil.rmtree(folder / "runs" / "lost")

    done = run_python(*command, folder=folder)

    assert done.returncode == 0, done.stderr
    assert "step_00000010: not here; fetching it from disk/lost/checkpoints" in done.stdout
    assert "done: 30 steps, the last 20 in" in done.stdout


@pytest.mark.slow
def test_tasks_of_the_cluster_of_the_page_are_ranks_of_one_run(run_python, packages_of_pages):
    folder, page = packages_of_pages / "harbour", (DOCS / "describe-a-cluster.md").read_text(encoding="utf-8")
    given = dict(word.split("=") for word in re.search(r"^\$ export (.*)$", page, re.M)[1].split())
    given["HARBOUR_JOB"] = str(os.getpid())  # the port goes by it

    def task(number: str) -> subprocess.CompletedProcess[str]:
        command = ("-m", "forge_core", "run", "example.toml", "run.name=two")
        return run_python(*command, folder=folder, HARBOUR_TASK=number, **given)

    with ThreadPoolExecutor() as threads:
        ranks = [*threads.map(task, "01")]

    assert [rank.returncode for rank in ranks] == [0, 0], ranks[0].stderr + ranks[1].stderr
    environment = json.loads((folder / "runs" / "two" / "environment.json").read_text(encoding="utf-8"))
    assert environment["mesh"]["dp_shard"] == 2


@pytest.mark.parametrize("name", ["plain_folder", "second_disk"])
def test_mirrors_of_the_pages_flush_what_they_copy(catalog_of_pages, tmp_path, monkeypatch, name):
    build, source = ComponentBuilder(catalog_of_pages), tmp_path / "here" / "step_00000005"
    given = {"state": {}, "step": 5, "tokens": 0, "versions": {}, "write_more": lambda folder: None}
    write_checkpoint(source, {}, lambda key: None, **given)
    context = MirrorContext(
        run_name="demo", folder=source.parent, section=CheckpointSection(), say=print, run_on_rank0=lambda work: work()
    )
    mirror = build(build.resolve("checkpoint_mirror", {"name": name, "folder": str(tmp_path)}), context=context)
    start = {"job_toml": "", "step": -1, "may_start_without": False, "refuse_if_lost": lambda: None}
    flushed = []
    monkeypatch.setattr("forge_core.checkpoint.fsync.flush", flushed.append)

    mirror.begin(MirrorStart(attempt="one", write_event=print, **start))
    mirror.saved(source)
    assert [*mirror.available()] == [5]
    assert mirror.fetch(5, tmp_path / "fetched") is None

    files = {path.name for path in source.iterdir()}
    assert {path.name for path in flushed if path.parent.suffix == ".partial"} == files
    assert {path.name for path in flushed if path.parent.name == "fetched"} == files


def layouts(page: Path) -> list[str]:
    """The runs that the page shows as the same training on several ranks."""
    return re.findall(r"^\$ forge (run example.toml .*--run.name=.*)$", page.read_text(encoding="utf-8"), re.M)


@pytest.mark.nightly  # by day, tests/outsider/test_router.py has one of another package in such layouts
@pytest.mark.timeout(1200)
def test_the_router_of_the_afternoon_trains_the_same_in_layouts_that_the_page_shows(run_python, packages_of_pages):
    page = DOCS / "write-a-router.md"
    folder = packages_of_pages / "biased-topk"
    alone = "run example.toml --run.name=alone"
    without_others = 'plugins.disable=["relay"]'  # which another page makes, and has a pipeline too
    commands = layouts(page)
    assert len(commands) == 6

    curves = {}
    for command in (alone, *commands):
        words = [*shlex.split(command, comments=True), "--resume", "never", without_others]
        done = run_python("-m", "forge_core", *words, folder=folder)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        (name,) = (word.removeprefix("--run.name=") for word in words if word.startswith("--run.name="))
        curves[command] = losses(folder / "runs" / name)

    assert len(curves[alone]) == 30
    for command, curve in curves.items():
        assert curve[:20] == pytest.approx(curves[alone][:20], rel=1e-6), command
        # from there on this run, on the text of its own package, makes what was rounded off larger in each step
        assert curve == pytest.approx(curves[alone], rel=1e-3), command


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def catalog_of_pages(packages_of_pages) -> Iterator[Catalog]:
    loaded = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        for source in packages_of_pages.glob("*/src"):
            patch.syspath_prepend(source)
        yield discover()
    for module in set(sys.modules) - loaded:
        if str(getattr(sys.modules[module], "__file__", None)).startswith(str(packages_of_pages)):
            del sys.modules[module]


def test_the_packages_of_all_pages_load(catalog_of_pages):
    assert not [f"{plugin}: {plugin.reason}" for plugin in catalog_of_pages.plugins if plugin.status != "ok"]


@pytest.fixture(scope="module")
def catalog_of_jobs(catalog_of_pages) -> Catalog:
    """Without packages whose component takes the place of one of ours, as a user has one of both."""
    return discover(["from-the-top", "numpy-start"])


@pytest.mark.parametrize("block", configurations(PAGES), ids=str)
def test_configurations_are_valid(catalog_of_jobs, tmp_path, block):
    """Whole ones as they are, on top of the repository's files; parts on top of a small job."""
    if 'name = "torchft"' in block.text:
        pytest.importorskip("torchft")  # which has no wheel for every Python
    path = (ROOT / "configs" if "extends" in tomllib.loads(block.text) else tmp_path) / ".of-the-docs.toml"
    text = block.text
    if "extends" not in tomllib.loads(text) and "train" not in tomllib.loads(text):
        (tmp_path / "base.toml").write_text(BASE)
        text = f'extends = "base.toml"\n{text}'
    try:
        path.write_text(text, encoding="utf-8")
        load_job(path, ["run.name=docs"], catalog=catalog_of_jobs)
    finally:
        path.unlink()


@pytest.mark.parametrize("block", [b for page in PAGES for b in blocks(page) if b.language == "python"], ids=str)
def test_python_compiles(block):
    compile(block.text, str(block), "exec")


@pytest.mark.parametrize("block", [b for b in blocks(ROOT / "README.md") if b.language == "python"], ids=str)
def test_python_of_the_readme_runs(block):
    exec(compile(block.text, str(block), "exec"), {"__name__": "readme"})
