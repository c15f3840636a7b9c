"""Sentences about a name that nothing installed has: the nearest one, what there is, what to install."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from forge_core.errors import did_you_mean, nearest, with_article
from forge_core.registry.component import kind_words
from forge_core.registry.entry_points import canonical_distribution
from forge_core.registry.known_plugins import cluster_of, published, serving_pass

if TYPE_CHECKING:
    from forge_core.registry.catalog import Catalog


def why_no_component(catalog: Catalog, kind: str, name: str) -> str:
    """Why ``catalog`` has no component of this kind under this name, ``"name"`` or ``"distribution:name"``."""
    distribution, colon, bare = name.rpartition(":")
    if colon:
        return _why_not_there(catalog, kind, bare, canonical_distribution(distribution))
    available = sorted({one.component.name for one in catalog.components(kind)})
    wanted = with_article(kind_words(kind))
    choice = f"Available: {', '.join(available)}." if available else f"None is installed.{_install_hint(kind)}"
    if elsewhere := [other for other in sorted(catalog.kinds) if other != kind and catalog.providers(other, name)]:
        names = " and ".join(with_article(kind_words(other)) for other in elsewhere)
        return f"'{name}' names {names}; this key needs {wanted}. {choice}"
    if where := _where_published(catalog, kind, name):
        return f"{kind_words(kind)} '{name}' {where}{notes(catalog)}"
    known = [own for one in catalog.components(kind) for own in (one.component.name, *one.component.aliases)]
    near = did_you_mean(name, known) or _near_published(catalog, kind, name)
    return f"no installed plugin provides {wanted} named '{name}'.{near} {choice}{notes(catalog)}"


def why_no_kind(catalog: Catalog, kind: str) -> str:
    """Why ``catalog`` has no such kind."""
    known = ", ".join(sorted(catalog.kinds))
    near = did_you_mean(kind, catalog.kinds)
    return f"no installed plugin adds the kind '{kind}'.{near} Known kinds: {known}.{notes(catalog)}"


def why_no_command(catalog: Catalog, name: str, core: Iterable[str]) -> str:
    """Why there is no such sub-command, neither among the ``core`` ones nor among those of plugins."""
    if where := _where_published(catalog, "command", name):
        return f"the command '{name}' {where}"
    return f"there is no command '{name}'.{did_you_mean(name, [*core, *catalog.commands])}{notes(catalog)}"


def where_to_find_pass(catalog: Catalog, capability: str) -> str:
    """Which published pass serves a mesh axis or ``"precision"``, and how to get it; may be empty."""
    distribution, name = serving_pass(capability)
    where = _where_published(catalog, "parallel_pass", name, distribution)
    return f"'{name}' {where}" if where else ""


def missing_cluster(catalog: Catalog, environment: Mapping[str, str]) -> str:
    """Why this process would train beside others that do the same, if its environment is that of a published cluster
    environment which is not there; else empty."""
    distribution, name, variable = cluster_of(environment) or ("", "", "")
    where = _where_published(catalog, "cluster_environment", name, distribution) if name else ""
    if not where:
        return ""
    return (
        f"{variable} = {environment[variable]} says that this is one of several tasks, each of which would train "
        f"alone: the cluster environment '{name}' {where}"
    )


def notes(catalog: Catalog) -> str:
    """A line for each plugin that was not loaded, since what is missing may be in one of them."""
    lines = []
    for plugin in catalog.plugins:
        if plugin.status == "disabled":
            lines.append(f"\nnote: {plugin} was not imported ({plugin.reason})")
        elif plugin.status != "ok":
            lines.append(f"\nnote: {plugin} did not load ({plugin.reason}); see 'forge plugins'")
    return "".join(lines)


def _why_not_there(catalog: Catalog, kind: str, name: str, distribution: str) -> str:
    plugin = next((plugin for plugin in catalog.plugins if plugin.distribution == distribution), None)
    what = f"{kind_words(kind)} '{name}'"
    if plugin is None:
        if where := _where_published(catalog, kind, name, distribution):
            return f"{what} {where}"
        near = did_you_mean(distribution, [plugin.distribution for plugin in catalog.plugins])
        return f"no plugin named '{distribution}' is installed, which should provide {what}.{near}"
    if plugin.status != "ok":
        state = "was not imported" if plugin.status == "disabled" else "did not load"
        return f"{what} was asked of {plugin}, which {state}: {plugin.reason}"
    its_own = sorted(component.name for its_kind, component in plugin.components if its_kind == kind)
    offered = f"It provides: {', '.join(its_own)}." if its_own else f"It provides no {kind_words(kind)} at all."
    return f"{plugin} provides no {kind_words(kind)} named '{name}'.{did_you_mean(name, its_own)} {offered}"


def _where_published(catalog: Catalog, kind: str, name: str, distribution: str | None = None) -> str:
    """``is in <distribution>, which …`` if one of our published packages has it, else nothing."""
    for provider in published(kind).get(name, ()):
        if distribution not in (None, provider):
            continue
        installed = next((plugin for plugin in catalog.plugins if plugin.distribution == provider), None)
        if installed is None:
            return f"is in {provider}, which is not installed: pip install {provider}"
        if installed.status == "disabled":
            return f"is in {provider}, which was not imported ({installed.reason})"
        if installed.status != "ok":
            return f"is in {provider}, which did not load ({installed.reason})"
        return f"is in a later {provider} than the installed {installed.version}: pip install --upgrade {provider}"
    return ""


def _near_published(catalog: Catalog, kind: str, name: str) -> str:
    near = nearest(name, sorted(published(kind)))
    return f" Did you mean '{near}'? It {_where_published(catalog, kind, near)}." if near else ""


def _install_hint(kind: str) -> str:
    sources = sorted({provider for providers in published(kind).values() for provider in providers})
    return f" Published ones come with: pip install {' '.join(sources)}." if sources else ""
