"""Plain data to typed configuration. Nothing is guessed, nothing is dropped, and everything that is wrong is reported.

cattrs chooses a hook by type; the hooks are ours, since its own turn ``"false"`` into ``True`` and ``1.5`` into ``1``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from functools import lru_cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin

import attrs
from cattrs import Converter

from forge_core.config.describe import describe, one_of
from forge_core.config.problems import MAX_SHOWN, InvalidError, Problem
from forge_core.config.shorthands import as_written
from forge_core.config.unstructure import plain
from forge_core.config.validators import violations
from forge_core.contracts.component_ref import ComponentRef
from forge_core.errors import ConfigError, PluginError, nearest, nearest_hint, with_article
from forge_core.registry.catalog import Catalog, CatalogEntry
from forge_core.registry.component import Kind, Slot, kind_words
from forge_core.registry.imports import load_reference
from forge_core.registry.plugin_output import output_of

T = TypeVar("T")

EXPECTED_STRING = "expected a string"
"""How the sentence about a value that should have been quoted begins; the command line has a remedy of its own."""


def structure(value: Any, cls: type[T], catalog: Catalog, *, ignores_unknown: bool = False) -> T:
    """``value``, plain data as ``tomllib`` gives it, as an instance of ``cls``.

    Fields may be bool, int, float, str, ``Path``, ``Literal``, ``Enum``, arrays (tuple, list, frozenset, set), tables
    with free keys (``Mapping``), attrs classes, choices of a component (``Slot``), unions of these, and ``Any``.

    Args:
        ignores_unknown: whether tables may have keys that are no fields, which are left out.

    Raises:
        InvalidError: with every problem there is, except that the validators of a table wait for its types.
    """
    return cast("T", _StrictConverter(catalog, ignores_unknown).structure(value, cls))


def slot_of(annotation: Any) -> Slot | None:
    """The ``Slot`` of ``Annotated[Use, Slot("router")]``, if that is what the annotation is."""
    return next((extra for extra in getattr(annotation, "__metadata__", ()) if isinstance(extra, Slot)), None)


def is_optional(annotation: Any) -> bool:
    """Return whether ``None`` is allowed, as in ``Annotated[Use | None, Slot("router")]``."""
    if slot_of(annotation) is not None:
        annotation = get_args(annotation)[0]
    return _is_union(annotation) and NoneType in get_args(annotation)


@lru_cache(maxsize=4)
class _StrictConverter(Converter):
    """Finds components in ``catalog``. It takes milliseconds to make, and has no state."""

    def __init__(self, catalog: Catalog, ignores_unknown: bool) -> None:
        super().__init__()
        self._catalog, self._ignores_unknown = catalog, ignores_unknown
        for cls, hook in ((bool, _bool), (int, _int), (float, _float), (str, _str), (Path, _path)):
            self.register_structure_hook(cls, hook)
        # cattrs asks the predicates in the reverse order, and all of them before its own.
        self.register_structure_hook_func(_is_array, self._array)
        self.register_structure_hook_func(_is_mapping, self._mapping)
        self.register_structure_hook_func(_is_union, self._union)
        self.register_structure_hook_func(_is_literal, _literal)
        self.register_structure_hook_func(lambda cls: isinstance(cls, type) and attrs.has(cls), self._table)
        self.register_structure_hook_func(lambda cls: slot_of(cls) is not None, self._component)

    def structure(self, value: Any, cls: Any) -> Any:
        """Same as cattrs', which takes a ``StrEnum`` for a string."""
        if isinstance(cls, type) and issubclass(cls, Enum):
            return _choice(value, {member.value: member for member in cls})
        return super().structure(value, cls)

    def _array(self, value: Any, cls: Any) -> Any:
        origin, arguments = get_origin(cls) or cls, get_args(cls)
        if isinstance(value, dict) and value and all(str(key).isdecimal() for key in value):
            entry = next(iter(value))  # `optimizer.groups.0.lr_scale=0.5` changes an entry, and makes none
            raise InvalidError.because(f"has no entries; '{entry}' is not one of them. Write them in the file first")
        if not isinstance(value, (list, tuple)):
            raise InvalidError.because(f"expected an array, got {describe(value)}", type="array")
        fixed = issubclass(origin, tuple) and bool(arguments) and arguments[-1] is not Ellipsis
        if fixed and len(value) != len(arguments):
            why = f"expected an array of {len(arguments)}, got {describe(value)}"
            raise InvalidError.because(why, type="array", minItems=len(arguments), maxItems=len(arguments))
        types = arguments if fixed else [arguments[0] if arguments else Any] * len(value)
        items = self._collect(enumerate(zip(value, types, strict=True)))
        is_set = issubclass(origin, AbstractSet)
        if is_set and len(set(items.values())) < len(items):
            raise InvalidError.because("an entry is there twice", uniqueItems=True)
        make = origin if origin in (set, list) else frozenset if is_set else tuple
        return make(items.values())

    def _mapping(self, value: Any, cls: Any) -> dict[Any, Any]:
        value_type = get_args(cls)[1] if get_args(cls) else Any
        if not isinstance(value, Mapping):
            raise InvalidError.because(f"expected a table, got {describe(value)}", type="object")
        if slot_of(value_type) is not None:
            value = {key: _keyed_choice(key, item, value_type) for key, item in value.items()}
        return self._collect((key, (item, value_type)) for key, item in value.items())

    def _union(self, value: Any, cls: Any) -> Any:
        if value is None and is_optional(cls):  # TOML cannot say it; data from elsewhere can
            return None
        members = [member for member in get_args(cls) if member is not NoneType]
        errors = []
        for member in members:
            try:
                return self.structure(value, member)
            except InvalidError as error:
                errors.append(error)
        # What fails deep inside was the right member; otherwise the words for the whole union say most.
        deepest = max(errors, key=lambda error: max(len(problem.path) for problem in error.problems))
        if len(members) == 1 or any(problem.path for problem in deepest.problems):
            raise deepest
        allowed = [problem.allowed for error in errors for problem in error.problems if problem.allowed]
        raise InvalidError.because(f"expected {_a(cls)}, got {describe(value)}", anyOf=allowed)

    def _table(self, value: Any, cls: Any) -> Any:
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise InvalidError.because(f"expected a table, got {describe(value)}", type="object")
        fields = {field.alias: field for field in attrs.fields(attrs.resolve_types(cls)) if field.init}
        given = {key: (value[key], field.type) for key, field in fields.items() if key in value}
        missing = {key: field for key, field in fields.items() if key not in value and field.default is attrs.NOTHING}
        for key, field in [*missing.items()]:
            if (slot := slot_of(field.type)) is not None and slot.default is not None:
                given[key] = ({"name": slot.default}, field.type)
                del missing[key]
        problems = [] if self._ignores_unknown else _unknown_keys(value, fields, missing)
        problems += [_is_required(key, field.type, self._catalog) for key, field in missing.items()]
        converted = {}
        try:
            converted = self._collect(given.items())
        except InvalidError as error:
            problems += error.problems
        if problems:
            raise InvalidError(problems)
        try:
            with attrs.validators.disabled():
                config = cls(**converted)
        except (ValueError, ConfigError) as error:  # a converter or __attrs_post_init__ of the class
            raise InvalidError.because(str(error)) from error
        _validate(config, fields)
        return config

    def _component(self, value: Any, annotation: Any) -> ComponentRef | None:
        if value is None and is_optional(annotation):
            return None
        if isinstance(value, ComponentRef):
            return value
        slot = slot_of(annotation)
        assert slot is not None, "it is why cattrs calls this"
        table, shorthand = _component_table(value, slot, self._catalog)
        if (name := table.get("name", slot.default)) is None:
            raise InvalidError.because(f"needs {_naming(slot, self._catalog)}", **_names(slot, self._catalog))
        if not isinstance(name, str):
            allowed, why = _names(slot, self._catalog), f"{EXPECTED_STRING}, got {describe(name)}"
            raise InvalidError([Problem(("name",), why, allowed=allowed)])
        try:
            provided = self._catalog.lookup(slot.kind, name)
            cls, takes = config_class(provided, self._catalog.kinds[slot.kind])
        except (ConfigError, PluginError) as error:
            raise InvalidError([Problem((), str(error), at=("name",), allowed=_names(slot, self._catalog))]) from error
        keys = {key: item for key, item in table.items() if key != "name"}
        config, written = self._configure(keys, shorthand, cls, provided)
        return ComponentRef(
            kind=slot.kind,
            name=provided.component.name,
            provider=provided.plugin.distribution,
            factory=provided.component.factory,
            config=config,
            takes=takes,
            written=written,
        )

    def _configure(
        self, keys: Mapping[str, Any], shorthand: Mapping[str, str], cls: type, provided: CatalogEntry
    ) -> tuple[Any, Mapping[str, str]]:
        """The config, and ``ComponentRef.written``."""
        written: Mapping[str, str] = {}
        try:
            with output_of(provided.plugin.distribution):
                if hasattr(cls, "expand") and callable(cls.expand):  # it may be a key
                    keys, written = cls.expand(keys)
                config = self.structure(keys, cls)
                plain(config)  # a default may be anything, and has to be written
                return config, {**written, **shorthand}
        except InvalidError as error:
            raise InvalidError(
                [one.moved(lambda path: as_written(as_written(path, written), shorthand)) for one in error.problems]
            ) from error
        except Exception as error:
            plugin, source = provided.plugin, provided.component.config or provided.component.factory
            raise InvalidError.because(
                f"{plugin}: the config class '{source}' fails ({type(error).__name__}: {error}). "
                f"This is a bug in {plugin.distribution}."
            ) from error

    def _collect(self, entries: Iterable[tuple[Any, tuple[Any, Any]]]) -> dict[Any, Any]:
        """Convert values under their keys, and raise the problems of all of them at the end."""
        converted, problems = {}, []
        for key, (value, cls) in entries:
            try:
                converted[key] = self.structure(value, cls)
            except InvalidError as error:
                problems += [problem.under(key) for problem in error.problems]
        if problems:
            raise InvalidError(problems)
        return converted


