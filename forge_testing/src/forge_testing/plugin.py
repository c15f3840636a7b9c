"""What this distribution registers."""

from collections.abc import Iterable

from forge_core.api import Command, hookimpl

FORGE_API = "1.0"


@hookimpl
def forge_commands() -> Iterable[Command]:
    """``forge new``."""
    yield Command(name="new", summary="write an installable plugin package to start from", run="forge_testing.new:new")
