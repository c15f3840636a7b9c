"""Conformance of plugins: what every distribution that registers something must keep to. Needs no torch."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from enum import Enum
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

import attrs
import click
import tomli_w

from forge_core.api import ENTRY_POINT_GROUP
from forge_core.config.builder import ComponentBuilder, config_class
from forge_core.config.converter import slot_of
from forge_core.config.field_docs import field_docs
from forge_core.config.sections import Job
from forge_core.config.unstructure import plain
from forge_core.errors import ConfigError
from forge_core.registry.catalog import Catalog, CatalogEntry, Plugin
from forge_core.registry.component import Component, PassComponent
from forge_core.registry.discovery import discover
from forge_core.registry.entry_points import canonical_distribution
from forge_core.registry.hookspecs import CORE_KINDS
from forge_core.registry.imports import HEAVY_MODULES, load_reference


class PluginConformance:
    """Subclass it, name the distribution, and pytest runs every check below on it."""

    dist: ClassVar[str]
    """Name of the installed distribution."""

    def plugin(self) -> Plugin:
        """The plugin as discovery sees it."""
        wanted = canonical_distribution(self.dist)
        for plugin in _installed().plugins:
            if plugin.distribution == wanted:
                return plugin
        raise AssertionError(
            f"{self.dist} is not installed, or has no entry point in the group {ENTRY_POINT_GROUP}: pip install -e ."
        )

    def test_loads(self) -> None:
        plugin = self.plugin()

        assert plugin.status == "ok", f"{plugin} is {plugin.status}: {plugin.reason}"
        registered = (*plugin.components, *plugin.commands, *plugin.checks, *plugin.kinds)
        assert registered, f"{plugin} registers nothing"

    def test_announces_itself_under_its_own_name(self) -> None:
        (point,) = metadata.distribution(self.dist).entry_points.select(group=ENTRY_POINT_GROUP)

        assert canonical_distribution(point.name) == canonical_distribution(self.dist), (
            f"the entry point is called {point.name!r}; call it {self.dist!r}, as the distribution"
        )

    def test_requires_the_core(self) -> None:
        requirements = metadata.requires(self.dist) or []

        assert any(canonical_distribution(line).startswith("forge-core") for line in requirements), (
            f'{self.dist} does not depend on forge-core; add dependencies = ["forge-core>=…,<…"] to its pyproject.toml'
        )

    def test_listing_it_imports_nothing_heavy(self) -> None:
        module, heavy = self._entry_module(), self._fresh_interpreter().listing

        assert not heavy, f"importing {module} imports {', '.join(heavy)}; every forge command has to wait for it"

    def test_validating_it_imports_nothing_heavy(self) -> None:
        heavy = self._fresh_interpreter().validating

        assert not heavy, f"reading what can be set imports {', '.join(heavy)}; forge validate has to wait for it"

    def test_importing_it_prints_nothing(self) -> None:
        printed = self._fresh_interpreter().printed

        assert not printed, (
            f"importing {', '.join([self._entry_module(), *self._config_modules()])} prints {printed[0]!r}; standard "
            "output belongs to the command, whose JSON or TOML somebody may read"
        )

    def test_configs_are_frozen_attrs_classes(self) -> None:
        for label, cls in self._configs():
            assert attrs.has(cls), f"{label} must be an attrs class"
            assert _is_frozen(cls), f"{label} must be frozen: @attrs.frozen(kw_only=True)"
            positional = [field.name for field in attrs.fields(cls) if not field.kw_only]
            assert not positional, f"{label}: {', '.join(positional)} must be keyword-only: @attrs.frozen(kw_only=True)"

    def test_configs_leave_name_to_the_choice_of_component(self) -> None:
        for label, cls in self._configs():
            keys = [field.alias for field in attrs.fields(cls)]
            assert "name" not in keys, f"{label} has a field called name, the key that chooses the component"

    def test_fields_have_types_that_a_job_can_say(self) -> None:
        for label, cls in self._configs():
            for field in attrs.fields(attrs.resolve_types(cls, include_extras=True)):
                foreign = _foreign(field.type)
                assert foreign is None, (
                    f"{label}.{field.name} has the type {foreign}, which cannot be read from TOML, or is not checked: "
                    "use bool, int, float, str, Path, Literal, Enum, attrs classes, choices of a component, arrays and "
                    "tables of these (with strings as keys), or Any"
                )

    def test_optional_fields_default_to_none(self) -> None:
        for label, cls in self._configs():
            for field in attrs.fields(attrs.resolve_types(cls)):
                optional = type(None) in get_args(field.type)
                assert not optional or field.default is None, (
                    f"{label}.{field.name} may be None and must therefore default to None: TOML cannot say None, so a "
                    "resolved job would come back with the default"
                )

    def test_defaults_survive_a_resolved_job(self) -> None:
        build, distribution = ComponentBuilder(_installed()), self.plugin().distribution
        for kind, component in self.plugin().components:
            cls = self._keys(kind, component)
            if any(_is_required(field) for field in attrs.fields(attrs.resolve_types(cls, include_extras=True))):
                continue
            try:
                chosen = build.resolve(kind, {"name": f"{distribution}:{component.name}"})
            except ConfigError:  # it asks for one of several keys, as for path or dataset
                continue
            again = build.resolve(kind, tomllib.loads(tomli_w.dumps(plain(chosen))))
            assert again == chosen, (
                f"{kind} {component.name}: its defaults written to TOML and read again are {again.config}, not "
                f"{chosen.config}"
            )

    def test_needs_and_conflicts_of_passes_are_about_keys_that_exist(self) -> None:
        sections: dict[str, Any] = {one.name: one.type for one in attrs.fields(attrs.resolve_types(Job))}
        settings = {
            f"{section}.{field.alias}"
            for section, cls in sections.items()
            if isinstance(cls, type) and attrs.has(cls)
            for field in attrs.fields(cls)
        }
        for kind, component in self.plugin().components:
            if not isinstance(component, PassComponent):
                continue
            keys = {field.name for field in attrs.fields(self._keys(kind, component))}
            for conditions in (one.when for some in (component.needs, component.conflicts) for one in some):
                wrong = sorted(conditions.keys() - keys)
                assert not wrong, f"{kind} {component.name}: it has no key {wrong[0]!r}, which it declares something of"
            for conflict in component.conflicts:
                assert "." not in conflict.other or conflict.other in settings, (
                    f"{kind} {component.name}: it declares a conflict with {conflict.other!r}, which is no key of a job"
                )

    def test_settings_that_passes_offer_for_comparison_are_valid(self) -> None:
        build, distribution = ComponentBuilder(_installed()), self.plugin().distribution
        for kind, component in self.plugin().components:
            for settings in component.compared if isinstance(component, PassComponent) else ():
                try:
                    build.resolve(kind, {"name": f"{distribution}:{component.name}", **settings})
                except ConfigError as error:
                    raise AssertionError(f"{kind} {component.name}: compared has {dict(settings)}: {error}") from None

    def test_every_field_is_documented(self) -> None:
        for label, cls in self._configs():
            assert cls.__doc__, f"{label} has no docstring"
            documented = field_docs(cls)
            for field in attrs.fields(cls):
                assert field.name in documented, (
                    f"{label}.{field.name} has no docstring under it, nor a line under Args: of the class"
                )

    def test_factories_take_what_the_contract_gives(self) -> None:
        kinds = {kind.name: kind for kind in (*CORE_KINDS, *self.plugin().kinds)}
        for kind, component in self.plugin().components:
            factory = self._load(component, component.factory, "factory")
            assert callable(factory), f"{kind} {component.name}: the factory {component.factory} is not callable"
            promised = _factory_signature(kinds[kind].contract) if kind in kinds else None
            if promised is None or not component.config:  # its parameters are its keys
                continue
            signature = inspect.signature(factory)
            # these are given only to factories that ask for them
            offered = ("build", *kinds[kind].optional)
            given = {name: None for name in promised if name not in offered or name in signature.parameters}
            try:
                signature.bind(None, **given)
            except TypeError as error:
                raise AssertionError(
                    f"{kind} {component.name}: {component.factory} cannot be called as "
                    f"factory(config, {', '.join(f'{name}=…' for name in given)}): {error}"
                ) from None

    def test_checks_are_functions(self) -> None:
        for check in self.plugin().checks:
            for reference in filter(None, (check.run, check.writes)):
                loaded = load_reference(reference, what=f"the check '{check.name}'", owner=self.dist)
                assert callable(loaded), f"the check {check.name!r}: {reference} must be a function, got {loaded!r}"

    def test_commands_are_click_commands(self) -> None:
        for command in self.plugin().commands:
            loaded = load_reference(command.run, what=f"the command '{command.name}'", owner=self.dist)
            assert isinstance(loaded, click.Command), (
                f"the command {command.name!r}: {command.run} must be a click.Command, got {type(loaded).__name__}"
            )

    def test_commands_on_ranks_start_them(self) -> None:
        for command in (one for one in self.plugin().commands if one.ranks):
            loaded = load_reference(command.run, what=f"the command '{command.name}'", owner=self.dist)
            own = [one for one in loaded.params if "--nproc" in one.opts and one.expose_value]
            assert not own, f"the command {command.name!r} has ranks=True, which adds --nproc; leave out its own"
            source = inspect.getsource(import_module(command.run.partition(":")[0]))
            assert ".start_ranks(" in source, (
                f"the command {command.name!r} has ranks=True, and {command.run} never calls start_ranks() of its "
                "invocation: --nproc would do nothing"
            )

    def _entry_module(self) -> str:
        (point,) = metadata.distribution(self.dist).entry_points.select(group=ENTRY_POINT_GROUP)
        return point.module

    def _config_modules(self) -> list[str]:
        return sorted({component.config.partition(":")[0] for _, component in self.plugin().components} - {""})

    def _fresh_interpreter(self) -> _Imports:
        return _imports(self._entry_module(), tuple(self._config_modules()), self.plugin().distribution, _path())

    def _configs(self) -> Iterator[tuple[str, type]]:
        for kind, component in self.plugin().components:
            yield f"{kind} {component.name}: {component.config or component.factory}", self._keys(kind, component)

    def _keys(self, kind: str, component: Component) -> Any:
        """The class whose fields are the component's keys."""
        if component.config:
            return self._load(component, component.config, "config class")
        return config_class(CatalogEntry(component, self.plugin()), _installed().kinds[kind])[0]

    def _load(self, component: Component, reference: str, what: str) -> Any:
        return load_reference(reference, what=f"the {what} of '{component.name}'", owner=self.dist)


