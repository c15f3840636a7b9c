"""Find the installed plugins, load each inside its own ``try``, and build the catalog.

A plugin that raises, breaks the contract or was written for another version of it is listed with the reason, all of
its components are withdrawn, and no other plugin is touched. Nothing depends on the order in which plugins are found.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, TypeVar

import attrs
import pluggy

from forge_core import __version__
from forge_core.errors import ForgeError, PluginError, did_you_mean, with_article
from forge_core.registry.catalog import Catalog, Plugin, Status
from forge_core.registry.component import Check, Command, Component, Kind
from forge_core.registry.entry_points import (
    API_MINOR,
    API_VERSION,
    ENTRY_POINT_GROUP,
    PluginEntryPoint,
    canonical_distribution,
    plugin_entry_points,
)
from forge_core.registry.hookspecs import BESIDE_COMPONENTS, CORE_COMMANDS, CORE_KINDS, ForgeSpecs
from forge_core.registry.imports import HEAVY_MODULES
from forge_core.registry.plugin_output import output_of

DISABLE_VARIABLE = "FORGE_DISABLE_PLUGINS"
"""Environment variable: distributions that are not imported, separated by commas."""


def discover(disable: Collection[str] = ()) -> Catalog:
    """The catalog of what is installed.

    Args:
        disable: distributions that are listed and not imported, in addition to those of ``FORGE_DISABLE_PLUGINS``.
    """
    from_environment = os.environ.get(DISABLE_VARIABLE, "").split(",")
    disabled = {canonical_distribution(name.strip()) for name in (*disable, *from_environment)}
    candidates = [_Candidate(announcement) for announcement in plugin_entry_points(tuple(sys.path))]
    for candidate in candidates:
        if candidate.distribution in disabled:
            candidate.fail("disabled", "it was switched off")
        else:
            candidate.check_entry_point()

    manager = pluggy.PluginManager("forge")
    manager.add_hookspecs(ForgeSpecs)
    _load(candidates, manager)
    _refuse_duplicate_kinds(candidates)
    _refuse_unknown_hooks(candidates)
    _collect(candidates)
    return Catalog(candidate.plugin for candidate in candidates)


@attrs.define
class _Candidate:
    """A distribution on its way to becoming a ``Plugin``."""

    announcement: PluginEntryPoint
    module: Any = None
    hooks: Mapping[str, Sequence[pluggy.HookImpl]] = attrs.field(factory=dict)
    """Its implementations, by the hook's name."""
    listed: Any = ()
    """Its module's ``components``."""
    plugin: Plugin = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.plugin = Plugin(distribution=self.distribution, version=self.announcement.version)

    @property
    def distribution(self) -> str:
        return self.announcement.distribution

    @property
    def is_ok(self) -> bool:
        return self.plugin.status == "ok"

    def fail(self, status: Status, reason: str, error: BaseException | None = None) -> None:
        """Withdraw everything. The first reason stays."""
        if not self.is_ok:
            return
        trace = ""
        if error is not None:
            from traceback import format_exception

            trace = "".join(format_exception(error))
        self.hooks = {}
        self.plugin = attrs.evolve(self.plugin, status=status, reason=reason, traceback=trace, kinds=())

    def fail_for_version(self, reason: str, too_old: str) -> None:
        """Withdraw everything until the distribution that is too old has been upgraded."""
        self.fail("incompatible", f"{reason}, {_THIS_CORE}: pip install --upgrade {too_old}")

    def check_entry_point(self) -> None:
        """Look at the entry points, without an import."""
        points = self.announcement.entry_points
        ours = [name for major, name, _ in points if major == _MAJOR]
        majors = [major for major, _, _ in points]
        if len(ours) > 1:
            why = f"has {len(ours)} entry points in the group {ENTRY_POINT_GROUP} ({', '.join(ours)}); one is allowed"
            self.fail("broken", why)
        elif not ours and max(majors) > _MAJOR:
            self.fail_for_version(f"needs plugin API v{min(majors)}", "forge-core")
        elif not ours:
            self.fail_for_version(f"was written for plugin API v{max(majors)}", self.distribution)
        elif old := _too_old(self.distribution, self.announcement.core):
            self.fail_for_version(f"needs forge-core{self.announcement.core}", old)

    def load(self, manager: pluggy.PluginManager) -> None:
        """Import the plugin module, check the version that it states, and register it under the distribution's name."""
        reference = next(value for major, _, value in self.announcement.entry_points if major == _MAJOR)
        path, _, attribute = reference.partition(":")
        before = [name for name in HEAVY_MODULES if name in sys.modules]
        start = time.perf_counter()
        try:
            with output_of(self.distribution):
                module: Any = import_module(path)
            if attribute:
                module = getattr(module, attribute)
        except _ANYTHING:
            # A plugin for a later minor usually fails here, at a name that forge_core.api does not have yet.
            self._check_version(_version_in_source(path))
            raise
        finally:
            heavy = tuple(name for name in HEAVY_MODULES if name in sys.modules and name not in before)
            self.plugin = attrs.evolve(self.plugin, import_seconds=time.perf_counter() - start, heavy=heavy)
        own = {*dir(module)}  # a module may raise, or make something up, for names that it does not have
        self._check_version(module.FORGE_API if "FORGE_API" in own else None)
        if (other := manager.get_name(module)) is not None:
            self.fail("broken", f"its plugin module '{reference}' is also the one of {other}")
        if not self.is_ok:
            return
        manager.register(module, name=self.distribution)
        self.module, self.listed = module, module.components if "components" in own else ()
        self.hooks = {
            caller.name: [one for one in caller.get_hookimpls() if one.plugin_name == self.distribution]
            for caller in manager.get_hookcallers(module) or ()
        }

    def _check_version(self, stated: object) -> None:
        if stated is None:
            return
        parsed = re.fullmatch(r"(\d{1,9})\.(\d{1,9})", stated) if isinstance(stated, str) else None
        if parsed is None:
            self.fail("broken", f'FORGE_API must be a string such as "1.0", got {stated!r}')
        elif int(parsed[1]) != _MAJOR:
            self.fail("broken", f'FORGE_API = "{stated}" contradicts its entry-point group {ENTRY_POINT_GROUP}')
        elif int(parsed[2]) > API_MINOR:
            self.fail_for_version(f"needs plugin API >= {stated}", "forge-core")


