"""What this distribution registers."""

from collections.abc import Iterable

from forge_core.api import Command, hookimpl

FORGE_API = "1.0"


@hookimpl
def forge_commands() -> Iterable[Command]:
    """``forge plan``."""
    yield Command(
        name="plan",
        summary="what a job would take on N ranks: memory, time, FLOPs, passes; without a GPU",
        run="forge_plugins_plan.command:plan",
    )
