"""The documentation says what the code does: signatures, tables, links, and a word for every key."""

from __future__ import annotations

import importlib.util
import json
import pkgutil
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from doc_pages import DOCS, HOOKS, HOOKS_OF_PACKAGES, PAGES, ROOT
from forge_core.config.builder import ComponentBuilder, config_class
from forge_core.config.field_docs import field_docs
from forge_core.config.sections import Job
from forge_core.job import InvalidError, structure
from forge_core.registry.catalog import Catalog, CatalogEntry
from forge_core.registry.component import PHASES, Kind
from forge_core.registry.discovery import discover
from forge_core.registry.hookspecs import BESIDE_COMPONENTS, CORE_KINDS

GENERATED = tuple(
    f"generated/{name}.md"
    for name in [
        *("commands", "config-reference", "events", "families", "fusions", "hooks", "json", "moved-modules"),
        *("passes", "sites", "smallest"),
    ]
)

PACKAGES = [*sorted(ROOT.glob("plugins/*/")), *sorted(ROOT.glob("forge_plugins_*/")), ROOT / "forge_testing"]

# -- every hook and every key has its words


@pytest.mark.parametrize("hook", [*HOOKS, *HOOKS_OF_PACKAGES])
def test_every_hook_has_a_page_with_its_signature(hook):
    kinds = {kind.hook: kind for kind in CORE_KINDS} | kinds_of_packages()
    yielded = BESIDE_COMPONENTS.get(hook) or kinds[hook].descriptor

    page = (DOCS / "hooks" / f"{hook}.md").read_text(encoding="utf-8")

    assert f"\n## `{hook}() -> Iterable[{yielded.__name__}]`\n" in page
    assert f"\n{hook}\n" in (DOCS / "hooks" / "index.md").read_text(encoding="utf-8")


def test_there_is_no_page_of_a_hook_that_does_not_exist():
    assert sorted([*HOOKS, *HOOKS_OF_PACKAGES]) == sorted(path.stem for path in DOCS.glob("hooks/forge_*.md"))


def kinds_of_packages() -> dict[str, Kind]:
    """By their hooks."""
    return {kind.hook: kind for plugin in discover().plugins for kind in plugin.kinds}


def config_classes() -> dict[str, type]:
    """Those of the core's sections and of our installed components, with the classes of their fields."""
    catalog = discover()
    sections = (field.type for field in attrs.fields(attrs.resolve_types(Job)))
    found: list[type] = [part for one in sections for part in all_parts(one) if attrs.has(part)]
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


def test_a_table_in_a_sentence_is_what_one_of_our_keys_takes():
    spans = [
        (page.name, key, " ".join(table.split()))
        for page in PAGES
        for key, table in re.findall(r"`(?:\w+\.)*(\w+) = (\{[^`…]*\})`", page.read_text(encoding="utf-8"))
    ]
    classes, catalog, looked_at = config_classes().values(), discover(), set()
    for page, key, table in spans:
        if types := [field.type for cls in classes for field in attrs.fields(cls) if field.name == key]:
            value = tomllib.loads(f"value = {table}")["value"]
            problems = [problem_of(value, one, catalog) for one in types]
            assert "" in problems, f"{page}: {key} = {table}: {problems}"
            looked_at.add(page)
    assert {"chat.md", "image-data.md", "preference-tuning.md"} <= looked_at


def problem_of(value: object, annotation: type, catalog: Catalog) -> str:
    """Why a value of a configuration is not of a type; empty if it is."""
    try:
        structure(value, annotation, catalog)
    except InvalidError as error:
        return str(error)
    return ""


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
    assert layouts["CP2"]["`cross_attention`"] == "✓, packed, bf16"
    assert layouts["CP2"]["`moma`"] == ""
    assert layouts["EP2 × FSDP2"]["`moma`"] == "✓, bf16"
    assert layouts["TP2"]["`moma`"] == "✓, bf16 with the choices of one process"
    assert layouts["PP2 (ZBVZeroBubble) × FSDP2"]["`joint_decoder`"] == "✓, packed, frozen and thawed, bf16"
    assert layouts["TP2"]["`mixture_of_transformers`"] == "✓, bf16"


def test_the_table_of_families_has_every_architecture_with_its_shapes_and_tests(tmp_path):
    generate_reference(tmp_path)
    lines = (tmp_path / "families.md").read_text(encoding="utf-8").splitlines()
    rows = {cells[0]: cells[1:] for line in lines if len(cells := [one.strip() for one in line.split("|")[1:-1]]) > 1}
    catalog = discover()
    build = ComponentBuilder(catalog)

    entries = [entry.qualified_name for entry in catalog.components("weight_layout")]
    layouts = {name: build(build.resolve("weight_layout", name)) for name in entries}
    of_layouts = {f"`{one}`": f"`{name}`" for name, layout in layouts.items() for one in layout.architectures}
    assert len(of_layouts) > 20
    assert {name: cells[0] for name, cells in rows.items() if name.startswith("`")} == of_layouts
    shapes = {shape for cells in rows.values() for shape in re.findall(r"`(\w+)`", cells[1])}
    published = ROOT / "plugins" / "forge_plugins_hf" / "tests" / "published_models.json"
    assert shapes == json.loads(published.read_text(encoding="utf-8")).keys()
    assert "`qk_norm_over`" in rows["`Olmo2ForCausalLM`"][2]
    assert rows["`GptOssForCausalLM`"][3] == "`forge_plugins_moe/tests/test_gpt_oss.py`"
    assert [name for name in of_layouts if not rows[name][3]] == [], "no test compares them with transformers"


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