def _load(candidates: Iterable[_Candidate], manager: pluggy.PluginManager) -> None:
    """Load what has not been refused, and ask it for the kinds that it adds."""
    for candidate in candidates:
        if candidate.is_ok:
            try:
                candidate.load(manager)
            except _ANYTHING as error:  # its module may be any object, which looks are enough to make fail
                candidate.fail("broken", _sentence(error), error)
            kinds = tuple(_yielded(candidate, "forge_kinds", Kind))
            candidate.plugin = attrs.evolve(candidate.plugin, kinds=kinds)


def _refuse_duplicate_kinds(candidates: Collection[_Candidate]) -> None:
    """A kind that two plugins add belongs to neither: either choice would change what the other one's users see."""
    adders: dict[str, list[_Candidate]] = {}
    for candidate in candidates:
        for kind in candidate.plugin.kinds:
            for taken in (kind.name, kind.hook):
                adders.setdefault(taken, []).append(candidate)
    core = {name for kind in CORE_KINDS for name in (kind.name, kind.hook)}
    core |= {name for hook, cls in BESIDE_COMPONENTS.items() for name in (cls.__name__.lower(), hook)}
    for taken, found in adders.items():
        for candidate in found:
            others = sorted({other.distribution for other in found if other is not candidate})
            if taken in core:
                candidate.fail("broken", f"adds '{taken}', which the core has already")
            elif others:
                candidate.fail("broken", f"adds '{taken}', which {' and '.join(others)} adds as well; disable one")
            elif len(found) > 1:
                candidate.fail("broken", f"adds '{taken}' twice")


