"""Import paths ``"package.module:Name"`` become objects, and a failure says whose bug it is."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from forge_core.errors import ForgeError, PluginError
from forge_core.registry.plugin_output import output_of

if TYPE_CHECKING:
    import ast
    from collections.abc import Iterator
    from pathlib import Path

HEAVY_MODULES = ("jax", "numpy", "tensorflow", "torch", "transformers")
"""Libraries whose import takes long enough to be felt, so that a plugin module may not import them."""


def load_reference(reference: str, *, what: str, owner: str) -> Any:
    """The object that an import path names.

    Args:
        reference: ``"package.module:Name"``.
        what: what the object is, for the message: ``"the config class of router 'topk'"``.
        owner: the distribution that gave the path.

    Raises:
        PluginError: it cannot be imported. Errors that are already sentences for the user pass through.
    """
    module, _, name = reference.partition(":")
    try:
        with output_of(owner):
            return getattr(import_module(module), name)
    except ForgeError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"{owner}: cannot import {what} '{reference}' ({type(error).__name__}: {error}). This is a bug in {owner}."
        ) from error


def why_undefined(reference: str) -> str:
    """Why an import path names nothing, by the module's source alone: importing it may take seconds. Nothing where that
    cannot be known so.

    Args:
        reference: as for ``load_reference``.
    """
    path, _, name = reference.partition(":")
    if hasattr(sys.modules.get(path), name):
        return ""
    package, *inner = path.split(".")
    source = source_of(package, inner)
    if isinstance(source, str):
        return source
    if source is None or source.suffix != ".py" or not source.is_file():
        return ""
    text = source.read_text(encoding="utf-8", errors="replace")
    if re.search(rf"^(?:async def|def|class)\s+{name}\b|^{name}\s*[:=]", text, re.MULTILINE):
        return ""
    import ast  # rarely needed: most factories are a class or a function

    try:
        names = [*_defined_in(ast.parse(text).body)]
    except SyntaxError as error:
        return f"{source.name}, line {error.lineno}: {error.msg}."
    if name in names or not {"*", "__getattr__"}.isdisjoint(names):
        return ""
    from forge_core.registry.suggestions import did_you_mean

    return f"there is no {name} in {path}.{did_you_mean(name, names)}"


def source_of(package: str, inner: list[str]) -> Path | str | None:
    """The file of a module, found without importing its package; or a sentence, or nothing if it cannot be told."""
    from importlib.util import find_spec
    from pathlib import Path

    if package in sys.builtin_module_names:
        return None
    spec = find_spec(package)
    if spec is None:
        return f"there is no package '{package}'."
    if not inner:
        return Path(spec.origin) if spec.origin else None
    folders = [Path(folder, *inner[:-1]) for folder in spec.submodule_search_locations or ()]
    for folder in folders:
        for candidate in (folder / f"{inner[-1]}.py", folder / inner[-1] / "__init__.py"):
            if candidate.is_file():
                return candidate
        if any(folder.glob(f"{inner[-1]}.*")):  # compiled
            return None
    known = [file.stem for folder in folders for file in folder.glob("*.py")]
    if not known:  # not in a folder: in a zip file, or made by a loader of its own
        return None
    from forge_core.registry.suggestions import did_you_mean

    return f"there is no module '{'.'.join((package, *inner))}'.{did_you_mean(inner[-1], known)}"


def _defined_in(body: list[ast.stmt]) -> Iterator[str]:
    """The names that statements bind, those in ``if`` and ``try`` included; ``"*"`` for those of another module."""
    import ast

    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield statement.name
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            yield from ((one.asname or one.name).partition(".")[0] for one in statement.names)
        else:
            yield from (
                one.id for one in ast.walk(statement) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
            )
            for block in ("body", "orelse", "finalbody"):
                yield from _defined_in(getattr(statement, block, []))
            for handler in getattr(statement, "handlers", []):
                yield from _defined_in(handler.body)
