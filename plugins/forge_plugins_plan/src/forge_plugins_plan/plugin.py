"""What this distribution registers."""

from collections.abc import Iterable

from forge_core.api import Command, Component, hookimpl

FORGE_API = "1.5"


@hookimpl
def forge_commands() -> Iterable[Command]:
    """``forge plan``."""
    yield Command(
        name="plan",
        summary="what a job would take on N ranks: memory, time, FLOPs, passes; without a GPU",
        run="forge_plugins_plan.command:plan",
    )


@hookimpl
def forge_observers() -> Iterable[Component]:
    """What ``forge run --dry-run`` says of passes."""
    yield Component(
        name="pass_table",
        summary="what each pass has touched, in a dry run",
        factory="forge_plugins_plan.pass_table:PassTable",
    )
