"""What this distribution registers."""

from collections.abc import Iterable

from forge_core.api import Component, hookimpl

FORGE_API = "1.0"


@hookimpl
def forge_callbacks() -> Iterable[Component]:
    """What happens beside training."""
    yield Component(
        name="health",
        summary="looks at GPUs, memory and the network between ranks every so many steps",
        factory="forge_plugins_monitor.health:Health",
        config="forge_plugins_monitor.config:HealthConfig",
    )
