"""Components of this package as values of its configs. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping

from forge_core.api import ComponentRef


def own_component(kind: str, chosen: ComponentRef | str, configs: Mapping[str, type]) -> ComponentRef:
    """A choice of component, which may be given as the name of one of this package, without keys.

    Args:
        configs: those of this package, with the classes of their configs. Their factories are in the kind's file.

    Raises:
        ValueError: it has none of this name.
    """
    if isinstance(chosen, ComponentRef):
        return chosen
    if chosen not in configs:
        raise ValueError(f"{chosen!r} is none of {', '.join(configs)}")
    return ComponentRef(
        kind=kind,
        name=chosen,
        provider="forge-plugins-dense",
        factory=f"forge_plugins_dense.{kind}:{chosen}",
        config=configs[chosen](),
    )
