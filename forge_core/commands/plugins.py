"""``forge plugins``: what is installed, what is broken and why; ``forge plugins show``: one component's keys."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import click

from forge_core import __version__
from forge_core.commands.json_output import json_option, print_json
from forge_core.commands.table import aligned, wrapped
from forge_core.contracts.command import Invocation
from forge_core.registry.catalog import Catalog, CatalogEntry, NameConflict, Plugin, is_importable
from forge_core.registry.component import Component, PassComponent
from forge_core.registry.entry_points import API_MINOR, ENTRY_POINT_GROUP


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


@attrs.frozen
class Key:
    """A key of a component's table in a configuration."""

    name: str
    type: str
    """In words."""
    default: str
    """The words of TOML, or ``required``, ``unset``, or ``follows from others``."""
    about: str
    """Its meaning, in Markdown."""


@attrs.frozen
class Shown:
    """One component, and its keys."""

    component: ListedPass | ListedComponent
    keys: Sequence[Key]


@click.group(invoke_without_command=True)
@click.option("--kind", metavar="KIND", help="List the components of this kind instead, with their summaries.")
@json_option(Installed | list[ListedPass | ListedComponent])
@click.pass_context
def plugins(ctx: click.Context, kind: str | None, as_json: bool) -> None:
    """List the installed plugins, what they provide, and what is wrong with each that did not load.

    The exit code is 1 if any plugin is broken or incompatible. --debug adds the tracebacks.
    """
    if ctx.invoked_subcommand is not None:
        return
    invocation: Invocation = ctx.obj
    catalog = invocation.catalog(notes_slow=False)  # the table says so
    if kind is not None:
        components = catalog.components(kind)
        if as_json:
            print_json([_listed(kind, one) for one in components])
        else:
            click.echo(_kind_table(components))
    elif as_json:
        print_json(_everything(catalog))
    else:
        click.echo(_plugin_table(catalog, debug=invocation.debug))
    ctx.exit(any(plugin.status in ("broken", "incompatible") for plugin in catalog.plugins))


@plugins.command()
@click.argument("kind")
@click.argument("name")
@json_option(Shown)
@click.pass_obj
def show(invocation: Invocation, kind: str, name: str, as_json: bool) -> None:
    """Show the component NAME of KIND: who provides it, and the keys of its table in a configuration."""
    from forge_core.config.converter import config_class  # the list of plugins does without

    catalog = invocation.catalog()
    provided = catalog.find(kind, name)
    component, plugin = provided.component, provided.plugin
    keys = _keys(config_class(provided, catalog.kinds[kind])[0])
    if as_json:
        print_json(Shown(_listed(kind, provided), keys))
        return
    click.echo(wrapped(f"{kind} {component.name}: {component.summary}"))
    click.echo(wrapped(f"provided by {plugin}, built by {component.factory}"))
    if component.aliases:
        click.echo(f"also called {', '.join(component.aliases)}")
    if component.deprecated:
        click.echo(provided.deprecation)
    for module in component.modules:
        click.echo(f"needs the module {module}{'' if is_importable(module) else ', which is not installed'}")
    if isinstance(component, PassComponent):
        click.echo("\n".join(map(wrapped, _place_among_passes(component))))
    click.echo()
    rows = [(key.name, key.type, key.default, key.about) for key in keys]
    click.echo("\n".join(aligned([("KEY", "TYPE", "DEFAULT", ""), *rows])) if keys else "it has no keys")


def _place_among_passes(component: PassComponent) -> Iterator[str]:
    """The declarations of a pass about itself and others."""
    from forge_core.passes.rules import condition_words, other_words  # the list of plugins does without

    serves = f", serves {', '.join(component.serves)}" if component.serves else ""
    yield f"in the phase {component.phase}{serves}"
    for wish, names in (("after", component.after), ("before", component.before)):
        if names:
            yield f"comes {wish} {', '.join(names)}"
    for need in component.needs:
        reason = f": {need.reason}" if need.reason else ""
        yield f"{condition_words(need.when)} needs the pass {need.other}{reason}".lstrip()
    for conflict in component.conflicts:
        words = f"cannot be combined with {other_words(conflict)}: {conflict.reason}"
        yield f"{condition_words(conflict.when)} {words}".lstrip()


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


def _keys(config: type) -> list[Key]:
    from forge_core.config.field_docs import field_docs, type_words

    docs = field_docs(config)
    return [
        Key(field.name, type_words(field.type), _default(field), " ".join(docs.get(field.name, "").split()))
        for field in attrs.fields(attrs.resolve_types(config, include_extras=True))
    ]


def _default(field: attrs.Attribute[Any]) -> str:
    """The default as one would write it in TOML."""
    from forge_core.config.converter import slot_of

    default = field.default
    if default is attrs.NOTHING:
        slot = slot_of(field.type)
        return "required" if slot is None or slot.default is None else json.dumps(slot.default)
    if default is not None and hasattr(default, "takes_self"):  # an attrs.Factory
        if default.takes_self:
            return "follows from others"
        default = default.factory()
    if default is None:
        return "unset"
    return "{}" if attrs.has(type(default)) else json.dumps(default, default=str)


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
            | {"components": [_listed(kind, CatalogEntry(one, plugin)) for kind, one in plugin.components]}
        )
        for plugin in catalog.plugins
    ]
    api = f"{ENTRY_POINT_GROUP.removeprefix('forge.v')}.{API_MINOR}"
    return Installed(core=__version__, api=api, plugins=plugins, conflicts=catalog.conflicts())


def _listed(kind: str, provided: CatalogEntry) -> ListedPass | ListedComponent:
    cls = ListedPass if isinstance(provided.component, PassComponent) else ListedComponent
    facts = attrs.asdict(provided.component, recurse=False)
    return cls(**facts | {"kind": kind, "provider": provided.plugin.distribution})