def _bool(value: Any, _: Any) -> bool:
    if isinstance(value, bool):
        return value
    word = value.lower() if isinstance(value, str) else ""
    hint = f" (write {word} without quotes)" if word in ("true", "false") else ""
    raise InvalidError.because(f"expected true or false, got {describe(value)}{hint}", type="boolean")


def _int(value: Any, _: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        if not -(2**63) <= value < 2**63:
            why = f"expected an integer of at most 64 bits, got one of {value.bit_length() + 1}"
            raise InvalidError.because(why, minimum=-(2**63), maximum=2**63 - 1)
        return value
    hint = f" (write {int(value)})" if isinstance(value, float) and value.is_integer() else ""
    raise InvalidError.because(f"expected an integer, got {describe(value)}{hint}", type="integer")


def _float(value: Any, _: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidError.because(f"expected a number, got {describe(value)}", type="number")
    if not abs(value) <= sys.float_info.max:  # NaN is not, either
        raise InvalidError.because(f"expected a finite number, got {describe(value)}", type="number")
    return float(value)


def _str(value: Any, _: Any) -> str:
    if isinstance(value, str):
        return _without_null(value)
    raise InvalidError.because(f"{EXPECTED_STRING}, got {describe(value)}", type="string")


def _without_null(value: str) -> str:
    """No name of a file, of a variable or of anything else that the system knows has a null character."""
    if "\0" in value:
        raise InvalidError.because(f"cannot hold a null character, got {describe(value)}")
    return value


def _path(value: Any, _: Any) -> Path:
    """The text as written: ``~`` is expanded where the path is used, so that a resolved job is not one machine's."""
    if not isinstance(value, str):
        raise InvalidError.because(f"{EXPECTED_STRING} (a path), got {describe(value)}", type="string")
    if not value:
        raise InvalidError.because("expected a path, got the empty string", type="string", minLength=1)
    return Path(_without_null(value))


def _is_literal(cls: Any) -> bool:
    return get_origin(cls) is Literal


def _literal(value: Any, cls: Any) -> Any:
    return _choice(value, {one: one for one in get_args(cls)})


def _choice(value: Any, choices: Mapping[Any, Any]) -> Any:
    for choice, chosen in choices.items():
        if type(choice) is type(value) and choice == value:
            return chosen
    hint = nearest_hint(value, [one for one in choices if isinstance(one, str)]) if isinstance(value, str) else ""
    why = f"{describe(value)} is not allowed{hint or '.'} Choose one of: {one_of(choices)}."
    raise InvalidError.because(why, enum=[*choices])


def _is_array(cls: Any) -> bool:
    origin = get_origin(cls) or cls
    return isinstance(origin, type) and issubclass(origin, (Sequence, AbstractSet)) and not issubclass(origin, str)


def _is_mapping(cls: Any) -> bool:
    origin = get_origin(cls) or cls
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _keyed_choice(key: str, value: Any, annotation: Any) -> Any:
    """``fsdp = true``, ``fsdp = {}`` and ``fsdp = {name = "fsdp"}`` are the same choice; ``fsdp = false`` is none."""
    if value is True:
        return {"name": key}
    if value is False and is_optional(annotation):
        return None
    return {"name": key, **value} if isinstance(value, Mapping) else value


def _is_union(cls: Any) -> bool:
    return get_origin(cls) in (Union, UnionType)


def _unknown_keys(value: Mapping[str, Any], fields: Mapping[str, Any], missing: dict[str, Any]) -> list[Problem]:
    """One problem for each key that is no field. A field that it was meant to be is not reported missing as well."""
    problems = []
    for index, key in enumerate(key for key in value if key not in fields):
        near = nearest(key, fields) if index < MAX_SHOWN else None  # it takes time, and those are not shown
        missing.pop(near or "", None)
        known = f"known keys: {', '.join(fields)}" if fields else "it takes no keys"
        sentence = f"unknown key; did you mean '{near}'?" if near else f"unknown key; {known}"
        problems.append(Problem((key,), sentence, allowed={"enum": [*fields]}))
    return problems


def _is_required(key: str, annotation: Any, catalog: Catalog) -> Problem:
    slot = slot_of(annotation)
    sentence = f"is required: {_naming(slot, catalog)}" if slot else f"is required ({_a(annotation)})"
    return Problem((key,), sentence, allowed=_names(slot, catalog) if slot else None)


def _validate(config: Any, fields: Mapping[str, Any]) -> None:
    """Run every validator of a table, not just up to the first that fails."""
    problems, crash = [], None
    for key, field in fields.items():
        if field.validator is not None:
            try:
                found = list(violations(config, field, getattr(config, field.name), field.validator))
            except Exception as error:  # noqa: BLE001  # most often a check that relies on a field that is invalid too
                crash = crash or error
            else:
                problems += [problem.under(key) for problem in found]
    if problems:
        raise InvalidError(problems)
    if crash is not None:
        raise crash


def _component_table(value: Any, slot: Slot, catalog: Catalog) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """A component's table; and the shorthand, if a text was given for one of its keys."""
    if isinstance(value, str) and slot.text_key is not None:
        return {slot.text_key: value}, {slot.text_key: ""}
    if isinstance(value, str):
        return {"name": value}, {}
    if isinstance(value, Mapping):
        return value, {}
    or_text = f"{EXPECTED_STRING}, or " if slot.text_key else "expected "
    why = f"{or_text}a table with {_naming(slot, catalog)}; got {describe(value)}"
    raise InvalidError.because(why, **_names(slot, catalog))


def config_class(provided: CatalogEntry, kind: Kind) -> tuple[type, frozenset[str] | None]:
    """The class whose fields are a component's keys, and ``ComponentRef.takes``.

    Raises:
        PluginError: it cannot be imported or read, or is not an attrs class; the message says whose bug that is.
    """
    component, plugin = provided.component, provided.plugin
    what = f"the config class of {kind_words(kind.name)} '{component.name}'"
    if not component.config:
        from forge_core.registry.signature import signature_of  # it parses source text, which not all jobs need

        try:
            return signature_of(component.factory, kind)
        except PluginError as error:
            raise PluginError(f"{plugin}: {error}") from error
    cls = load_reference(component.config, what=what, owner=str(plugin))
    has_keys = isinstance(cls, type) and attrs.has(cls)
    if not has_keys or any(field.init and field.alias == "name" for field in attrs.fields(cls)):
        why = "has a field 'name', the key that chooses the component" if has_keys else "is not an attrs class"
        raise PluginError(f"{plugin}: {what} '{component.config}' {why}. This is a bug in {plugin.distribution}.")
    return cls, None


def _naming(slot: Slot, catalog: Catalog) -> str:
    available = ", ".join(_names(slot, catalog)["enum"]) or "none"
    return f'name = "..." naming {with_article(kind_words(slot.kind))}; available: {available}'


def _names(slot: Slot, catalog: Catalog) -> dict[str, list[str]]:
    return {"enum": [*dict.fromkeys(provided.component.name for provided in catalog.components(slot.kind))]}


def _a(annotation: Any) -> str:
    """A type in words, with an article where one belongs: ``an integer``, ``true or false``."""
    from forge_core.config.field_docs import type_words  # it parses source text; only a message needs it

    words = type_words(annotation)
    return words if words[0] in '"-0123456789' or words in ("true or false", "anything") else with_article(words)
