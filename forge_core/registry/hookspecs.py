"""Everything that can be extended, one hook a kind.

A plugin's ``plugin.py`` implements some of these with ``@hookimpl`` and yields descriptions. Each hook is called once
a process, each implementation inside its own ``try``: a hook that raises withdraws all of its own plugin's components
and nobody else's. Hooks take no arguments, and nothing may depend on the order in which plugins are found.
"""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from forge_core.registry.component import Check, Command, Component, Kind, PassComponent

hookspec = pluggy.HookspecMarker("forge")


class ForgeSpecs:
    """The hook specifications of the entry-point group ``forge.v1``."""

    @hookspec
    def forge_models(self) -> Iterable[Component]:
        """Contribute models, chosen by ``[model] name``. Contract: ``forge_core.contracts.model``."""
        raise AssertionError("specification only")

    @hookspec
    def forge_feed_forwards(self) -> Iterable[Component]:
        """Contribute feed-forward layers, chosen by ``[model.feed_forward] name``: how a block becomes sparse.

        Contract: ``forge_core.contracts.feed_forward``.
        """
        raise AssertionError("specification only")

    @hookspec
    def forge_routers(self) -> Iterable[Component]:
        """Contribute token-to-expert routers, chosen by the ``router`` table of a sparse feed-forward layer.

        Contract: ``forge_core.contracts.router``.
        """
        raise AssertionError("specification only")

    @hookspec
    def forge_optimizers(self) -> Iterable[Component]:
        """Contribute optimizers, chosen by ``[optimizer] name``. Contract: ``forge_core.contracts.optimizer``."""
        raise AssertionError("specification only")

    @hookspec
    def forge_schedulers(self) -> Iterable[Component]:
        """Contribute learning-rate schedules, chosen by ``[scheduler] name``.

        Contract: ``forge_core.contracts.scheduler``.
        """
        raise AssertionError("specification only")

    @hookspec
    def forge_losses(self) -> Iterable[Component]:
        """Contribute losses, chosen by ``[loss] name``. Contract: ``forge_core.contracts.loss``."""
        raise AssertionError("specification only")

    @hookspec
    def forge_data_sources(self) -> Iterable[Component]:
        """Contribute data sources, chosen by ``[data] name``. Contract: ``forge_core.contracts.data_source``."""
        raise AssertionError("specification only")

    @hookspec
    def forge_tokenizers(self) -> Iterable[Component]:
        """Contribute tokenizers, chosen by ``[data] tokenizer``. Contract: ``forge_core.contracts.tokenizer``."""
        raise AssertionError("specification only")

    @hookspec
    def forge_parallel_passes(self) -> Iterable[PassComponent]:
        """Contribute passes over the built model (shard, quantise, checkpoint, compile).

        They are switched on by a table ``[parallel.passes.<name>]`` or by a degree in ``[parallel]`` that they serve.
        Contract: ``forge_core.contracts.parallel_pass``.
        """
        raise AssertionError("specification only")

    @hookspec
    def forge_trackers(self) -> Iterable[Component]:
        """Contribute trackers of metrics, chosen by ``[[trackers]] name``.

        Contract: ``forge_core.contracts.tracker``.
        """
        raise AssertionError("specification only")

    @hookspec
    def forge_checkpoint_mirrors(self) -> Iterable[Component]:
        """Contribute mirrors of checkpoints, chosen by ``[checkpoint.mirror] name``.

        Contract: ``forge_core.contracts.checkpoint_mirror``.
        """
        raise AssertionError("specification only")

    @hookspec
    def forge_callbacks(self) -> Iterable[Component]:
        """Contribute callbacks, chosen by ``[[callbacks]] name``. Contract: ``forge_core.contracts.callback``."""
        raise AssertionError("specification only")

    @hookspec
    def forge_cluster_environments(self) -> Iterable[Component]:
        """Contribute clusters, by their variables. The one that detects itself is taken; no key chooses it.

        Contract: ``forge_core.contracts.cluster_environment``.
        """
        raise AssertionError("specification only")

    @hookspec
    def forge_commands(self) -> Iterable[Command]:
        """Contribute sub-commands of ``forge``. Contract: ``forge_core.contracts.command``."""
        raise AssertionError("specification only")

    @hookspec
    def forge_checks(self) -> Iterable[Check]:
        """Contribute checks of ``forge doctor``. Contract: ``forge_core.contracts.check``."""
        raise AssertionError("specification only")

    @hookspec
    def forge_kinds(self) -> Iterable[Kind]:
        """Contribute kinds of components, each with a hook of its own that other plugins can then implement."""
        raise AssertionError("specification only")


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
"""The kinds of the core. Commands, checks and kinds themselves are registered by hooks of their own."""


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
