"""``forge show``: one component, and the keys of its table in a configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import click

from forge_core.api import PassComponent
from forge_core.commands.json_output import json_option, print_json
from forge_core.commands.plugins import ListedComponent, ListedPass, listed
from forge_core.commands.table import aligned, wrapped
from forge_core.config.converter import config_class, slot_of
from forge_core.config.field_docs import field_docs, type_words
from forge_core.contracts.command import Invocation
from forge_core.errors import PluginError
from forge_core.passes.rules import condition_words, other_words
from forge_core.registry.catalog import is_importable


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


@click.command()
@click.argument("kind")
@click.argument("name")
@json_option(Shown)
@click.pass_obj
def show(invocation: Invocation, kind: str, name: str, as_json: bool) -> None:
    """Show the component NAME of KIND: who provides it, and the keys of its table in a configuration."""
    catalog = invocation.catalog()
    provided = catalog.find(kind, name)
    component, plugin = provided.component, provided.plugin
    config = config_class(provided, catalog.kinds[kind])[0]
    try:
        keys = _keys(config)
    except Exception as error:
        source = component.config or component.factory
        why = f"the keys of '{source}' cannot be read ({type(error).__name__}: {error})"
        raise PluginError(f"{plugin}: {why}. This is a bug in {plugin.distribution}.") from error
    if as_json:
        print_json(Shown(listed(kind, provided), keys))
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


def _keys(config: type) -> list[Key]:
    docs = field_docs(config)
    return [
        Key(field.name, type_words(field.type), _default(field), " ".join(docs.get(field.name, "").split()))
        for field in attrs.fields(attrs.resolve_types(config, include_extras=True))
    ]


def _default(field: attrs.Attribute[Any]) -> str:
    """The default as one would write it in TOML."""
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
