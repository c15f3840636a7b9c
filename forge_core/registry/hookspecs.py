"""Everything that can be extended, one hook a kind.

A plugin's ``plugin.py`` implements some of these with ``@hookimpl`` and yields descriptions. Each hook is called once
a process, each implementation inside its own ``try``: a hook that raises withdraws all of its own plugin's components
and nobody else's. Hooks take no arguments, and nothing may depend on the order in which plugins are found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pluggy

from forge_core.registry.component import Check, Command, Kind, PassComponent

CORE_KINDS = (
    Kind(
        name="model",
        hook="forge_models",
        summary="hidden states from tokens, in blocks",
        contract="forge_core.contracts.model:Model",
        returns="torch.nn:Module",
    ),
    Kind(
        name="feed_forward",
        hook="forge_feed_forwards",
        summary="the position-wise half of a block",
        contract="forge_core.contracts.feed_forward:FeedForward",
        returns="torch.nn:Module",
    ),
    Kind(
        name="router",
        hook="forge_routers",
        summary="which experts see which token",
        contract="forge_core.contracts.router:Router",
        returns="torch.nn:Module",
    ),
    Kind(
        name="optimizer",
        hook="forge_optimizers",
        summary="how gradients become updates",
        contract="forge_core.contracts.optimizer:OptimizerFactory",
        returns="torch.optim:Optimizer",
    ),
    Kind(
        name="scheduler",
        hook="forge_schedulers",
        summary="the learning rate's multiplier at each step",
        contract="forge_core.contracts.scheduler:Schedule",
        returns="collections.abc:Callable",
    ),
    Kind(
        name="loss",
        hook="forge_losses",
        summary="what is minimised, from hidden states",
        contract="forge_core.contracts.loss:Loss",
        returns="collections.abc:Callable",
    ),
    Kind(
        name="data_source",
        hook="forge_data_sources",
        summary="the samples, by index",
        contract="forge_core.contracts.data_source:DataSource",
    ),
    Kind(
        name="tokenizer",
        hook="forge_tokenizers",
        summary="text to token ids and back",
        contract="forge_core.contracts.tokenizer:Tokenizer",
    ),
    Kind(
        name="parallel_pass",
        hook="forge_parallel_passes",
        summary="a transformation of the built model",
        contract="forge_core.contracts.parallel_pass:ParallelPass",
        descriptor=PassComponent,
    ),
    Kind(
        name="tracker",
        hook="forge_trackers",
        summary="where metrics are sent",
        contract="forge_core.contracts.tracker:Tracker",
        returns="forge_core.contracts.tracker:Tracker",
    ),
    Kind(
        name="checkpoint_mirror",
        hook="forge_checkpoint_mirrors",
        summary="a second place for checkpoints",
        contract="forge_core.contracts.checkpoint_mirror:CheckpointMirror",
        returns="forge_core.contracts.checkpoint_mirror:CheckpointMirror",
    ),
    Kind(
        name="callback",
        hook="forge_callbacks",
        summary="what else happens during a run",
        contract="forge_core.contracts.callback:Callback",
        returns="forge_core.contracts.callback:Callback",
    ),
    Kind(
        name="cluster_environment",
        hook="forge_cluster_environments",
        summary="a cluster's variables: ranks, job, end",
        contract="forge_core.contracts.cluster_environment:ClusterEnvironment",
        returns="forge_core.contracts.cluster_environment:ClusterEnvironment",
    ),
)
"""The kinds of the core."""

BESIDE_COMPONENTS: Mapping[str, type[Command | Check | Kind]] = {
    "forge_commands": Command,
    "forge_checks": Check,
    "forge_kinds": Kind,
}
"""The hooks of what is no component, each with what it yields."""


CORE_COMMANDS = (
    Command(name="run", summary="train what a TOML file describes", run="forge_core.commands.run:run"),
    Command(
        name="validate",
        summary="check a configuration and report every problem at once",
        run="forge_core.commands.validate:validate",
    ),
    Command(
        name="config",
        summary="print the resolved configuration, its JSON Schema, or the difference of two",
        run="forge_core.commands.config:config",
    ),
    Command(
        name="plugins",
        summary="list what is installed, and what is broken and why",
        run="forge_core.commands.plugins:plugins",
    ),
    Command(
        name="checkpoint",
        summary="list, show, verify and prune the checkpoints of a run",
        run="forge_core.commands.checkpoint:checkpoint",
    ),
)
"""In the order in which they are listed. A plugin cannot replace one."""


def specifications(yields: Mapping[str, type]) -> type[Any]:
    """A class of hook specifications as pluggy reads it: hooks without arguments, by what each yields."""
    return type("ForgeSpecs", (), {hook: _specification(hook, description) for hook, description in yields.items()})


def _specification(hook: str, description: type) -> object:
    def specification(self: object) -> Iterable[object]:
        raise AssertionError("specification only")

    specification.__name__ = hook
    specification.__annotations__ = {"return": f"Iterable[{description.__name__}]"}
    return pluggy.HookspecMarker("forge")(specification)


ForgeSpecs = specifications({**{kind.hook: kind.descriptor for kind in CORE_KINDS}, **BESIDE_COMPONENTS})
"""The hook specifications of the entry-point group ``forge.v1``."""
