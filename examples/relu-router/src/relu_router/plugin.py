"""What this package registers. Every forge command imports this file: keep it free of torch."""

from collections.abc import Iterator

from forge_core.api import Component, hookimpl

FORGE_API = "1.0"


@hookimpl
def forge_routers() -> Iterator[Component]:
    """One component: ``relu_router``."""
    yield Component(
        name="relu_router",
        summary="ReLU routing: experts a token as it needs, so many on average",
        factory="relu_router.router:ReluRouter",
        config="relu_router.config:ReluRouterConfig",
    )
