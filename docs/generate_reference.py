"""Writes the pages that are made of data: the configuration reference, commands and their JSON, events, and tables of
families, hooks, passes, sites, layouts of fusions and moved modules.

``docs/conf.py`` calls it at every build; ``python docs/generate_reference.py FOLDER`` does the same by hand. Only the
table of sites imports torch, to build small models: config classes are free of it.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import attrs
from command_reference import command_reference  # these lie beside this file
from event_reference import event_reference
from families import families
from json_reference import json_reference
from layouts_of_fusions import trained_layouts
from markdown_table import table

import forge_core
from forge_core.config.builder import config_class
from forge_core.config.field_docs import field_docs, type_words
from forge_core.config.sections import Job
from forge_core.config.validators import schema_limits
from forge_core.passes.rules import condition_words, other_words
from forge_core.registry.catalog import Catalog, CatalogEntry
from forge_core.registry.component import PHASES, Kind, PassComponent, Slot
from forge_core.registry.discovery import discover
from forge_core.registry.hookspecs import BESIDE_COMPONENTS, CORE_KINDS


def write_reference(folder: Path) -> None:
    """Write the pages for what is installed. Unchanged files are left alone."""
    catalog = discover()
    folder.mkdir(parents=True, exist_ok=True)
    pages = {
        "commands.md": command_reference(catalog),
        "config-reference.md": config_reference(catalog),
        **{f"{_page_of(kind)}.md": kind_reference(catalog, kind) for kind in _kinds(catalog)},
        "events.md": event_reference(),
        "families.md": family_table(catalog),
        "fusions.md": fusion_tables(catalog),
        "hooks.md": hook_table(catalog),
        "json.md": json_reference(catalog),
        "moved-modules.md": moved_modules(),
        "passes.md": pass_tables(catalog),
        "sites.md": site_tables(catalog),
        "smallest.md": smallest_plugins(Path(__file__).with_name("hooks")),
    }
    for name, lines in pages.items():
        page, text = folder / name, "\n".join(lines) + "\n"
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")


def config_reference(catalog: Catalog) -> Iterator[str]:
    """Every key of every section, and where those of components are."""
    yield "# Configuration reference"
    yield ""
    yield "Generated from the configuration classes of `forge_core` and of the installed plugins. What a key means is"
    yield "the docstring under its field; `forge plugins show KIND NAME` prints the same for all else that you install."
    yield ""
    yield "## Sections"
    yield ""
    for field in attrs.fields(attrs.resolve_types(Job, include_extras=True)):
        yield from _section(field, catalog)
    yield "## Components"
    yield ""
    yield "A page for each kind:"
    yield ""
    yield "```{toctree}"
    yield ":maxdepth: 1"
    yield ""
    yield from map(_page_of, _kinds(catalog))
    yield "```"


def kind_reference(catalog: Catalog, kind: str) -> Iterator[str]:
    """Every key of the installed components of a kind."""
    yield f"# Kind: {kind.replace('_', ' ')}"
    yield ""
    for provided in catalog.components(kind):
        yield from _component(catalog.kinds[kind], provided)


def _kinds(catalog: Catalog) -> list[str]:
    """Those of which something is installed."""
    return [kind for kind in catalog.kinds if catalog.components(kind)]


def _page_of(kind: str) -> str:
    return f"config-{kind.replace('_', '-')}"


def hook_table(catalog: Catalog) -> Iterator[str]:
    """The hooks of the core, what each yields, and where a configuration chooses one of it."""
    yield "# Table of hooks"
    yield ""
    yield "Generated from the kinds of the core, `CORE_KINDS` in `forge_core/registry/hookspecs.py`. A hook takes no"
    yield "arguments. *Chosen by* names the sections of a job, and the keys of installed components."
    yield ""
    chosen: dict[str, list[str]] = {}
    for words, kind in _choices(catalog):
        chosen.setdefault(kind, []).append(words)
    rows = [
        (
            f"[`{kind.hook}`](../hooks/{kind.hook}.md)",
            kind.descriptor.__name__,
            kind.summary,
            _code(kind.contract.replace(":", ".")),
            ", ".join(dict.fromkeys(chosen.get(kind.name, ()))),
        )
        for kind in CORE_KINDS
    ]
    rows += [
        (f"[`{hook}`](../hooks/{hook}.md)", description.__name__, description.__doc__ or "", "", "")
        for hook, description in BESIDE_COMPONENTS.items()
    ]
    yield from table(("hook", "yields", "which is", "contract", "chosen by"), rows)


def _choices(catalog: Catalog) -> Iterator[tuple[str, str]]:
    """Every key that chooses a component, in words, and its kind."""
    for section in attrs.fields(attrs.resolve_types(Job, include_extras=True)):
        if slot := _slot(section.type):
            yield f"`[{section.name}]`", slot.kind
        elif attrs.has(section.type):
            for field in attrs.fields(attrs.resolve_types(section.type, include_extras=True)):
                if slot := _slot(field.type):
                    yield f"`[{section.name}] {field.name}`", slot.kind
    for kind in catalog.kinds:
        for provided in catalog.components(kind):
            cls, _ = config_class(provided, catalog.kinds[kind])
            for field in attrs.fields(attrs.resolve_types(cls, include_extras=True)):
                if slot := _slot(field.type):
                    yield f"`{field.name}` of a {kind.replace('_', ' ')}", slot.kind


def pass_tables(catalog: Catalog) -> Iterator[str]:
    """The phases, the installed passes in the order in which they are applied, and what excludes what."""
    phases = tuple(PHASES)
    passes = [one.component for one in catalog.components("parallel_pass")]
    passes = sorted((one for one in passes if isinstance(one, PassComponent)), key=lambda one: phases.index(one.phase))
    yield "# Table of passes"
    yield ""
    yield "Generated from what the installed passes declare; `forge plugins show parallel_pass NAME` says the same of"
    yield "one pass, and `forge validate` reports every need and every conflict of a job at once."
    yield ""
    yield "## Phases"
    yield ""
    yield "Passes change a model in this order, in any order of the configuration:"
    yield ""
    yield from table(("phase", "here because"), ((f"**{phase}**", reason) for phase, reason in PHASES.items()))
    yield ""
    yield "## Passes"
    yield ""
    rows = []
    for one in passes:
        lists = (one.serves, one.after, one.before, [need.other for need in one.needs if not need.when])
        rows.append((f"`{one.name}`", one.phase, one.summary, *(", ".join(map(_code, names)) for names in lists)))
    yield from table(("pass", "phase", "what it does", "serves", "after", "before", "needs"), rows)
    yield ""
    yield "## Needs and conflicts"
    yield ""
    yield "Of the pass with these values of its keys, or, where there are none, with any keys."
    yield ""
    found = []
    for one in passes:
        for need in (need for need in one.needs if need.when):
            words = f"needs {_code(need.other)}"
            found.append((_code(one.name), _code(condition_words(need.when)), words, need.reason))
        for conflict in one.conflicts:
            words = f"cannot be combined with {_code(other_words(conflict))}"
            found.append((_code(one.name), _code(condition_words(conflict.when)), words, conflict.reason))
    yield from table(("pass", "where", "rule", "because"), found)


def fusion_tables(catalog: Catalog) -> Iterator[str]:
    """The layouts in which each fusion is trained against one process, and the axes that it refuses."""
    fusions = {one.component.name: one for one in catalog.components("fusion")}
    yield "# Layouts of fusions"
    yield ""
    yield "Generated from the parity matrix, `tests/parity/parity_matrix/cells.py`, and from what fusions declare"
    yield "(`FusionConfig.unsupported`). Each entry is a training of ten steps with the losses and gradient norms of"
    yield "one process: in fp32 to 1e-5, in bf16 losses to 2e-3 and norms to 2e-2. An empty entry is no run of the"
    yield "matrix: `forge validate` says what is refused. Experts choose tokens by what rounding moves: where it"
    yield "says so, they are given [those of one process](../moe.md#what-rounding-chooses)."
    yield ""
    rows = (
        (layout, *(", ".join(trainings.get(name, ())) for name in fusions))
        for layout, trainings in trained_layouts().items()
    )
    yield from table(("layout", *map(_code, fusions)), rows)
    yield ""
    yield "## Refused axes"
    yield ""
    refused: list[tuple[str, str, str]] = []
    for name, one in fusions.items():
        cls, _ = config_class(one, catalog.kinds["fusion"])
        refused += [(_code(name), _code(f"parallel.{axis}"), reason) for axis, reason in cls.unsupported.items()]
    if not refused:
        yield "None of them refuses an axis of `[parallel]` altogether. Some of their keys do."
        return
    yield from table(("fusion", "axis", "because"), refused)


def family_table(catalog: Catalog) -> Iterator[str]:
    """Each architecture that is read and written, with its shapes, keys and tests."""
    yield "# Families of published models"
    yield ""
    yield "Generated from the installed weight layouts, from `configs/model`, and from the tests that compare a family"
    yield "with `transformers`. *Shapes* have the published number of parameters. *Keys* are those of `[model]` that"
    yield "the shapes set beside sizes and the feed-forward layer."
    yield ""
    rows = (
        (_code(one.architecture), _code(one.layout), *(_codes(each) for each in (one.shapes, one.keys, one.tests)))
        for one in families(catalog)
    )
    yield from table(("architecture", "layout", "shapes", "keys", "compared in"), rows)


def _codes(names: Iterable[str]) -> str:
    return ", ".join(map(_code, names))


def smallest_plugins(pages: Path) -> Iterator[str]:
    """The smallest plugin file on the page of each kind, by its lines that are not blank."""
    rows = []
    for kind in CORE_KINDS:
        page = (pages / f"{kind.hook}.md").read_text(encoding="utf-8")
        files = re.findall(r"^:caption: \w+\.py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
        if files:
            lines, code = min(map(_counted, files))
            rows.append((f"[{kind.name.replace('_', ' ')}]({kind.hook}.md)", str(lines), str(code)))
    yield from table(("kind", "lines", "of them code"), rows)


def _counted(source: str) -> tuple[int, int]:
    """Lines that are not blank, and lines that are in no docstring."""
    lines = [number for number, line in enumerate(source.splitlines(), 1) if line.strip()]
    docstrings = [
        node.body[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node)
    ]
    words = {number for one in docstrings for number in range(one.lineno, (one.end_lineno or one.lineno) + 1)}
    return len(lines), len([number for number in lines if number not in words])


def moved_modules() -> Iterator[str]:
    """The modules of the core that had another name, from ``forge_core/moved.toml``."""
    path = Path(forge_core.__file__).with_name("moved.toml")
    moved = tomllib.loads(path.read_text(encoding="utf-8"))
    yield "# Moved modules"
    yield ""
    yield "Generated from `forge_core/moved.toml`. An import of an old name prints the new one. Plugins import the"
    yield "[public modules](../hooks/public-modules.md) of the core."
    yield ""
    yield "## Old names that still work"
    yield ""
    yield "Plugins imported these modules. The old name works until forge-core 0.2, with a `DeprecationWarning`."
    yield ""
    yield from _moves(moved["aliases"])
    yield ""
    yield "## Old names that are gone"
    yield ""
    yield "Only the core imported these modules. An import of the old name is a `ModuleNotFoundError`. A module that"
    yield "went to a package of its own needs that package: `pip install` its distribution."
    yield ""
    yield from _moves(moved["gone"])


def _moves(moved: Mapping[str, str]) -> Iterator[str]:
    rows = ((_code(old), _code(new), new.partition(".")[0].replace("_", "-")) for old, new in sorted(moved.items()))
    yield from table(("old module", "new module", "distribution"), rows)


MODELS = {
    "A dense decoder": "",
    "Latent attention": """