def _refuse_unknown_hooks(candidates: Collection[_Candidate]) -> None:
    known = {*BESIDE_COMPONENTS, *(kind.hook for kind in _kinds(candidates))}
    for candidate in [candidate for candidate in candidates if candidate.is_ok]:
        implemented = candidate.hooks
        needed = {hook for hook, found in implemented.items() if not all(one.optionalhook for one in found)}
        for hook in sorted(needed - known):
            optional = " If another plugin adds it, mark it @hookimpl(optionalhook=True)."
            candidate.fail("broken", f"unknown hook '{hook}'.{did_you_mean(hook, known, 0.8) or optional}")
        for hook in sorted((known - implemented.keys()) & {*dir(candidate.module)}):
            if inspect.isfunction(inspect.getattr_static(candidate.module, hook, None)):
                candidate.fail("broken", f"{hook} is not marked with @hookimpl, and would never be called")


def _kinds(candidates: Iterable[_Candidate]) -> list[Kind]:
    return [*CORE_KINDS, *(kind for candidate in candidates for kind in candidate.plugin.kinds)]


def _collect(candidates: Collection[_Candidate]) -> None:
    """Ask every plugin for what it has of each kind, and for its commands and checks."""
    loaded = [candidate for candidate in candidates if candidate.is_ok]
    kinds = _kinds(loaded)
    for candidate in loaded:
        listed = _listed(candidate, kinds)
        components = [
            (kind.name, component)
            for kind in kinds
            for component in _distinct(candidate, kind.hook, kind.descriptor, listed.get(kind.name, ()))
        ]
        for kind, component in components:
            if component.kind not in ("", kind):
                candidate.fail("broken", f"a hook for {kind} yields '{component.name}', of the kind {component.kind}")
        commands = _distinct(candidate, "forge_commands", Command)
        for name in sorted({one.name for one in commands} & {one.name for one in CORE_COMMANDS}):
            candidate.fail("broken", f"its command '{name}' would replace the core's")
        checks = _distinct(candidate, "forge_checks", Check)
        if candidate.is_ok:
            candidate.plugin = attrs.evolve(
                candidate.plugin, components=tuple(components), commands=tuple(commands), checks=tuple(checks)
            )


def _listed(candidate: _Candidate, kinds: Iterable[Kind]) -> dict[str, list[Component]]:
    """The list ``components`` of a plugin module, by kind; the plugin is broken if it holds anything else."""
    listed = candidate.listed
    descriptors, found = {kind.name: kind.descriptor for kind in kinds}, dict[str, list[Component]]()
    if isinstance(listed, (Iterable, Component)) and not isinstance(listed, (list, tuple)):
        candidate.fail("broken", f"components: it must be a list of descriptions, not {_a(listed)}")
    for one in listed if isinstance(listed, (list, tuple)) else ():  # a function or a module may have the name
        if not isinstance(one, Component):
            candidate.fail("broken", f"components: it must hold descriptions of type Component, not {_a(one)}")
        elif one.kind not in descriptors:
            hint = did_you_mean(one.kind, descriptors) or f" Kinds: {', '.join(descriptors)}."
            candidate.fail("broken", f"components: '{one.name}' has the kind {one.kind!r}, which is none.{hint}")
        elif not isinstance(one, descriptors[one.kind]):
            wanted = descriptors[one.kind].__name__
            candidate.fail("broken", f"components: '{one.name}' must be a {wanted}, not {_a(one)}")
        else:
            found.setdefault(one.kind, []).append(one)
    return found


