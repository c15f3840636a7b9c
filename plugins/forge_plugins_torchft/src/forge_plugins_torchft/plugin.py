"""What this distribution registers."""

from collections.abc import Iterable

from forge_core.api import Command, Component, hookimpl

FORGE_API = "1.0"


@hookimpl
def forge_callbacks() -> Iterable[Component]:
    """What joins a run to its replicas."""
    yield Component(
        name="torchft",
        summary="several replicas of a run train one model; one that is lost costs a second, and no step",
        factory="forge_plugins_torchft.replication:TorchftReplication",
        config="forge_plugins_torchft.config:TorchftConfig",
        modules=("torchft",),
    )


@hookimpl
def forge_commands() -> Iterable[Command]:
    """``forge replicas``."""
    yield Command(
        name="replicas",
        summary="start the replicas of a run on this machine, and start those again that die",
        run="forge_plugins_torchft.replicas:replicas",
    )
