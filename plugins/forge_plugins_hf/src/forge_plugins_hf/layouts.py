"""The weight layouts that are installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forge_core.config.builder import ComponentBuilder
from forge_core.errors import ConfigError, nearest
from forge_core.registry.catalog import Catalog
from forge_plugins_hf.weight_layout import WeightLayout


def layout_of_architecture(name: str, catalog: Catalog) -> WeightLayout:
    """The layout of an architecture of ``config.json``.

    Raises:
        ConfigError: no installed package has it.
    """
    layouts = [*_installed(catalog)]
    known = sorted({one for layout in layouts for one in layout.architectures})
    for layout in layouts:
        if name in layout.architectures:
            return layout
    near = nearest(name, known)
    hint = f" Did you mean {near}?" if near else ""
    raise ConfigError(f"no installed plugin knows the architecture {name}.{hint} Known: {', '.join(known) or 'none'}.")


def layout_of_model(
    config: Any, vocab_size: int, catalog: Catalog, architecture: str | None = None
) -> tuple[WeightLayout, dict[str, Any]]:
    """A layout that has an architecture equal to a model, and the ``config.json`` in it.

    Args:
        architecture: the one to take; ``None``: the first that is equal, by ``WeightLayout.order``.

    Raises:
        ConfigError: there is none; the message says why of each.
    """
    if architecture is not None:
        chosen = layout_of_architecture(architecture, catalog)
        table = chosen.config_json(config, vocab_size)
        if table["architectures"] != [architecture]:
            raise ConfigError(f"this model has the form of {table['architectures'][0]}, not of {architecture}")
        return chosen, table
    reasons = []
    for layout in sorted(_installed(catalog), key=lambda one: one.order):
        try:
            return layout, layout.config_json(config, vocab_size)
        except ConfigError as error:
            reasons.append(f"{', '.join(layout.architectures)}: {error}")
    raise ConfigError("this model has no form in Hugging Face's format.\n  " + "\n  ".join(reasons or ["no layouts"]))


def _installed(catalog: Catalog) -> Iterator[WeightLayout]:
    build = ComponentBuilder(catalog)
    for entry in catalog.components("weight_layout"):
        yield build(build.resolve("weight_layout", entry.qualified_name))
