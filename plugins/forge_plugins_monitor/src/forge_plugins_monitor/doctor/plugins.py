"""The plugins that do not load or do not go together, and names that several of them have."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from forge_core.contracts.check import CheckContext, Finding
from forge_core.registry.catalog import Plugin


def look(surroundings: CheckContext) -> Iterator[Finding]:
    """Same as ``forge plugins``, which says more."""
    catalog = surroundings.catalog
    fine = [plugin for plugin in catalog.plugins if plugin.status == "ok"]
    if fine:
        yield Finding("plugins", "fine", ", ".join(str(plugin) for plugin in fine))
    else:
        yield Finding("plugins", "wrong", "none is installed", "install some; `forge validate` says which a job needs")
    for plugin in catalog.plugins:
        if plugin.status in ("broken", "incompatible"):
            advice = "`forge plugins --debug` shows where; upgrade it, or switch it off with plugins.disable"
            yield Finding(plugin.distribution, "wrong", f"{plugin.version} is {plugin.status}: {plugin.reason}", advice)
            continue
        if plugin.heavy:
            advice = "tell its authors: a plugin module imports nothing large"
            found = f"importing it imports {', '.join(plugin.heavy)}, for which every command waits"
            yield Finding(plugin.distribution, "warning", found, advice)
        elif plugin.is_slow:
            found = f"importing it takes {plugin.import_seconds:.1f} s, for which every command waits"
            yield Finding(plugin.distribution, "warning", found, "tell its authors: a plugin module only describes")
        yield from _misfits(plugin, {"forge-core", *(other.distribution for other in catalog.plugins)})
    for conflict in catalog.conflicts():
        found, _, advice = str(conflict).partition("; ")
        yield Finding("names", "warning", found, advice)


def _misfits(plugin: Plugin, ours: Collection[str]) -> Iterator[Finding]:
    """Versions of the core and of other plugins that the plugin does not accept, and which of the two is the old one.

    Installers see to it, unless they are told not to (``--no-deps``), or one of the two is changed alone.
    """
    for need in map(Requirement, metadata.requires(plugin.distribution) or ()):
        if need.marker or canonicalize_name(need.name) not in ours:
            continue
        installed = metadata.version(need.name)
        if need.specifier.contains(installed, prereleases=True):
            continue
        bounds = [Version(one.version.removesuffix(".*")) for one in need.specifier if one.operator in _FROM_BELOW]
        old = need.name if any(Version(installed) < bound for bound in bounds) else plugin.distribution
        found = f"{plugin.version} needs {need.name}{need.specifier}, and {installed} is installed"
        yield Finding(plugin.distribution, "wrong", found, f"pip install --upgrade {old}")


_FROM_BELOW = (">", ">=", "~=", "==")
