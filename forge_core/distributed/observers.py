"""The observers of a run."""

from __future__ import annotations

from forge_core.config.builder import ComponentBuilder
from forge_core.contracts.component_ref import ComponentRef
from forge_core.registry.catalog import Catalog


def installed_observers(catalog: Catalog) -> list[ComponentRef]:
    """Return all that are installed, in the same order on all ranks."""
    names = sorted(one.qualified_name for one in catalog.components("observer"))
    return [ComponentBuilder(catalog).resolve("observer", name) for name in names]