[model.mixer]
name = "latent"
kv_rank = 20
plain_dim = 8
rotary_dim = 4
value_dim = 10
""",
    "Sparse layers": """
[model.feed_forward]
name = "moe"
n_experts = 6
hidden_dim = 56
shared_experts = 1
router = { name = "softmax_topk", top_k = 2 }
""",
}
"""What the models of the table of sites add to the first one."""
_SMALL = """
[model]
name = "transformer"
dim = 48
n_layers = 1
n_heads = 4
n_kv_heads = {kv_heads}
max_seq_len = 64
[data]
name = "text_files"
path = "unused"
[train]
steps = 1
seq_len = 16
batch_size = 2
precision = "fp32"
[optimizer]
name = "adamw"
lr = 1e-3
"""


def site_tables(catalog: Catalog) -> Iterator[str]:
    """The sites of small models, how layouts cut them, and what other projects call them."""
    from forge_plugins_interp.aliases import other_names

    yield "# Table of sites"
    yield ""
    yield "Generated from what small models of one block declare; `forge sites RUN` says the same of your own. B is the"
    yield "number of samples, S of positions. The width is 48, with 4 heads of 12 features, 2 of them for keys and"
    yield "values, and 40 tokens. The last two columns name the dimension of which each rank along that axis has a"
    yield "part; what is read is whole."
    first: list[tuple[str, ...]] = []
    for title, keys in MODELS.items():
        yield ""
        yield f"## {title}"
        yield ""
        rows = [*_site_rows(keys, catalog)]
        if first:
            names = {name for name, *_ in rows}
            missing = ", ".join(name for name, *_ in first if name not in names)
            yield f"Without {missing}. These sites the dense decoder has not, or has otherwise:"
            yield ""
        head = ("site", "shape", "dimensions", "dtype", "where", "`tp`", "`cp`")
        yield from table(head, (row for row in rows if row not in first))
        first = first or rows
    yield ""
    yield "## Names of other projects"
    yield ""
    named = (
        (_code(ours), *(", ".join(map(_code, theirs)) for theirs in names)) for ours, names in other_names().items()
    )
    yield from table(("site", "TransformerLens", "transformers"), named)


def _site_rows(keys: str, catalog: Catalog) -> Iterator[tuple[str, ...]]:
    """The cells of each site of a model."""
    import torch
    import torch.distributed as dist

    from forge_core.distributed.mesh import join_process_group
    from forge_core.job import load_job
    from forge_plugins_interp.session import initial_session
    from forge_plugins_interp.site_table import site_rows

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.toml"
        path.write_text(_SMALL.format(kv_heads=4 if "latent" in keys else 2) + keys, encoding="utf-8")
        job = load_job(path, catalog=catalog, world_size=1)
    device = torch.device("cpu")
    join_process_group(device)
    try:
        rows = site_rows(initial_session(job, catalog, 40, device), catalog, [])
    finally:
        dist.destroy_process_group()
    for row in rows:
        site, name = row.site, row.name.replace(".0.", ".{i}.")
        end = "computed at" if site.compute else "output of" if site.where == "output" else f"input {site.argument} of"
        module = _code(site.module.replace(".0", ".{i}"))
        dims, axes = " × ".join(site.dims), (row.by_axis.get(axis, "") for axis in ("tp", "cp"))
        yield (_code(name), row.shape(), dims, _code(str(row.dtype)[6:]), f"{end} {module}", *axes)


def _section(field: attrs.Attribute[Any], catalog: Catalog) -> Iterator[str]:
    slot, is_array = _slot(field.type), get_origin(field.type) is tuple
    yield f"### `[[{field.name}]]`" if is_array else f"### `[{field.name}]`"
    yield ""
    if slot is None:
        yield from _class_page(get_args(field.type)[0] if is_array else field.type)
        return
    chosen = f"A component of the kind `{slot.kind}`, chosen by the key `name`; its other keys are the component's own."
    yield chosen if slot.default is None else f"{chosen} Without this section: `{slot.default}`."
    names = [f"`{one.component.name}`" for one in catalog.components(slot.kind)]
    installed = f"Installed: {', '.join(names)}, [see there]({_page_of(slot.kind)}.md)."
    yield installed if names else "None is installed."
    yield ""


def _component(kind: Kind, provided: CatalogEntry) -> Iterator[str]:
    component, plugin = provided.component, provided.plugin
    cls, _ = config_class(provided, kind)
    yield f"## {kind.name} `{component.name}`"
    yield ""
    summary = component.summary[:1].upper() + component.summary[1:]
    yield f"{summary}. From {plugin.distribution}, built by `{component.factory}`."
    yield ""
    yield from _class_page(cls)


def _class_page(cls: type) -> Iterator[str]:
    """The docstring and keys of a config class, then those of the classes of its fields."""
    yield _plain((cls.__doc__ or "").strip())
    yield ""
    attrs.resolve_types(cls, include_extras=True)
    fields = [field for field in attrs.fields(cls) if field.init]
    if not fields:
        return
    docs = field_docs(cls)
    rows = []
    for field in fields:
        kind = ", ".join([type_words(field.type), *_limits(schema_limits(field.validator))])
        rows.append((f"`{field.name}`", kind, _default(field), docs.get(field.name, "")))
    yield from table(("key", "type", "default", "meaning"), rows)
    yield ""
    for field in fields:
        for inner in dict.fromkeys(_config_classes(field.type)):
            yield f"**Keys of `{field.name}`.**"
            yield from _class_page(inner)


def _slot(annotation: Any) -> Slot | None:
    """The slot of a field, also of an array of choices."""
    if get_origin(annotation) is Annotated:
        return next((extra for extra in get_args(annotation)[1:] if isinstance(extra, Slot)), None)
    return next(filter(None, map(_slot, get_args(annotation))), None)


def _config_classes(annotation: Any) -> Iterator[type]:
    """The config classes in an annotation that are tables of their own, not choices of a component."""
    if get_origin(annotation) is Annotated:
        return
    if isinstance(annotation, type) and attrs.has(annotation):
        yield annotation
    for argument in get_args(annotation):
        yield from _config_classes(argument)


def _limits(schema: Mapping[str, Any]) -> Iterable[str]:
    """What the validators allow, in signs."""
    signs = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
    if "anyOf" in schema:
        return [" or ".join(word for one in schema["anyOf"] for word in _limits(one))]
    if "enum" in schema:
        return [" or ".join(f"`{json.dumps(choice)}`" for choice in schema["enum"])]
    if "items" in schema:
        return ["each " + " and ".join(_limits(schema["items"]))]
    return [f"{signs[key]} {limit}" for key, limit in schema.items() if key in signs]


def _default(field: attrs.Attribute[Any]) -> str:
    """The default as one would write it in TOML."""
    default: Any = field.default
    if default is attrs.NOTHING:
        slot = _slot(field.type)
        return "**required**" if slot is None or slot.default is None else f'`"{slot.default}"`'
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]  # a class, which attrs' stubs call a function
        default = default.factory()
    if default is None:
        return "unset"
    return f"`{json.dumps(default, default=str, ensure_ascii=False)}`"


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _plain(docstring: str) -> str:
    """Double backticks mean the same in Markdown as in reStructuredText."""
    return " ".join(docstring.split())


if __name__ == "__main__":
    write_reference(Path(sys.argv[1]))
