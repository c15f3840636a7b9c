"""Components of plugin files, from their source text: nothing is run for a completion."""

from __future__ import annotations

import ast
import hashlib
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.abc import InspectLoader
from importlib.util import module_from_spec, spec_from_loader

from forge_core.api import Component
from forge_core.registry.catalog import Catalog, Plugin


def with_file_components(catalog: Catalog, texts: Mapping[str, str]) -> Catalog:
    """The catalog with what ``@component`` registers in files. What cannot be read from the text is left out.

    Args:
        texts: of the files, by name.
    """
    plugins = [
        Plugin(distribution=f"file:{name}", version="", components=(*_components(name, texts[name]),)) for name in texts
    ]
    return Catalog([*catalog.plugins, *plugins])


def _components(file: str, text: str) -> Iterator[tuple[str, Component]]:
    try:
        definitions = [one for one in ast.parse(text).body if isinstance(one, (ast.ClassDef, ast.FunctionDef))]
    except SyntaxError:
        return
    module = _module_of_text(file, text)
    for one in definitions:
        for decorator in one.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).rpartition(".")[2] == "component":
                about = {word.arg: word.value for word in decorator.keywords}
                kind = _string(decorator.args[0] if decorator.args else about.get("kind"))
                words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", one.name).lower()
                first_line = (ast.get_docstring(one) or "").partition("\n")[0].rstrip(".") or "-"
                name, summary = _string(about.get("name")) or words, _string(about.get("summary")) or first_line
                yield kind, Component(kind=kind, name=name, summary=summary[:100], factory=f"{module}:{one.name}")


def _string(value: ast.expr | None) -> str:
    """Of a literal; empty for anything else."""
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""


def _module_of_text(file: str, text: str) -> str:
    """The name of a module that has this text and has not run: keys of its components are read from it."""
    name = f"forge_text_{hashlib.sha256(f'{file}:{text}'.encode()).hexdigest()[:12]}"
    if name not in sys.modules:
        spec = spec_from_loader(name, _Text(text))
        assert spec is not None, "it has a loader"
        sys.modules[name] = module_from_spec(spec)
    return name


class _Text(InspectLoader):
    def __init__(self, text: str) -> None:
        self._text = text

    def get_source(self, fullname: str) -> str:
        return self._text
