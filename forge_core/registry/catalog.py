"""Every component of every installed plugin, by kind and name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Literal

import attrs

from forge_core.contracts.component_ref import ComponentRef
from forge_core.errors import ConfigError
from forge_core.registry.component import Check, Command, Component, Kind, kind_words
from forge_core.registry.entry_points import canonical_distribution, extras_of
from forge_core.registry.hookspecs import CORE_KINDS

Status = Literal["ok", "broken", "incompatible", "disabled"]
SLOW_IMPORT = 0.5
"""Seconds, of the plugin module alone: every command waits for it."""


@attrs.frozen(kw_only=True)
class Plugin:
    """An installed distribution that announces itself to Forge, and what became of it."""

    distribution: str
    """Its name, normalised as in PEP 503: the identity of a plugin."""
    version: str
    status: Status = "ok"
    reason: str = ""
    """Why it is not ``"ok"``, in a sentence."""
    traceback: str = ""
    """The traceback of the error that broke it; printed with ``--debug``."""
    import_seconds: float = 0.0
    """The seconds that importing its plugin module took."""
    heavy: tuple[str, ...] = ()
    """Large libraries that its plugin module imported, although every command has to wait for them."""
    components: tuple[tuple[str, Component], ...] = ()
    """Pairs of kind and component. Empty unless ``"ok"``: there are no half plugins."""
    commands: tuple[Command, ...] = ()
    checks: tuple[Check, ...] = ()
    kinds: tuple[Kind, ...] = ()

    @property
    def is_slow(self) -> bool:
        return self.import_seconds > SLOW_IMPORT

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


@attrs.frozen
class CatalogEntry:
    """A component and the plugin that provides it."""

    component: Component
    plugin: Plugin

    @property
    def qualified_name(self) -> str:
        """``"distribution:name"``, unambiguous with any set of installed plugins."""
        return f"{self.plugin.distribution}:{self.component.name}"

    @property
    def how_to_install(self) -> str:
        """The words for a missing module: the distribution's extra of the component's name, if it has one."""
        extra = f"{self.plugin.distribution}[{self.component.name}]"
        extras = map(canonical_distribution, extras_of(self.plugin.distribution))
        has_one = canonical_distribution(self.component.name) in extras
        return f"pip install '{extra}'" if has_one else "install what provides it"

    @property
    def deprecation(self) -> str:
        """A sentence to print when the component is chosen; empty if it is not deprecated."""
        if not self.component.deprecated:
            return ""
        return f"'{self.component.name}' of {self.plugin} is deprecated: {self.component.deprecated}"


@attrs.frozen
class NameConflict:
    """A name that several plugins provide: legal to install, an error when the bare name is used."""

    kind: str
    """A kind of component, or ``"command"``."""
    name: str
    distributions: tuple[str, ...]

    def __str__(self) -> str:
        providers = " and ".join(self.distributions)
        if self.kind == "command":
            remedy = f"--disable-plugin {self.distributions[-1]} leaves the other"
        else:
            remedy = f'write name = "{self.distributions[0]}:{self.name}" to choose'
        return f"{self.kind} '{self.name}' is provided by {providers}; {remedy}"


class Catalog:
    """The installed components. The catalog does not change once it is built, and building it imports no component."""

    def __init__(self, plugins: Iterable[Plugin]) -> None:
        self.plugins = tuple(sorted(plugins, key=lambda plugin: plugin.distribution))
        self.kinds: Mapping[str, Kind] = MappingProxyType(
            {kind.name: kind for kind in (*CORE_KINDS, *(kind for plugin in self.plugins for kind in plugin.kinds))}
        )
        self._of_kind: defaultdict[str, list[CatalogEntry]] = defaultdict(list)
        self._components: defaultdict[tuple[str, str], list[CatalogEntry]] = defaultdict(list)
        """By kind and name, or alias."""
        self._commands: defaultdict[str, list[tuple[Command, Plugin]]] = defaultdict(list)
        for plugin in self.plugins:
            for kind, component in plugin.components:
                entry = CatalogEntry(component, plugin)
                self._of_kind[kind].append(entry)
                for name in (component.name, *component.aliases):
                    self._components[kind, name].append(entry)
            for command in plugin.commands:
                self._commands[command.name].append((command, plugin))

    @property
    def commands(self) -> Mapping[str, tuple[Command, Plugin]]:
        """The plugins' commands by name, without names that several plugins provide."""
        return MappingProxyType({name: found[0] for name, found in self._commands.items() if len(found) == 1})

    def components(self, kind: str) -> list[CatalogEntry]:
        """All components of a kind, sorted by name, then by distribution.

        Raises:
            ConfigError: there is no such kind.
        """
        self._require_kind(kind)
        return sorted(self._of_kind.get(kind, ()), key=lambda one: (one.component.name, one.plugin.distribution))

    def lookup(self, kind: str, name: str) -> CatalogEntry:
        """The component that a configuration names, ready to be built.

        Args:
            kind: such as ``"router"``.
            name: a name or an alias, or ``"distribution:name"``.

        Raises:
            ConfigError: there is none, there are several, or a module that it needs is missing. The message has no
                key path in front; the caller knows it.
        """
        provided = self.find(kind, name)
        if missing := [module for module in provided.component.modules if not is_importable(module)]:
            raise ConfigError(
                f"{kind_words(kind)} '{provided.component.name}' of {provided.plugin} needs "
                f"{', '.join(repr(module) for module in missing)}, which cannot be imported; {provided.how_to_install}"
            )
        return provided

    def find(self, kind: str, name: str) -> CatalogEntry:
        """Same as ``lookup``, also for a component whose optional modules are missing."""
        self._require_kind(kind)
        found = self.providers(kind, name)
        if len(found) > 1:
            lines = [f'    name = "{one.qualified_name}"    # {one.component.summary}' for one in found]
            raise ConfigError(
                f"{kind_words(kind)} '{name}' is provided by {len(found)} plugins. Say which one:\n" + "\n".join(lines)
            )
        if not found:
            from forge_core.registry.suggestions import why_no_component  # a dear import, for the sad path only

            raise ConfigError(why_no_component(self, kind, name))
        return found[0]

    def providers(self, kind: str, name: str) -> tuple[CatalogEntry, ...]:
        """Everything that a name, an alias, or ``"distribution:name"`` may mean; empty if it means nothing."""
        distribution, colon, bare = name.rpartition(":")
        found = tuple(self._components.get((kind, bare), ()))
        if not colon:
            return found
        wanted = canonical_distribution(distribution)
        return tuple(one for one in found if canonical_distribution(one.plugin.distribution) == wanted)

    def words_for(self, use: ComponentRef) -> str:
        """A chosen component as messages name it: ``"optimizer 'muon' of acme-optim 1.2"``."""
        plugin = next((one for one in self.plugins if one.distribution == use.provider), use.provider)
        return f"{kind_words(use.kind)} '{use.name}' of {plugin}"

    def owner_of(self, module: str) -> Plugin | None:
        """The plugin from whose package a module is: one of its factories is there, too."""
        package = module.partition(".")[0]
        owners = (one for one in self.plugins if any(its.factory.split(".")[0] == package for _, its in one.components))
        return next(owners, None)

    def command(self, name: str) -> tuple[Command, Plugin] | None:
        """A plugin's command, or ``None`` if no plugin has one of that name.

        Raises:
            ConfigError: several plugins have.
        """
        found = self._commands.get(name, ())
        if len(found) > 1:
            providers = [plugin.distribution for _, plugin in found]
            raise ConfigError(
                f"the command '{name}' is provided by {len(found)} installed plugins. Switch all but one off:\n"
                + "\n".join(f"    forge --disable-plugin {provider} {name}" for provider in providers)
            )
        return found[0] if found else None

    def conflicts(self) -> list[NameConflict]:
        """Names that mean several things, sorted."""
        providers = {key: [one.plugin for one in found] for key, found in self._components.items()}
        providers |= {("command", name): [plugin for _, plugin in found] for name, found in self._commands.items()}
        return [
            NameConflict(kind, name, tuple(plugin.distribution for plugin in providers[kind, name]))
            for kind, name in sorted(providers)
            if len(providers[kind, name]) > 1
        ]

    def _require_kind(self, kind: str) -> None:
        if kind not in self.kinds:
            from forge_core.registry.suggestions import why_no_kind

            raise ConfigError(why_no_kind(self, kind))


def is_importable(module: str) -> bool:
    """Return whether the top-level package of ``module`` is there. Only that is looked at: asking for "a.b" would
    import a."""
    from importlib.util import find_spec  # four milliseconds that only few components need

    return find_spec(module.partition(".")[0]) is not None
