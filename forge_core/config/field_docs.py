"""The docstrings under the fields of a config class, and the words for their types.

Python throws string literals under a field away, so they are read from the class' source text. Commands, the schema
and the generated reference all take them from here.
"""

from __future__ import annotations

import ast
import enum
import inspect
import sys
from collections.abc import Mapping, Sequence, Set
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from forge_core.config.describe import literal
from forge_core.registry.component import DOC, Slot


def field_docs(cls: type) -> dict[str, str]:
    """The docstring under each field of ``cls``, inherited fields included, without indentation.

    Fields without one are left out, and so is everything of a class whose source is not there.
    """
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        docs.update(_documented_fields(base))
    own = {one.name: one.metadata.get(DOC) for one in getattr(cls, "__attrs_attrs__", ())}
    return docs | {name: doc for name, doc in own.items() if doc}


def type_words(annotation: Any) -> str:
    """A type in the words of TOML: ``"integer"``, ``'"fp32" or "bf16"'``, ``"array of strings"``.

    Args:
        annotation: resolved, not a string; ``attrs.resolve_types(cls, include_extras=True)`` does that.
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    if origin is Annotated:
        slots = [extra for extra in arguments[1:] if isinstance(extra, Slot)]
        return slots[0].kind.replace("_", " ") if slots else type_words(arguments[0])
    if origin in (Union, UnionType):
        return " or ".join(type_words(argument) for argument in arguments if argument is not NoneType)
    if origin is Literal:
        return " or ".join(map(literal, arguments))
    if isinstance(origin, type) and issubclass(origin, (Mapping, Sequence, Set)):
        return _container_words(origin, arguments)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return " or ".join(literal(member.value) for member in annotation)
    if hasattr(annotation, "__supertype__"):  # a NewType, whose name says more than what it is made of
        return str(annotation.__name__).lower()
    if isinstance(annotation, type) and hasattr(annotation, "__attrs_attrs__"):
        return "table"
    return getattr(annotation, "__name__", str(annotation))


def _container_words(origin: type, arguments: Sequence[Any]) -> str:
    if issubclass(origin, Mapping):
        return f"table of {_plural(type_words(arguments[1]))}"
    if issubclass(origin, tuple) and Ellipsis not in arguments:
        return f"array [{', '.join(type_words(argument) for argument in arguments)}]"
    return f"array of {_plural(type_words(arguments[0]))}"


_PLAIN: Mapping[Any, str] = {
    bool: "true or false",
    int: "integer",
    float: "number",
    str: "string",
    Path: "path",
    Any: "anything",
    dict: "table",
    list: "array",
    tuple: "array",
}


def _plural(words: str) -> str:
    if words in ("true or false", "anything") or '"' in words or words.startswith(("array", "table of")):
        return words
    return f"{words[:-1]}ies" if words.endswith("y") else f"{words}es" if words.endswith("s") else f"{words}s"


def _documented_fields(cls: type) -> dict[str, str]:
    module = sys.modules.get(cls.__module__)
    definition = _class_definitions(module).get(cls.__qualname__) if module else None
    if definition is None:
        return {}
    docs = {}
    for statements in pairwise(definition.body):
        match statements:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = inspect.cleandoc(text)
    return docs


@cache
def _class_definitions(module: ModuleType) -> dict[str, ast.ClassDef]:
    """The classes of a module by qualified name; nothing for a module without Python source."""
    try:
        source = inspect.getsource(module)
    except (OSError, TypeError):
        return {}
    found: dict[str, ast.ClassDef] = {}
    _collect_classes(ast.parse(source), "", found)
    return found


def _collect_classes(node: ast.AST, prefix: str, found: dict[str, ast.ClassDef]) -> None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            found[prefix + child.name] = child
            _collect_classes(child, f"{prefix}{child.name}.", found)
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            _collect_classes(child, f"{prefix}{child.name}.<locals>.", found)
        else:
            _collect_classes(child, prefix, found)
