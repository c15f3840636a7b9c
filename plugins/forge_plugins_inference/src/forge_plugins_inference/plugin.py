"""What this distribution registers."""

from collections.abc import Iterable

from forge_core.api import Command, hookimpl

FORGE_API = "1.0"


@hookimpl
def forge_commands() -> Iterable[Command]:
    """``forge generate``."""
    yield Command(name="generate", summary="sample text from a run", run="forge_plugins_inference.command:generate")