def _distinct(
    candidate: _Candidate, hook: str, expected: type[Description], listed: Iterable[Any] = ()
) -> list[Description]:
    """Return what ``_yielded`` gives, and what is listed; the plugin is broken if two of them have one name."""
    found = [*_yielded(candidate, hook, expected), *listed]
    names = [name for one in found for name in (one.name, *getattr(one, "aliases", ()))]
    for name in names:
        if names.count(name) > 1:
            candidate.fail("broken", f"{hook} yields the name '{name}' {names.count(name)} times")
    return found


def _yielded(candidate: _Candidate, hook: str, expected: type[Description]) -> list[Description]:
    """The descriptions that one plugin's implementation yields; nothing, and the plugin is broken, if it fails or
    yields anything else.

    Generators run here, inside the ``try``, and not in pluggy, where one failure would discard everybody's results.
    """
    found: list[Description] = []
    for implementation in candidate.hooks.get(hook, ()):
        if implementation.argnames:  # pluggy knows of the core's hooks alone
            candidate.fail("broken", f"{hook} takes no arguments and may not be a wrapper")
            return []
        try:
            if implementation.wrapper or implementation.hookwrapper:
                raise PluginError("it may not be a wrapper")
            with output_of(candidate.distribution):
                result = implementation.function()
                if not isinstance(result, Iterable):
                    raise PluginError(f"it must yield descriptions or return a list of them, not {_a(result)}")
                for one in result:
                    if not isinstance(one, expected):
                        raise PluginError(f"it must yield descriptions of type {expected.__name__}, not {_a(one)}")
                    found.append(one)
        except _ANYTHING as error:
            candidate.fail("broken", f"{hook}: {_sentence(error)}", error)
            return []
    return found


def _version_in_source(path: str) -> str | None:
    """The text that a plugin module which cannot be imported states as its ``FORGE_API``."""
    from importlib.util import find_spec
    from pathlib import Path

    try:
        module = find_spec(path)
        source = Path(module.origin).read_text(encoding="utf-8") if module and module.origin else ""
    except _ANYTHING:  # its package cannot be imported either, or it is not made of text
        return None
    stated = re.search(r"""^FORGE_API\s*=\s*["'](\d+\.\d+)["']""", source, re.MULTILINE)
    return stated[1] if stated else None


def _sentence(error: BaseException) -> str:
    """One line. A message of ours stands alone; others are told by their type as well."""
    says = error.args[0] if any(isinstance(one, attrs.Attribute) for one in error.args) else error  # of its validators
    try:
        message = " ".join(str(says).split())
    except _ANYTHING:
        message = "its message cannot be read"
    return message if isinstance(error, ForgeError) else f"{type(error).__name__}: {message}".rstrip(": ")


def _a(value: object) -> str:
    """The type of ``value`` in words: ``"a str"``."""
    return "None" if value is None else with_article(type(value).__name__)


def _too_old(distribution: str, asked: str) -> str:
    """Which distribution to upgrade, if this core is not in ``>=a,<b``, which a plugin asks for; else nothing.
    ``forge doctor`` looks at other requirements, as importing what compares them takes as long as finding all
    plugins."""
    usual = re.fullmatch(r"<([\d.]+),\s*>=([\d.]+)|>=([\d.]+),\s*<([\d.]+)", asked)
    if usual is None:
        return ""
    here, below, least = map(_numbers, (__version__, usual[1] or usual[4], usual[2] or usual[3]))
    return "forge-core" if here < least else distribution if here >= below else ""


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers of a release; 0.1 and 0.1.0 are one."""
    return tuple(int(number) for number in re.findall(r"\d+", re.sub(r"(\.0)*([^\d.].*)?$", "", version)))


Description = TypeVar("Description", bound=Component | Command | Check | Kind)

# Any error of a plugin is that plugin's problem alone; a module-level sys.exit() included.
_ANYTHING = (Exception, SystemExit)
_MAJOR = int(ENTRY_POINT_GROUP.removeprefix("forge.v"))
_THIS_CORE = f"this is forge-core {__version__} (API {API_VERSION})"
