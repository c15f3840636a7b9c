"""``forge plugins``: what is installed, what is broken and why; ``forge plugins show``: one component's keys."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import click

from forge_core import __version__
from forge_core.commands.table import aligned, wrapped
from forge_core.contracts.command import Invocation
from forge_core.registry.catalog import Catalog, CatalogEntry, Plugin, is_importable
from forge_core.registry.component import PassComponent
from forge_core.registry.entry_points import API_MINOR, ENTRY_POINT_GROUP


@click.group(invoke_without_command=True)
@click.option("--kind", metavar="KIND", help="List the components of this kind instead, with their summaries.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
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
        click.echo(_json([_component(kind, one) for one in components]) if as_json else _kind_table(components))
    elif as_json:
        click.echo(_json(_everything(catalog)))
    else:
        click.echo(_plugin_table(catalog, debug=invocation.debug))
    ctx.exit(any(plugin.status in ("broken", "incompatible") for plugin in catalog.plugins))


@plugins.command()
@click.argument("kind")
@click.argument("name")
@click.pass_obj
def show(invocation: Invocation, kind: str, name: str) -> None:
    """Show the component NAME of KIND: who provides it, and the keys of its table in a configuration."""
    from forge_core.config.converter import config_class  # the list of plugins does without

    catalog = invocation.catalog()
    provided = catalog.find(kind, name)
    component, plugin = provided.component, provided.plugin
    config, _ = config_class(provided, catalog.kinds[kind])
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
    click.echo(_key_table(config))


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
        if plugin.heavy:
            libraries = ", ".join(plugin.heavy)
            text.append(
                f"warning: importing {plugin.distribution} also imports {libraries}: every forge command waits for it"
            )
        if plugin.is_slow:
            seconds = f"{plugin.import_seconds:.1f} s"
            text.append(f"warning: importing {plugin.distribution} takes {seconds}: every forge command waits for it")
    text += [f"conflict: {conflict}" for conflict in catalog.conflicts()]
    return "\n".join(text)


def _kind_table(components: Sequence[CatalogEntry]) -> str:
    if not components:
        return "none is installed"
    rows = [(one.component.name, str(one.plugin), one.component.summary) for one in components]
    return "\n".join(aligned([("NAME", "PLUGIN", "SUMMARY"), *rows]))


def _key_table(config: type) -> str:
    from forge_core.config.field_docs import field_docs, type_words

    attrs.resolve_types(config, include_extras=True)
    fields = attrs.fields(config)
    if not fields:
        return "it has no keys"
    docs = field_docs(config)
    rows = [
        (field.name, type_words(field.type), _default(field), " ".join(docs.get(field.name, "").split()))
        for field in fields
    ]
    return "\n".join(aligned([("KEY", "TYPE", "DEFAULT", ""), *rows]))


def _default(field: attrs.Attribute[Any]) -> str:
    """The default as one would write it in TOML."""
    default = field.default
    if default is attrs.NOTHING:
        return "required"
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


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def _everything(catalog: Catalog) -> dict[str, Any]:
    return {
        "core": __version__,
        "api": f"{ENTRY_POINT_GROUP.removeprefix('forge.v')}.{API_MINOR}",
        "plugins": [
            {
                **attrs.asdict(plugin, recurse=False),
                "components": [_component(kind, CatalogEntry(one, plugin)) for kind, one in plugin.components],
                "commands": [attrs.asdict(command) for command in plugin.commands],
                "checks": [attrs.asdict(check) for check in plugin.checks],
                "kinds": [
                    {key: value for key, value in attrs.asdict(kind).items() if key != "descriptor"}
                    for kind in plugin.kinds
                ],
            }
            for plugin in catalog.plugins
        ],
        "conflicts": [attrs.asdict(conflict) for conflict in catalog.conflicts()],
    }


def _component(kind: str, provided: CatalogEntry) -> dict[str, Any]:
    return {"provider": provided.plugin.distribution, **attrs.asdict(provided.component), "kind": kind}
