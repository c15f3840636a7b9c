"""``forge schema``: the JSON Schema of a job with the components that are installed, for editors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import attrs
import click

from forge_core.config.converter import config_class, is_optional, slot_of
from forge_core.config.field_docs import field_docs
from forge_core.config.sections import Job
from forge_core.config.validators import schema_limits
from forge_core.contracts.command import Invocation
from forge_core.job import plain
from forge_core.registry.catalog import Catalog, CatalogEntry

_PLAIN: dict[Any, dict[str, Any]] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    Path: {"type": "string", "minLength": 1},
    Any: {},
}
_LENGTHS = {"minLength": "string", "maxLength": "string", "minItems": "array", "maxItems": "array"}
"""Keywords that say something about one type only."""


@click.command()
@click.pass_obj
def schema(obj: Invocation) -> None:
    """Print the JSON Schema of what may stand in a configuration, with the components that are installed."""
    click.echo(json.dumps(job_schema(obj.catalog()), indent=2, ensure_ascii=False))


def job_schema(catalog: Catalog) -> dict[str, Any]:
    """JSON Schema, draft 2020-12, of what may stand in a configuration file.

    Required keys are not marked: a file may extend another one that has them, and ``forge validate`` knows. Components
    whose config class cannot be imported or read are accepted by name, with any keys.
    """
    return _Schema(catalog).whole()


class _Schema:
    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._definitions: dict[str, dict[str, Any]] = {}

    def whole(self) -> dict[str, Any]:
        root = self._table(Job)
        extends = {
            "description": "Files that this one is on top of, relative to it; later ones win over earlier ones.",
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
        }
        unset = {
            "description": "Keys of these files that have their defaults again, such as checkpoint.keep_last.",
            "type": "array",
            "items": {"type": "string"},
        }
        return {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "Forge job",
            **root,
            "properties": {"extends": extends, "unset": unset, **root["properties"]},
            "$defs": dict(sorted(self._definitions.items())),
        }

    def _table(self, cls: type) -> dict[str, Any]:
        """A table whose keys are the fields of ``cls`` and no others."""
        docs = field_docs(cls)
        properties = {}
        for field in attrs.fields(attrs.resolve_types(cls)):
            if field.init:
                description = {"description": docs[field.name]} if field.name in docs else {}
                properties[field.alias] = {**description, **self._field(field)}
        return {"type": "object", "properties": properties, "additionalProperties": False}

    def _field(self, field: Any) -> dict[str, Any]:
        schema = self._value(field.type)
        for keyword, limit in schema_limits(field.validator).items():
            if keyword == "items":
                schema["items"] = {**schema.get("items", {}), **limit}
            elif keyword not in _LENGTHS or _LENGTHS[keyword] == schema.get("type"):
                schema[keyword] = limit
        default = _default(field)
        return schema if default is None else {**schema, "default": default}

    def _value(self, annotation: Any) -> dict[str, Any]:
        origin, arguments = get_origin(annotation) or annotation, get_args(annotation)
        slot = slot_of(annotation)
        if slot is not None:
            choice = self._choice(slot.kind)
            return choice if slot.text_key is None else {"anyOf": [{"type": "string"}, choice]}
        if origin in _PLAIN:
            return dict(_PLAIN[origin])
        if origin in (Union, UnionType):
            members = [self._value(member) for member in arguments if member is not NoneType]
            return members[0] if len(members) == 1 else {"anyOf": members}
        if origin is Literal:
            return {"enum": list(arguments)}
        if not isinstance(origin, type):  # Annotated without a slot, or a NewType
            return self._value(arguments[0] if arguments else annotation.__supertype__)
        if issubclass(origin, Enum):
            return {"enum": [member.value for member in origin]}
        if attrs.has(origin):
            return self._defined(f"{origin.__module__}.{origin.__qualname__}", lambda: self._table(origin))
        if issubclass(origin, Mapping):
            return self._mapping(arguments[1] if arguments else Any)
        return self._array(origin, arguments)

    def _array(self, origin: type, arguments: tuple[Any, ...]) -> dict[str, Any]:
        if issubclass(origin, tuple) and arguments and arguments[-1] is not Ellipsis:
            items = [self._value(argument) for argument in arguments]
            same = {"items": items[0]} if all(item == items[0] for item in items) else {"prefixItems": items}
            return {"type": "array", **same, "minItems": len(items), "maxItems": len(items)}
        return {"type": "array", "items": self._value(arguments[0] if arguments else Any)}

    def _mapping(self, annotation: Any) -> dict[str, Any]:
        slot = slot_of(annotation)
        if slot is None:
            return {"type": "object", "additionalProperties": self._value(annotation)}
        switch = {"type": "boolean"} if is_optional(annotation) else {"const": True}
        properties = {
            name: {"description": provided.component.summary, "anyOf": [switch, self._component(provided, slot.kind)]}
            for name, provided in self._names(slot.kind).items()
        }
        other = {"anyOf": [switch, self._choice(slot.kind)]}
        return {"type": "object", "properties": properties, "additionalProperties": other}

    def _choice(self, kind: str) -> dict[str, Any]:
        """A component's name, or a table whose ``name`` decides about its other keys."""
        return self._defined(f"choice.{kind}", lambda: self._any_component(kind))

    def _any_component(self, kind: str) -> dict[str, Any]:
        names = self._names(kind)
        rules = [
            {
                "if": {"properties": {"name": {"const": name}}, "required": ["name"]},
                "then": self._component(provided, kind),
            }
            for name, provided in names.items()
        ]
        table: dict[str, Any] = {"type": "object", "properties": {"name": {"enum": list(names)}}}
        if rules:
            table["allOf"] = rules
        return {"anyOf": [{"enum": list(names)}, table]}

    def _names(self, kind: str) -> dict[str, CatalogEntry]:
        """Every name that a configuration may use, and what it means: bare names where they mean one thing."""
        names = {}
        for provided in self._catalog.components(kind):
            for name in (provided.component.name, *provided.component.aliases):
                if len(self._catalog.providers(kind, name)) == 1:
                    names[name] = provided
            names[provided.qualified_name] = provided
        return names

    def _component(self, provided: CatalogEntry, kind: str) -> dict[str, Any]:
        return self._defined(f"{kind}.{provided.qualified_name}", lambda: self._component_table(provided, kind))

    def _component_table(self, provided: CatalogEntry, kind: str) -> dict[str, Any]:
        component = provided.component
        about: dict[str, Any] = {"description": component.summary}
        if component.deprecated:
            about |= {"deprecated": True, "$comment": component.deprecated}
        try:
            table = self._table(config_class(provided, self._catalog.kinds[kind])[0])
            json.dumps(table)  # its defaults may be anything
        except Exception as error:  # noqa: BLE001  # it cannot be imported, or its types or defaults make no sense
            return {**about, "type": "object", "$comment": str(error)}
        table["properties"] = {"name": {"type": "string"}, **table["properties"]}
        return {**about, **table}

    def _defined(self, key: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """A reference to a definition, which is made once. It may refer to itself."""
        if key not in self._definitions:
            self._definitions[key] = {}
            self._definitions[key] = make()
        return {"$ref": f"#/$defs/{key}"}


def _default(field: Any) -> Any:
    """The default as TOML data; ``None`` if there is none, or if it depends on other fields."""
    default = field.default
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]  # attrs types this class as a function
        default = None if default.takes_self else default.factory()
    return None if default is attrs.NOTHING else plain(default)
