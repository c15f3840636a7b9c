"""What this package registers. Every forge command imports this file: keep it free of torch."""

from collections.abc import Iterable

from forge_core.api import Command, hookimpl

FORGE_API = "1.1"


@hookimpl
def forge_commands() -> Iterable[Command]:
    yield Command(
        name="sites", summary="list what can be looked at in a model", run="forge_plugins_interp.sites_command:sites"
    )
    yield Command(
        name="attention",
        summary="show what heads look at in a prompt",
        run="forge_plugins_interp.attention_command:attention",
    )
    yield Command(
        name="extract",
        summary="write what a model computes to a store",
        run="forge_plugins_interp.extract_command:extract",
    )
