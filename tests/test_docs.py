"""The documentation says what the code does: signatures, examples, links, and a word for every key."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import pkgutil
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
from forge_core.checkpoint.export import write_checkpoint
from forge_core.cli import main
from forge_core.config.builder import ComponentBuilder, config_class
from forge_core.config.field_docs import field_docs
from forge_core.config.sections import CheckpointSection, Job
from forge_core.contracts.checkpoint_mirror import MirrorContext, MirrorStart
from forge_core.job import load_job
from forge_core.registry.catalog import Catalog, CatalogEntry
from forge_core.registry.component import PHASES, Kind
from forge_core.registry.discovery import discover
from forge_core.registry.hookspecs import ForgeSpecs, specifications
from forge_testing.scaffold.plugin_file import write_package_from

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
GENERATED = tuple(
    f"generated/{name}.md"
    for name in [
        *("commands", "config-reference", "events", "fusions", "hooks", "moved-modules"),
        *("passes", "sites", "smallest"),
    ]
)

HOOKS = [name for name in vars(ForgeSpecs) if name.startswith("forge_")]
HOOKS_OF_PACKAGES = [
    *("forge_report_sections", "forge_representation_metrics", "forge_run_columns"),
    *("forge_connectors", "forge_fusions", "forge_image_processors", "forge_vision_encoders"),
]
"""Of kinds that packages of ours add, those that have a page."""
HOOK_PAGES = [DOCS / "hooks" / f"{hook}.md" for hook in (*HOOKS, *HOOKS_OF_PACKAGES)]
AFTERNOONS = [
    DOCS / f"{name}.md" for name in ("write-a-router", "write-an-optimizer", "write-a-mirror", "describe-a-cluster")
]
PACKAGES = [*sorted(ROOT.glob("plugins/*/")), *sorted(ROOT.glob("forge_plugins_*/")), ROOT / "forge_testing"]
PAGES = [
    *(path for path in sorted(DOCS.rglob("*.md")) if not {"_build", "generated"} & set(path.parts)),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *(ROOT / name / "README.md" for name in ("forge_testing", "forge_train")),
    *sorted(ROOT.glob("plugins/*/README.md")),
    *sorted(ROOT.glob("forge_plugins_*/README.md")),
]

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


# -- every hook and every key has its words


@pytest.mark.parametrize("hook", [*HOOKS, *HOOKS_OF_PACKAGES])
def test_every_hook_has_a_page_with_its_signature(hook):
    specs = ForgeSpecs if hook in HOOKS else specifications({hook: kinds_of_packages()[hook].descriptor})
    signature = str(inspect.signature(getattr(specs, hook))).replace("(self)", "()").replace("'", "")

    page = (DOCS / "hooks" / f"{hook}.md").read_text(encoding="utf-8")

    assert f"\n## `{hook}{signature}`\n" in page
    assert f"\n{hook}\n" in (DOCS / "hooks" / "index.md").read_text(encoding="utf-8")


def test_there_is_no_page_of_a_hook_that_does_not_exist():
    assert sorted([*HOOKS, *HOOKS_OF_PACKAGES]) == sorted(path.stem for path in DOCS.glob("hooks/forge_*.md"))


def kinds_of_packages() -> dict[str, Kind]:
    """By their hooks."""
    return {kind.hook: kind for plugin in discover().plugins for kind in plugin.kinds}


def config_classes() -> dict[str, type]:
    """Those of the core's sections and of our installed components, with the classes of their fields."""
    catalog = discover()
    found: list[type] = [field.type for field in attrs.fields(attrs.resolve_types(Job)) if attrs.has(field.type)]
    for plugin in catalog.plugins:
        if plugin.distribution.startswith("forge-plugins-"):
            for kind, component in plugin.components:
                found.append(config_class(CatalogEntry(component, plugin), catalog.kinds[kind])[0])
    for cls in found:
        for field in attrs.fields(attrs.resolve_types(cls)):
            found += [part for part in all_parts(field.type) if attrs.has(part) and part not in found]
    return {f"{cls.__module__}.{cls.__qualname__}": cls for cls in found if cls.__qualname__ != "ComponentRef"}


