"""What this distribution registers."""

from collections.abc import Iterable

from forge_core.api import Command, hookimpl

FORGE_API = "1.0"


@hookimpl
def forge_commands() -> Iterable[Command]:
    """``forge sweep``."""
    yield Command(
        name="sweep",
        summary="train a job for each value of a key, one after the other or side by side",
        run="forge_plugins_studies.command:sweep",
    )
