"""Keys of a component that has no config class: the keyword-only parameters of its factory, read from source text.

Annotations are the types, ``Annotated`` holds validators of attrs and slots, defaults are defaults, and ``Args`` of the
docstring describe the keys. What the component's kind is given is no key.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from functools import cache
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import attrs

from forge_core.errors import PluginError
from forge_core.registry.component import DOC, Kind, Slot
from forge_core.registry.module_source import ModuleSource


@cache  # two jobs with the same keys are equal
def signature_of(factory: str, kind: Kind) -> tuple[type, frozenset[str]]:
    """Read the signature of a component of ``kind``.

    Args:
        factory: ``"package.module:Name"``, a function or a class.

    Returns:
        A frozen attrs class, whose fields are the keys; and the keyword parameters, with ``**`` if any is taken.

    Raises:
        PluginError: the source does not say it; the message names the parameter.
    """
    path, _, name = factory.partition(":")
    module = ModuleSource(path)
    if (definition := module.definition(name)) is None:
        raise PluginError(f"{factory}: its signature cannot be read from the source; write a config class")
    parameters = {one.name: one for one in _parameters(module, definition, name)}
    given, base = _given_to(kind)
    keys = {key: one.field(name) for key, one in parameters.items() if key not in {*given, "build", "**"}}
    made = attrs.make_class(name, keys, bases=(base,), frozen=True, kw_only=True)
    made.__module__, made.__doc__ = __name__, ast.get_docstring(definition) or ""
    return made, frozenset(parameters)


def _given_to(kind: Kind) -> tuple[frozenset[str], type]:
    """The keywords that the contract gives to a factory, and the class of keys that all components of the kind have."""
    path = kind.contract.partition(":")[0]
    contract = ModuleSource(path)
    for protocol in contract.definitions():
        call = _method(protocol, "__call__") if protocol.name.endswith("Factory") else None
        if call is not None:
            config = ast.unparse(call.args.posonlyargs[1].annotation or ast.Constant(None))
            base = getattr(import_module(path), config) if contract.definition(config) else object
            return frozenset(one.arg for one in call.args.kwonlyargs), base
    raise PluginError(f"{path} has no protocol of a factory, so that a {kind.name} needs a config class")


def _parameters(module: ModuleSource, definition: ast.stmt, factory: str) -> Iterator[_Parameter]:
    """Those of a function, or of a class and its bases as far as ``**`` passes them on; the class' own come last."""
    if isinstance(definition, ast.FunctionDef):
        yield from _own(module, definition, definition.args.args, ast.get_docstring(definition), factory)
        return
    assert isinstance(definition, ast.ClassDef)
    init = _method(definition, "__init__")
    if init is None and definition.decorator_list and not _is_registered(definition):
        raise PluginError(f"{factory}: it has a decorator and no __init__, so that its signature cannot be read")
    passes_on = init is None or init.args.kwarg is not None
    bases = [found for base in definition.bases if passes_on and (found := module.base(base)) is not None]
    for base in bases:
        yield from _parameters(*base, factory)
    if init is not None:
        docs = ast.get_docstring(init) or ast.get_docstring(definition)
        own = _own(module, init, init.args.args[1:], docs, factory)
        yield from (one for one in own if not (bases and one.name == "**"))


def _own(
    module: ModuleSource, function: ast.FunctionDef, positional: Sequence[ast.arg], docs: str | None, factory: str
) -> Iterator[_Parameter]:
    if positional or function.args.vararg:
        name = (*positional, function.args.vararg)[0].arg  # type: ignore[union-attr]  # there is one
        words = "each key is a parameter of its own" if name == "config" else "write '*' before it"
        raise PluginError(
            f"{factory}: the parameter '{name}' can be given by position; {words}, as in (self, *, top_k: int)"
        )
    described = _described(docs or "")
    for argument, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
        yield _Parameter(argument.arg, module, argument.annotation, default, described.get(argument.arg, ""))
    if function.args.kwarg:
        yield _Parameter("**", module)


@attrs.frozen
class _Parameter:
    """A keyword-only parameter, in the module whose names it uses."""

    name: str
    module: ModuleSource
    annotation: ast.expr | None = None
    default: ast.expr | None = None
    doc: str = ""

    def field(self, factory: str) -> Any:
        """The field of a class of keys."""
        try:
            return self._field()
        except Exception as error:
            raise PluginError(
                f"{factory}: the parameter '{self.name}' cannot be a key: {error}. A config class can say what a "
                "signature cannot"
            ) from error

    def _field(self) -> Any:
        if self.name == "name":
            raise TypeError("the key of this name chooses the component")
        if self.annotation is None:
            raise TypeError("it has no annotation")
        annotation = self.module.value(_as_expression(self.annotation))
        kept, *extras = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
        slots = [one for one in extras if isinstance(one, Slot)]
        if not slots and not _is_type_of_a_key(kept):
            raise TypeError(f"{ast.unparse(self.annotation)} is no type of a configuration")
        default: Any = attrs.NOTHING if self.default is None else self.module.value(self.default)
        if isinstance(default, (list, dict, set)):
            raise TypeError("its default can be changed; write a tuple")
        validator: Any = attrs.validators.and_(*(one for one in extras if one not in slots))
        return attrs.field(
            default=default,
            type=Annotated[kept, slots[0]] if slots else kept,  # type: ignore[arg-type]  # attrs takes any annotation
            validator=validator if len(extras) > len(slots) else None,
            metadata={DOC: self.doc} if self.doc else {},
        )


def _as_expression(annotation: ast.expr) -> ast.expr:
    """An annotation that is written as a string says an expression."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return ast.parse(annotation.value, mode="eval").body
    return annotation


def _is_type_of_a_key(annotation: Any) -> bool:
    if annotation in (bool, int, float, str, Path, Any, None, NoneType, Ellipsis) or attrs.has(annotation):
        return True
    origin = get_origin(annotation) or annotation
    if origin in (Union, UnionType) or (
        isinstance(origin, type) and issubclass(origin, (Sequence, Mapping, AbstractSet))
    ):
        return all(map(_is_type_of_a_key, get_args(annotation)))
    return origin is Literal or (isinstance(origin, type) and issubclass(origin, Enum))


def _method(definition: ast.stmt, name: str) -> ast.FunctionDef | None:
    methods = definition.body if isinstance(definition, ast.ClassDef) else []
    return next((one for one in methods if isinstance(one, ast.FunctionDef) and one.name == name), None)


def _is_registered(definition: ast.ClassDef) -> bool:
    """Return whether its decorators are ``@component`` alone, which leaves it as it is."""
    return all(isinstance(one, ast.Call) and ast.unparse(one.func) == "component" for one in definition.decorator_list)


def _described(docs: str) -> dict[str, str]:
    """The entries of ``Args`` of a docstring, by name."""
    section = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)*)", inspect.cleandoc(docs), re.MULTILINE)
    entries = re.split(r"^(\w+): ", inspect.cleandoc(section[1] if section else ""), flags=re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in zip(entries[1::2], entries[2::2], strict=True)}
