"""The rooms of the core: imports go down, never up or round; rooms, constructors and the whole stay small.

``ARROWS`` and ``SIZES`` are ceilings. They go down.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

CORE = Path(__file__).resolve().parent.parent / "forge_core"
ARCHITECTURE = CORE.parent / "docs" / "architecture.md"

LEVELS = (
    ("errors", "moved"),
    ("__init__",),
    ("contracts",),
    ("registry",),
    ("api",),
    ("config",),
    ("passes", "ops"),
    ("job",),
    ("distributed", "data"),
    ("checkpoint",),
    ("train",),
    ("run",),
    ("launch",),
    ("commands",),
    ("cli",),
    ("__main__",),
)
"""Rooms and single files, from below. What stands on one level does not import from each other."""
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
ROOMS = sorted(path.name for path in CORE.iterdir() if (path / "__init__.py").exists())

MAX_LINES = 12_446
MAX_ROOMS, MAX_FILES_ON_TOP, MAX_FILES = 11, 7, {"contracts": 31, "train": 22}
MAX_ARROWS = 74
MAX_PARAMETERS = 6
WITH_MORE_PARAMETERS = {
    "contracts.data_source.__call__": 7,
    "data.loader.__init__": 9,
}
"""Functions, with how many: each takes what it is about by name, and it is called in one place. Those of click's
commands, which are options, are not counted."""


def modules() -> dict[str, Path]:
    """Every module of the core, by its name without ``forge_core.``; a package by its folder's."""
    found = {}
    for path in sorted(CORE.rglob("*.py")):
        parts = path.relative_to(CORE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


MODULES = modules()


def room(module: str) -> str:
    return module.partition(".")[0]


def imports(module: str, *, for_typing: bool) -> Iterator[str]:
    """The modules of the core that a module imports; within functions, too."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    typing = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or (id(node) in typing) is not for_typing:
            continue
        package, _, inside = str(node.module).partition(".")
        if package == "forge_core":
            for alias in node.names:
                name = f"{inside}.{alias.name}" if inside else alias.name
                yield name if name in MODULES else inside or "__init__"


def edges(*, for_typing: bool = False) -> set[tuple[str, str]]:
    return {(one, other) for one in MODULES for other in imports(one, for_typing=for_typing) if one != other}


def ring(graph: set[tuple[str, str]]) -> list[str]:
    """Modules that import each other in a circle, or none."""
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for one, other in graph:
        sorter.add(one, other)
    try:
        sorter.prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def code_lines(file: Path) -> int:
    """Lines that are not blank, comment or docstring."""
    source = file.read_text(encoding="utf-8")
    words = set()
    for node in ast.walk(ast.parse(source)):
        for statement in getattr(node, "body", None) or [] if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            if isinstance(statement, ast.Expr) and isinstance(getattr(statement.value, "value", None), str):
                words.update(range(statement.lineno, (statement.end_lineno or 0) + 1))
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in layout:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - words)


def test_every_room_has_its_level():
    assert {room(module) for module in MODULES} == set(LEVEL)


def test_the_drawing_of_the_architecture_has_these_levels():
    """Its lines, from above: names, two spaces or more, and what they are. A slash marks a room, ``.py`` a file."""
    drawing = re.search(r"^```text\n(.*?)^```$", ARCHITECTURE.read_text(encoding="utf-8"), re.M | re.S)[1]
    drawn = [line.partition("  ")[0].split(", ") for line in drawing.splitlines() if line[0] != " "]

    assert [tuple(re.sub(r"/$|\.py$", "", name) for name in names) for names in reversed(drawn)] == list(LEVELS)
    assert sorted(name[:-1] for names in drawn for name in names if name.endswith("/")) == ROOMS


def test_the_table_of_the_architecture_has_every_room():
    assert sorted(re.findall(r"^\| `(\w+)/` \|", ARCHITECTURE.read_text(encoding="utf-8"), re.M)) == ROOMS


def test_no_import_goes_up_nor_to_a_neighbour():
    """For types alone a contract may name what stands above it: the job and the mesh that a pass is given."""
    for_types = {one for one in edges(for_typing=True) if room(one[0]) != "contracts"}
    wrong = [
        f"{one} imports {other}"
        for one, other in sorted(edges() | for_types)
        if room(one) != room(other) and LEVEL[room(other)] >= LEVEL[room(one)]
    ]
    assert wrong == []


def test_nothing_is_imported_in_a_ring():
    assert ring(edges()) == []
    assert ring({(room(one), room(other)) for one, other in edges() if room(one) != room(other)}) == []


def test_few_rooms_know_each_other():
    arrows = {(room(one), room(other)) for one, other in edges() if room(one) != room(other)}
    assert len(arrows) <= MAX_ARROWS


def test_rooms_are_few_and_small():
    on_top = [path for path in CORE.glob("*.py") if path.name != "__init__.py"]
    files = Counter(room(module) for module in MODULES if "." in module)

    assert len(ROOMS) <= MAX_ROOMS
    assert len(on_top) <= MAX_FILES_ON_TOP
    assert {name: n for name, n in files.items() if n > MAX_FILES.get(name, 17)} == {}


def test_the_core_does_not_grow():
    assert sum(code_lines(file) for file in MODULES.values()) <= MAX_LINES


def with_many_parameters() -> dict[str, int]:
    found = {}
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef):
                continue
            if any("click" in ast.unparse(one) or ".command(" in ast.unparse(one) for one in node.decorator_list):
                continue
            names = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            n = len([name for name in names if name not in ("self", "cls")])
            if n > MAX_PARAMETERS:
                found[f"{module}.{node.name}"] = max(n, found.get(f"{module}.{node.name}", 0))
    return found


def test_functions_take_few_parameters():
    found = with_many_parameters()
    assert found == WITH_MORE_PARAMETERS


@pytest.mark.parametrize("module", ["train.trainer"])
def test_the_loop_fits_on_a_screen(module):
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    lengths = {
        node.name: (node.end_lineno or 0) - node.lineno + 1
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    }
    assert lengths["train"] <= 30
    assert lengths["_train_step"] <= 35
