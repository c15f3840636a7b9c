"""What this distribution registers."""

from collections.abc import Iterable

from forge_core.api import Component, hookimpl

FORGE_API = "1.4"


@hookimpl
def forge_warm_starts() -> Iterable[Component]:
    """For ``[checkpoint.load]``."""
    yield Component(
        name="tensors",
        summary="tensors of other runs, chosen by patterns of their names",
        factory="forge_plugins_weights.warm_start:LoadedTensors",
    )