def all_parts(annotation: object) -> Iterator[type]:
    if isinstance(annotation, type):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from all_parts(argument)


@pytest.mark.parametrize("name", config_classes())
def test_every_key_is_documented(name):
    cls = config_classes()[name]

    assert cls.__doc__
    assert not {field.name for field in attrs.fields(cls) if field.init} - field_docs(cls).keys()


def test_the_generated_reference_names_every_key(tmp_path):
    reference = generate_reference(tmp_path)

    for cls in config_classes().values():
        for field in attrs.fields(cls):
            assert f"| `{field.name}` |" in reference


def generate_reference(folder: Path) -> str:
    specification = importlib.util.spec_from_file_location("generate_reference", DOCS / "generate_reference.py")
    module = importlib.util.module_from_spec(specification)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        specification.loader.exec_module(module)
    module.write_reference(folder)
    kinds = sorted(folder.glob("config-*.md"))
    assert {path.name for path in folder.iterdir()} == {Path(name).name for name in GENERATED} | {
        one.name for one in kinds
    }
    return "\n".join(path.read_text(encoding="utf-8") for path in kinds)


TERMS = re.findall(r"^\| \*\*(.+)\*\* \| .+ \| (.+) \|$", (DOCS / "glossary.md").read_text(encoding="utf-8"), re.M)
"""Each term of the glossary, and where it lives."""


def test_the_glossary_has_each_term_once():
    words = [term.lower() for term, _ in TERMS]

    assert len(words) > 50
    assert sorted(words) == sorted(set(words))


@pytest.mark.parametrize(("term", "where"), TERMS, ids=[term for term, _ in TERMS])
def test_what_the_glossary_names_is_there(term, where):
    """Modules, their names, and keys such as ``train.steps``."""
    names = re.findall(r"`([\w.]+)`", where)
    assert ", ".join(f"`{name}`" for name in names) == where

    for name in names:
        if name.startswith("forge_"):
            pkgutil.resolve_name(name)
        else:
            section, key = name.split(".")
            assert key in attrs.fields_dict(getattr(attrs.fields(attrs.resolve_types(Job)), section).type)