def _installed() -> Catalog:
    return _installed_on(_path())


@cache
def _installed_on(path: tuple[str, ...]) -> Catalog:
    """Remembered, as nearly every check asks for it: reading what is installed takes longer than most of them do."""
    return discover()


def _path() -> tuple[str, ...]:
    """Where modules and distributions are looked for."""
    return tuple(entry for entry in sys.path if entry)


@attrs.frozen
class _Imports:
    """One fresh interpreter, as it comes to know a plugin step by step."""

    listing: list[str]
    """Heavy modules that are imported with the module of the entry point."""
    printed: list[str]
    """Lines that it prints while it imports that module, and those of the config classes."""
    validating: list[str]
    """Heavy modules that are imported once it knows every key of the plugin's components."""


@cache
def _imports(entry_module: str, config_modules: tuple[str, ...], distribution: str, path: tuple[str, ...]) -> _Imports:
    """Three checks ask for it: it is remembered, since starting Python takes longer than they do."""
    program = _PROGRAM.format(
        path=path, heavy=HEAVY_MODULES, entry=entry_module, configs=config_modules, distribution=distribution
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, f"importing {distribution} fails: {run.stderr.strip().splitlines()[-1]}"
    printed, _, answer = run.stdout.rstrip("\n").rpartition("\n")
    listing, validating = json.loads(answer)
    return _Imports(listing, printed.splitlines(), validating)


_PROGRAM = """
import importlib, json, os, sys

sys.path[:] = {path!r}
heavy = lambda: [name for name in {heavy!r} if name in sys.modules]
importlib.import_module({entry!r})
listing = heavy()
for module in {configs!r}:
    importlib.import_module(module)
sys.stdout.flush()
answer = open(os.dup(1), "w")
os.dup2(2, 1)  # discovery imports other plugins, and what they print is not this one's

from forge_core.config.builder import config_class
from forge_core.registry.discovery import discover

catalog = discover()
for kind in catalog.kinds.values():
    for one in catalog.components(kind.name):
        if one.plugin.distribution == {distribution!r}:
            config_class(one, kind)
print(file=answer)  # where a plugin has not ended its line
print(json.dumps([listing, heavy()]), file=answer)
answer.close()
"""


_PLAIN = (bool, int, float, str, Path, Any, type(None), Literal)
_ARRAYS = (list, tuple, set, frozenset, Sequence, Set)


def _foreign(annotation: Any) -> str | None:
    """The part of a type that means nothing in TOML; ``None`` if there is none."""
    origin, parts = get_origin(annotation) or annotation, get_args(annotation)
    if slot_of(annotation) is not None or origin in _PLAIN or attrs.has(origin):
        return None
    if isinstance(origin, type) and issubclass(origin, Enum):
        return None
    if hasattr(origin, "__supertype__"):  # a NewType
        parts = (origin.__supertype__,)
    elif origin is Annotated:
        parts = parts[:1]
    elif origin in (dict, Mapping) and parts[:1] in ((), (str,)):
        parts = parts[1:]
    elif origin not in (*_ARRAYS, Union, UnionType):
        return str(annotation) if parts else getattr(annotation, "__name__", str(annotation))
    found = (_foreign(part) for part in parts if part is not Ellipsis)
    return next((one for one in found if one is not None), None)


def _is_required(field: attrs.Attribute[Any]) -> bool:
    slot = slot_of(field.type)
    return field.default is attrs.NOTHING and (slot is None or slot.default is None)


def _is_frozen(cls: type) -> bool:
    blank: Any = object.__new__(cls)
    try:
        blank.anything = None
    except attrs.exceptions.FrozenInstanceError:
        return True
    except AttributeError:  # no slot of this name
        pass
    return False


def _factory_signature(contract: str) -> list[str] | None:
    """Keyword parameters of the protocol ``…Factory`` in the contract's module, if it has one."""
    module = import_module(contract.partition(":")[0])
    for name, value in vars(module).items():
        if name.endswith("Factory") and inspect.isclass(value) and value.__module__ == module.__name__:
            call: Callable[..., Any] = value.__call__
            parameters = inspect.signature(call).parameters.values()
            return [one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY]
    return None
