"""Everything that can be extended, one hook a kind.

A plugin's ``plugin.py`` implements some of these with ``@hookimpl`` and yields descriptions. Each hook is called once
a process, each implementation inside its own ``try``: a hook that raises withdraws all of its own plugin's components
alone. Hooks take no arguments, and nothing may depend on the order in which plugins are found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pluggy

from forge_core.registry.component import Check, Command, Kind, PassComponent

_MODULE, _FUNCTION, _CONTRACT = "torch.nn:Module", "collections.abc:Callable", "its contract, which is a base class"


def _kind(name: str, contract: str, summary: str, returns: str = "", **more: Any) -> Kind:
    """A kind whose contract is in the file of its name, and whose hook has its plural."""
    contract = f"forge_core.contracts.{name}:{contract}"
    returns = contract if returns == _CONTRACT else returns
    hook = f"forge_{name}es" if name.endswith("s") else f"forge_{name}s"
    return Kind(name=name, hook=hook, summary=summary, contract=contract, returns=returns, **more)


CORE_KINDS = (
    _kind("model", "Model", "hidden states from tokens, in blocks", _MODULE),
    _kind("feed_forward", "FeedForward", "the position-wise half of a block", _MODULE),
    _kind("router", "Router", "which experts see which token", _MODULE),
    _kind("optimizer", "OptimizerFactory", "how gradients become updates", returns="torch.optim:Optimizer"),
    _kind("scheduler", "Schedule", "the multiplier of learning rates", _FUNCTION, optional=("tokens_per_step",)),
    _kind(
        "parametrization",
        "ParametrizationFactory",
        "initial values and rates, from the size of a model",
        "forge_core.contracts.parametrization:Parametrization",
    ),
    _kind("loss", "Loss", "what is minimised, from hidden states", _FUNCTION),
    _kind(
        "data_source",
        "DataSource",
        "the samples, by index or by position",
        optional=("seed", "samples_per_step", "phases"),
    ),
    _kind("tokenizer", "Tokenizer", "text to token ids and back"),
    _kind("parallel_pass", "ParallelPass", "a transformation of the built model", descriptor=PassComponent),
    _kind("tracker", "Tracker", "where metrics are sent", _CONTRACT),
    _kind("checkpoint_mirror", "CheckpointMirror", "a second place for checkpoints", _CONTRACT),
    _kind("weight_source", "WeightSource", "weights that are no checkpoint", _CONTRACT),
    _kind("warm_start", "WarmStart", "tensors of other runs to begin with", _CONTRACT),
    _kind("phase_plan", "PhasePlan", "what is trained at each step, and how fast", _CONTRACT),
    _kind("evaluation", "Evaluation", "what is measured of the model", _CONTRACT, optional=("tokenizer", "seq_len")),
    _kind("callback", "Callback", "what else happens during a run", _CONTRACT),
    _kind("cluster_environment", "ClusterEnvironment", "a cluster's variables: ranks, job, end", _CONTRACT),
    _kind("supervisor", "Supervisor", "who notices that a rank is lost, and names it", _CONTRACT),
    _kind("observer", "Observer", "what looks at every run", _CONTRACT),
)
"""The kinds of the core."""

BESIDE_COMPONENTS: Mapping[str, type[Command | Check | Kind]] = {
    "forge_commands": Command,
    "forge_checks": Check,
    "forge_kinds": Kind,
}
"""The hooks of what is no component, each with what it yields."""


def _command(name: str, summary: str, **more: Any) -> Command:
    """A command in the file of its name."""
    return Command(name=name, summary=summary, run=f"forge_core.commands.{name}:{name}", **more)


CORE_COMMANDS = (
    _command("run", "train what a TOML file describes", ranks=True),
    _command("validate", "check a configuration and report every problem at once"),
    _command("config", "print the resolved configuration, its JSON Schema, or the difference of two"),
    _command("plugins", "list what is installed, and what is broken and why"),
)
"""In the order in which they are listed. A plugin cannot replace one."""


@pluggy.HookspecMarker("forge")
def _yields_descriptions() -> Iterable[object]:
    raise AssertionError("specification only")


_HOOKS = (*(kind.hook for kind in CORE_KINDS), *BESIDE_COMPONENTS)
ForgeSpecs: type[Any] = type("ForgeSpecs", (), dict.fromkeys(_HOOKS, _yields_descriptions))
"""The hook specifications of the entry-point group ``forge.v1``, as pluggy reads them."""