# -- examples run


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
    for page in HOOK_PAGES:
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
        start = subprocess.run if "pytest" in arguments else fork_server.run  # kits look at what is imported, and when
        return start(
            [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
        )

    return run


@pytest.mark.slow
def test_the_packages_of_all_pages_keep_the_contracts(run_python, packages_of_pages):
    tests = sorted(str(path) for path in packages_of_pages.glob("*/tests"))
    # test modules are named after their place below this, and `ademamix.tests` would hide the package `ademamix`
    root = f"--rootdir={packages_of_pages.parent}"

    done = run_python(
        *("-m", "pytest", "-q", "-W", "error", "--import-mode=importlib", "-p", "no:cacheprovider"),
        *("-p", "forked_ranks", root, *tests),
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


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("shown", [[1], pytest.param(range(6), marks=pytest.mark.nightly)], ids=["ep", "all"])
def test_the_router_of_the_afternoon_trains_the_same_in_layouts_that_the_page_shows(
    run_python, packages_of_pages, shown
):
    page = DOCS / "write-a-router.md"
    folder = packages_of_pages / "biased-topk"
    alone = "run example.toml --run.name=alone"
    without_others = 'plugins.disable=["relay"]'  # which another page makes, and has a pipeline too
    commands = layouts(page)
    assert len(commands) == 6

    curves = {}
    for command in (alone, *(commands[number] for number in shown)):
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


@pytest.mark.parametrize("block", configurations(PAGES), ids=str)
def test_configurations_are_valid(catalog_of_pages, tmp_path, block):
    """Whole ones as they are, on top of the repository's files; parts on top of a small job."""
    path = (ROOT / "configs" if "extends" in tomllib.loads(block.text) else tmp_path) / ".of-the-docs.toml"
    text = block.text
    if "extends" not in tomllib.loads(text) and "train" not in tomllib.loads(text):
        (tmp_path / "base.toml").write_text(BASE)
        text = f'extends = "base.toml"\n{text}'
    try:
        path.write_text(text, encoding="utf-8")
        load_job(path, ["run.name=docs"], catalog=catalog_of_pages)
    finally:
        path.unlink()


@pytest.mark.parametrize("block", [b for page in PAGES for b in blocks(page) if b.language == "python"], ids=str)
def test_python_compiles(block):
    compile(block.text, str(block), "exec")


@pytest.mark.parametrize("block", [b for b in blocks(ROOT / "README.md") if b.language == "python"], ids=str)
def test_python_of_the_readme_runs(block):
    exec(compile(block.text, str(block), "exec"), {"__name__": "readme"})


def test_the_table_of_passes_has_every_phase_pass_need_and_conflict(tmp_path):
    generate_reference(tmp_path)
    page = (tmp_path / "passes.md").read_text(encoding="utf-8")
    passes = [one.component for one in discover().components("parallel_pass")]
    assert passes

    for phase, reason in PHASES.items():
        assert f"| **{phase}** | {reason} |" in page
    rows = page.splitlines()
    for one in passes:
        (row,) = [line for line in rows if line.startswith(f"| `{one.name}` | {one.phase} | ")]
        assert all(f"`{axis}`" in row for axis in one.serves)
        assert all(f"`{need.other}`" in row for need in one.needs if not need.when)
        for declared in (*one.conflicts, *(need for need in one.needs if need.when)):
            (row,) = [line for line in rows if line.startswith(f"| `{one.name}` | ") and declared.reason in line]
            assert declared.other in row
            assert all(f"{key} = " in row for key in declared.when)


def test_the_table_of_fusions_has_the_layouts_that_are_trained(tmp_path):
    generate_reference(tmp_path)
    rows = (tmp_path / "fusions.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows if row.startswith("| ")]

    layouts = {layout: dict(zip(cells[0][1:], trainings, strict=True)) for layout, *trainings in cells[2:]}
    assert layouts["CP2"]["`cross_attention`"] == "✓, packed"
    assert layouts["CP2"]["`moma`"] == ""
    assert layouts["EP2 × FSDP2"]["`moma`"] == "✓"
    assert layouts["PP2 (ZBVZeroBubble) × FSDP2"]["`joint_decoder`"] == "✓, packed, frozen and thawed"
    assert layouts["TP2"]["`mixture_of_transformers`"] == "✓"


def test_the_table_of_moved_modules_has_every_old_name(tmp_path):
    generate_reference(tmp_path)
    rows = (tmp_path / "moved-modules.md").read_text(encoding="utf-8").splitlines()
    moved = tomllib.loads((ROOT / "forge_core" / "moved.toml").read_text(encoding="utf-8"))

    assert "| `forge_core.builder` | `forge_core.config.builder` | forge-core |" in rows
    assert "| `forge_core.commands.plan` | `forge_plugins_plan.command` | forge-plugins-plan |" in rows
    assert sum(row.startswith("| `") for row in rows) == len(moved["aliases"]) + len(moved["gone"])


def test_the_page_on_architecture_has_the_phases_in_their_order():
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")

    assert re.findall(r"^\| \*\*(\w+)\*\*", page, re.M) == list(PHASES)


SHORTER = {
    "first_run.ipynb": {"steps = 600": "steps = 120"},
    "layout.ipynb": {"n_layers = 16": "n_layers = 2"},
    "model.ipynb": {},
    "checkpoints.ipynb": {},
    "optimizers.ipynb": {"steps = 120": "steps = 60"},
    "interpretability.ipynb": {
        "steps = 400": "steps = 160",
        "seq_len = 128": "seq_len = 64",
        "steps = 250": "steps = 20",
        '"--samples", "300"': '"--samples", "60"',
        "range(300)": "range(60)",
        "[:20_000]": "[:2_000]",
    },
    "image_attention.ipynb": {"steps = 400": "steps = 40", '"2048"': '"256"'},
    "routing.ipynb": {},
}
"""Less training than in the notebooks as they are published."""


@pytest.mark.parametrize("notebook", sorted(DOCS.glob("notebooks/*.ipynb")), ids=lambda path: path.name)
def test_notebooks_run(tmp_path, notebook):
    """In a copy; the outputs that a notebook is kept with are of the same kinds."""
    folder = Path(shutil.copytree(notebook.parent, tmp_path / "notebooks"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    text = notebook.read_text(encoding="utf-8")
    for long, short in SHORTER[notebook.name].items():
        long, short = (json.dumps(one)[1:-1] for one in (long, short))
        assert text.count(long) == 1, long
        text = text.replace(long, short)
    (folder / notebook.name).write_text(text, encoding="utf-8")

    done = subprocess.run(
        [sys.executable, "execute.py", notebook.name], cwd=folder, env=environment, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
    kept, executed = (shown(path) for path in (notebook, folder / notebook.name))
    assert any("image/svg+xml" in kinds for kinds in executed)
    assert kept == executed


@pytest.fixture
def drawing(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS / "notebooks"))
    return importlib.import_module("drawing")


def test_bars_are_as_high_as_their_parts_and_lines_go_where_values_are(drawing):
    bars = drawing.stacked_bars({"a": {"x": 1.0, "y": 3.0}}, title="", y="", limit=("full", 8.0))._repr_svg_()
    low, high = (float(one) for one in re.findall(r'height="([\d.]+)" fill="#', bars))
    at = float(re.search(r"M60 ([\d.]+)h", bars)[1])

    assert high == pytest.approx(3 * low, abs=0.2)
    assert drawing.TOP + drawing.HEIGHT - at == pytest.approx(8 * low, abs=0.5)

    line = drawing.lines({"a": {1.0: 0.0, 10.0: 1.0, 100.0: 4.0}}, title="", x="", y="", log=True)._repr_svg_()
    assert re.search(r'points="([^"]*)"', line)[1] == "60.0,210.0 320.0,165.0 580.0,30.0"


def test_more_lines_than_colors_are_refused(drawing):
    with pytest.raises(ValueError, match="8 names, and there are 7 colors"):
        drawing.lines({str(name): {0.0: 0.0, 1.0: 1.0} for name in range(8)}, title="", x="", y="")


def shown(notebook: Path) -> list[list[str]]:
    """What each cell shows, in kinds."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [[kind for output in cell.get("outputs", []) for kind in output.get("data", ["text"])] for cell in cells]


# -- links and paths


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(#[^)\s]*)?\)", text):
        path = (page.parent / target).resolve() if target else page
        if path.is_relative_to(DOCS) and str(path.relative_to(DOCS)) in GENERATED:
            continue
        assert path.exists(), f"{page.name} links to {target}, which is not there"
        if anchor and path.suffix == ".md":
            assert anchor[1:] in anchors(path), f"{page.name} links to {target}{anchor}, and there is no such heading"


def anchors(page: Path) -> set[str]:
    """The names that GitHub and MyST give to headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_a_package_is_whole_by_itself(package):
    """Its wheel has the licence, and its README, which an index shows without the repository, no link into that."""
    assert (package / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    project = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["license-files"] == ["LICENSE"]
    assert re.findall(r"\]\((?!https?:|#)[^)]*\)", (package / "README.md").read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_are_there(page):
    text = page.read_text(encoding="utf-8")
    for path in re.findall(r"`((?:forge_core|tests|plugins|configs|docs|benchmarks)/[\w/.-]+\.(?:py|toml|md))`", text):
        assert (ROOT / path).exists() or (page.parent / path).exists(), f"{page.name} names {path}, which is not there"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_paths_of_a_machine(page):
    assert not re.search(r"(?<![\w.])/(home|work|root|Users|mnt|opt|srv)/", page.read_text(encoding="utf-8"))


# -- the build
