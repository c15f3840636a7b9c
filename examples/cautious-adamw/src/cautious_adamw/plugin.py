"""What this package registers. Every forge command imports this file: keep it free of torch."""

from collections.abc import Iterator

from forge_core.api import Component, hookimpl

FORGE_API = "1.0"


@hookimpl
def forge_optimizers() -> Iterator[Component]:
    """One component: ``cautious_adamw``."""
    yield Component(
        name="cautious_adamw",
        summary="AdamW that leaves out what goes against the gradient",
        factory="cautious_adamw.optimizer:CautiousAdamW",
        config="cautious_adamw.config:CautiousAdamWConfig",
    )
