"""``forge plugins``: what is installed, what is broken and why."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import click

from forge_core import __version__
from forge_core.commands.json_output import json_option, print_json
from forge_core.commands.table import aligned
from forge_core.contracts.command import Invocation
from forge_core.registry.catalog import Catalog, CatalogEntry, NameConflict, Plugin
from forge_core.registry.component import Component, PassComponent
from forge_core.registry.entry_points import API_VERSION


@attrs.frozen(kw_only=True)
class ListedComponent(Component):
    """A component, and who provides it."""

    provider: str
    """A distribution."""


@attrs.frozen(kw_only=True)
class ListedPass(PassComponent):
    """A component of the kind ``parallel_pass``, and who provides it."""

    provider: str
    """A distribution."""


@attrs.frozen(kw_only=True)
class ListedPlugin(Plugin):
    """An installed plugin, and what it provides."""

    components: Sequence[ListedPass | ListedComponent]  # type: ignore[assignment]  # here, each says its kind itself
    """Empty unless the status is ``"ok"``."""


@attrs.frozen(kw_only=True)
class Installed:
    """The plugins that are installed."""

    core: str
    """The version of ``forge-core``."""
    api: str
    """The version of the contract with plugins."""
    plugins: Sequence[ListedPlugin]
    conflicts: Sequence[NameConflict]
    """Names that several plugins provide."""


@click.command()
@click.option("--kind", metavar="KIND", help="List the components of this kind instead, with their summaries.")
@json_option(Installed | list[ListedPass | ListedComponent])
@click.pass_context
def plugins(ctx: click.Context, kind: str | None, as_json: bool) -> None:
    """List the installed plugins, what they provide, and what is wrong with each that did not load.

    The exit code is 1 if any plugin is broken or incompatible. --debug adds the tracebacks. forge plugins show KIND
    NAME, or forge show KIND NAME, prints the keys of one component.
    """
    invocation: Invocation = ctx.obj
    catalog = invocation.catalog(notes_slow=False)  # the table says so
    if kind is not None:
        components = catalog.components(kind)
        if as_json:
            print_json([listed(kind, one) for one in components])
        else:
            click.echo(_kind_table(components))
    elif as_json:
        print_json(_everything(catalog))
    else:
        click.echo(_plugin_table(catalog, debug=invocation.debug))
    ctx.exit(any(plugin.status in ("broken", "incompatible") for plugin in catalog.plugins))


def _plugin_table(catalog: Catalog, *, debug: bool) -> str:
    if not catalog.plugins:
        return "no plugins are installed"
    header = ("PLUGIN", "VERSION", "STATUS", "IMPORT", "PROVIDES")
    rows = [
        (
            plugin.distribution,
            plugin.version,
            f"{plugin.status}, slow" if plugin.is_slow else plugin.status,
            f"{plugin.import_seconds * 1e3:.1f}ms",
            ", ".join(_provides(plugin)) or "-",
        )
        for plugin in catalog.plugins
    ]
    first, *lines = aligned([header, *rows], right=3)
    indent = " " * first.index("VERSION")
    text = [first]
    for plugin, line in zip(catalog.plugins, lines, strict=True):
        text.append(line)
        if plugin.reason:
            text.append(f"{indent}└ {plugin.reason}")
        if debug and plugin.traceback:
            text += [f"{indent}  {trace}" for trace in plugin.traceback.splitlines()]
    for plugin in catalog.plugins:
        also = f"also imports {', '.join(plugin.heavy)}" if plugin.heavy else ""
        slow = f"takes {plugin.import_seconds:.1f} s" if plugin.is_slow else ""
        for cost in filter(None, (also, slow)):
            text.append(f"warning: importing {plugin.distribution} {cost}: every forge command waits for it")
    text += [f"conflict: {conflict}" for conflict in catalog.conflicts()]
    return "\n".join(text)


def _kind_table(components: Sequence[CatalogEntry]) -> str:
    if not components:
        return "none is installed"
    rows = [(one.component.name, str(one.plugin), one.component.summary) for one in components]
    return "\n".join(aligned([("NAME", "PLUGIN", "SUMMARY"), *rows]))


def _provides(plugin: Plugin) -> list[str]:
    return [
        *(f"{kind}:{component.name}" for kind, component in plugin.components),
        *(f"command:{command.name}" for command in plugin.commands),
        *(f"check:{check.name}" for check in plugin.checks),
        *(f"kind:{kind.name}" for kind in plugin.kinds),
    ]


def _everything(catalog: Catalog) -> Installed:
    plugins = [
        ListedPlugin(
            **attrs.asdict(plugin, recurse=False)
            | {"components": [listed(kind, CatalogEntry(one, plugin)) for kind, one in plugin.components]}
        )
        for plugin in catalog.plugins
    ]
    return Installed(core=__version__, api=API_VERSION, plugins=plugins, conflicts=catalog.conflicts())


def listed(kind: str, provided: CatalogEntry) -> ListedPass | ListedComponent:
    """A component as JSON has it."""
    cls = ListedPass if isinstance(provided.component, PassComponent) else ListedComponent
    facts = attrs.asdict(provided.component, recurse=False)
    return cls(**facts | {"kind": kind, "provider": provided.plugin.distribution})
