"""The settings that may be typed behind a configuration: keys of sections and components, and values of them."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import attrs

from forge_core.api import Slot
from forge_core.config.overrides import settings_in, with_overrides
from forge_core.config.sections import Job
from forge_core.config.toml_file import Document, read_document
from forge_core.errors import ForgeError
from forge_core.registry.catalog import Catalog
from forge_plugins_monitor.completion.file_components import with_file_components

SECTIONS = tuple(field.name for field in attrs.fields(Job))


def settings(begun: str, config: Path, overrides: Sequence[str], catalog: Catalog) -> Iterator[tuple[str, str]]:
    """The settings that begin so, each with what it is: ``"optimizer."``, ``"optimizer.lr="``,
    ``"optimizer.name=adamw"``.

    Args:
        config: a configuration. If it cannot be read, there are the keys that every one may have.
        overrides: settings in front of this one; they may choose the component whose keys are asked for.
    """
    key, equals, _ = begun.partition("=")
    *tables, last = key.split(".")
    table = _table(config, overrides)
    place = _Place(Job, table, with_file_components(catalog, _texts(table)))
    for name in tables:
        inner = place.keys().get(name)
        if inner is None:
            return
        place = inner
    if equals:
        value = place.keys().get(last)
        yield from ((f"{key}={text}", about) for text, about in (value.values() if value else ()))
        return
    docs = place.docs()
    for name, inner in place.keys().items():
        yield ".".join((*tables, name)) + ("." if inner.is_table else "="), docs.get(name, "")


def _table(config: Path, overrides: Sequence[str]) -> Mapping[str, Any]:
    """The configuration as far as it can be read."""
    try:
        document = read_document(config)
    except ForgeError:
        document = Document({}, {})
    for words in settings_in(overrides, SECTIONS):
        try:
            document = with_overrides(document, words, sections=SECTIONS)
        except ForgeError:  # it is not finished, or wrong
            continue
    return document.table


def _texts(table: Mapping[str, Any]) -> Mapping[str, str]:
    """Of the plugin files of a configuration, by name."""
    plugins = table.get("plugins")
    files = plugins.get("files") if isinstance(plugins, Mapping) else None
    return files if isinstance(files, Mapping) else {}


class _Place:
    """A place in a configuration: its type, and what is written there.

    Args:
        chosen: of a component, the name that stands for it where none is written; for ``[parallel.passes.fsdp]``.
    """

    def __init__(self, annotation: Any, written: Any, catalog: Catalog, *, chosen: str | None = None) -> None:
        self._slot = next((one for one in getattr(annotation, "__metadata__", ()) if isinstance(one, Slot)), None)
        self._type = _without_none(get_args(annotation)[0] if hasattr(annotation, "__metadata__") else annotation)
        self._written, self._catalog, self._is_keyed = written, catalog, chosen is not None
        self._chosen = chosen or (written.get("name") if isinstance(written, Mapping) else written)

    @property
    def is_table(self) -> bool:
        has_keys = self._slot is not None or self._class is not None or self._is_free
        return has_keys or any(one.is_table for one in self._items.values())

    def keys(self) -> dict[str, _Place]:
        """What may stand in the table."""
        if self._slot is not None:
            name = {} if self._is_keyed else {"name": _Place(self._slot, None, self._catalog)}
            return {**name, **self._fields(self._component())}
        if self._class is not None:
            return self._fields(self._class)
        return dict(self._items)

    def values(self) -> Iterator[tuple[str, str]]:
        """Words that may stand behind the equals sign; none where there is no list of them."""
        slot = self._type if isinstance(self._type, Slot) else self._slot
        if self._is_keyed or self._type is bool:
            yield from (("true", ""), ("false", ""))
        elif slot is not None:
            for one in self._catalog.components(slot.kind):
                is_unique = len(self._catalog.providers(slot.kind, one.component.name)) == 1
                yield one.component.name if is_unique else one.qualified_name, one.component.summary
        elif isinstance(self._type, type) and issubclass(self._type, enum.Enum):
            yield from ((str(member.value), "") for member in self._type)
        elif get_origin(self._type) is Literal:
            yield from ((str(value), "") for value in get_args(self._type))

    def docs(self) -> dict[str, str]:
        """What each key is."""
        from forge_core.config.field_docs import field_docs

        cls = self._component() if self._slot is not None else self._class
        return field_docs(cls) if cls else {}

    @property
    def _class(self) -> type | None:
        return self._type if isinstance(self._type, type) and attrs.has(self._type) else None

    @property
    def _is_free(self) -> bool:
        """It is a table with free keys."""
        origin = get_origin(self._type)
        return isinstance(origin, type) and issubclass(origin, Mapping)

    @property
    def _items(self) -> dict[str, _Place]:
        """Of a table with free keys and of an array."""
        origin, arguments = get_origin(self._type), get_args(self._type)
        if not isinstance(origin, type) or not arguments:
            return {}
        if self._is_free:
            written = self._written if isinstance(self._written, Mapping) else {}
            slot = next((one for one in getattr(arguments[1], "__metadata__", ()) if isinstance(one, Slot)), None)
            if slot is None:
                return {name: _Place(arguments[1], value, self._catalog) for name, value in written.items()}
            names = [one.component.name for one in self._catalog.components(slot.kind)]
            return {name: _Place(arguments[1], written.get(name), self._catalog, chosen=name) for name in names}
        is_fixed = issubclass(origin, tuple) and arguments[-1] is not Ellipsis  # such as betas, which is set as a whole
        entries = self._written if isinstance(self._written, list) and not is_fixed else []
        return {str(index): _Place(arguments[0], entry, self._catalog) for index, entry in enumerate(entries)}

    def _fields(self, cls: type | None) -> dict[str, _Place]:
        if cls is None:
            return {}
        written = self._written if isinstance(self._written, Mapping) else {}
        fields = attrs.fields(attrs.resolve_types(cls, include_extras=True))
        return {one.alias: _Place(one.type, written.get(one.alias), self._catalog) for one in fields if one.init}

    def _component(self) -> type | None:
        """The config class of the component that is chosen."""
        from forge_core.config.converter import config_class

        if self._slot is None or not isinstance(self._chosen, str):
            return None
        try:
            provided = self._catalog.find(self._slot.kind, self._chosen)
            return config_class(provided, self._catalog.kinds[self._slot.kind])[0]
        except ForgeError:  # it is not installed, or broken
            return None


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) not in (Union, UnionType):
        return annotation
    members = [one for one in get_args(annotation) if one is not NoneType]
    return next((one for one in members if attrs.has(one) or get_origin(one) is not None), members[0])
