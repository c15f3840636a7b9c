"""A module by its source text: what it defines and what its names mean, without running it."""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from forge_core.errors import PluginError
from forge_core.registry.imports import HEAVY_MODULES, source_of


class ModuleSource:
    """
    Args:
        path: ``"package.module"``.

    Raises:
        PluginError: there is no such module, it is not made of text, or the text is not Python.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._statements = [*_statements(ast.parse(_text(path)).body)]
        except SyntaxError as error:
            raise PluginError(f"{path}, line {error.lineno}: {error.msg}") from error

    def definition(self, name: str) -> ast.ClassDef | ast.FunctionDef | None:
        """The class or the function of this name."""
        return next((one for one in self.definitions() if one.name == name), None)

    def definitions(self) -> Iterator[ast.ClassDef | ast.FunctionDef]:
        """Every class and function at the top level, the last first."""
        return (one for one in reversed(self._statements) if isinstance(one, (ast.ClassDef, ast.FunctionDef)))

    def base(self, expression: ast.expr) -> tuple[ModuleSource, ast.ClassDef] | None:
        """The definition of a base class, in this module or in the one that it is imported from."""
        package, _, name = ast.unparse(expression).rpartition(".")
        module, found = self, None if package else self.definition(name)
        if found is None and (origin := self._origin(package or name)) is not None:
            place, name = (".".join(filter(None, origin)), name) if package else origin
            try:
                module = ModuleSource(place)
            except PluginError:  # its source is not there, so that its keys cannot be known
                return None
            found = module.definition(name)
        return (module, found) if isinstance(found, ast.ClassDef) else None

    def value(self, expression: ast.expr) -> Any:
        """Evaluate an expression by the names of this module.

        Raises:
            Exception: any, of the expression; ``NameError`` for a name that only running the module would give.
        """
        names = {one.id: self.meaning(one.id) for one in ast.walk(expression) if isinstance(one, ast.Name)}
        return eval(compile(ast.Expression(expression), self.path, "eval"), {"__builtins__": {}}, names)

    def meaning(self, name: str) -> Any:
        """The import, the constant or the builtin of this name."""
        if (origin := self._origin(name)) is not None:
            place, attribute = origin
            if place.partition(".")[0] in HEAVY_MODULES:
                raise NameError(f"'{name}' comes from {place}, which takes long to import")
            module = import_module(place)
            return getattr(module, attribute) if attribute else module
        for statement in reversed(self._statements):
            if isinstance(statement, ast.Assign) and name in map(ast.unparse, statement.targets):
                return self.value(statement.value)
            if isinstance(statement, ast.AnnAssign) and statement.value and ast.unparse(statement.target) == name:
                return self.value(statement.value)
        if hasattr(builtins, name):
            return getattr(builtins, name)
        raise NameError(f"'{name}' is neither imported nor a constant of {self.path}")

    def _origin(self, name: str) -> tuple[str, str] | None:
        """The module that a name is imported from, and its name there; empty for a module."""
        for statement in self._statements:
            if not isinstance(statement, (ast.Import, ast.ImportFrom)):
                continue
            for alias in (one for one in statement.names if (one.asname or one.name) == name):
                if isinstance(statement, ast.Import):
                    return alias.name, ""
                package = self.path.rsplit(".", statement.level)[0] if statement.level else ""
                return ".".join(filter(None, (package, statement.module))), alias.name
        return None


def _text(path: str) -> str:
    loaded = getattr(sys.modules.get(path), "__spec__", None)
    if loaded is not None and hasattr(loaded.loader, "get_source"):
        return str(loaded.loader.get_source(path) or "")
    source = source_of(path)
    if isinstance(source, str):
        raise PluginError(source)
    if source is None or source.suffix != ".py":
        raise PluginError(f"{path} has no source text")
    return source.read_text(encoding="utf-8")


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module, in ``if`` and ``try`` as well."""
    for statement in body:
        yield statement
        for block in ("body", "orelse", "finalbody") if isinstance(statement, (ast.If, ast.Try)) else ():
            yield from _statements(getattr(statement, block, []))
