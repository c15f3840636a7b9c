"""Phase plans: which parameters are trained at each step of a run, and with which share of the learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Protocol

import attrs

if TYPE_CHECKING:
    import torch
    from torch import nn

    from forge_core.config.sections import Job
    from forge_core.contracts.callback import RunContext

DEFAULT = "phases"
"""The component that does what ``[[phases]]`` asks for."""


@attrs.frozen
class KnownParameters:
    """The parameters of the whole model, on any pipeline stage."""

    sizes: Mapping[str, int]
    """Elements, by name."""
    fixed: frozenset[str] = frozenset()
    """Names of parameters that no phase trains: they require no gradient."""
    aliases: Mapping[str, frozenset[str]] = attrs.field(factory=dict)
    """The names that each group of the model's has (``AliasedModel``)."""

    @classmethod
    def of(cls, model: nn.Module) -> KnownParameters:
        """Those of a model that has not been cut."""
        named = dict(model.named_parameters())
        known = cls(
            {name: parameter.numel() for name, parameter in named.items()},
            frozenset(name for name, parameter in named.items() if not parameter.requires_grad),
        )
        says: Any = getattr(model, "parameter_aliases", dict)
        aliases = {alias: frozenset().union(*(known.meant_by(one) for one in own)) for alias, own in says().items()}
        return attrs.evolve(known, aliases={alias: names for alias, names in aliases.items() if names})

    def meant_by(self, pattern: str) -> frozenset[str]:
        """The names that a pattern fits, or that a group has: ``blocks.*``, ``@connector``."""
        if pattern.startswith("@"):
            return self.aliases.get(pattern[1:], frozenset())
        return frozenset(name for name in self.sizes if fnmatchcase(name, pattern))

    def aliases_of(self, name: str) -> frozenset[str]:
        """The groups that a parameter is in."""
        return frozenset(alias for alias, names in self.aliases.items() if name in names)


class PhasePlan:
    """Base class. As it is, a run without phases: all that requires a gradient is trained, from the first step on.

    All ranks have one, and call the same methods at the same steps. Answers follow from the step alone: nothing of a
    plan is saved.

    Args:
        known: all of the model.
    """

    def __init__(self, known: KnownParameters) -> None:
        self.known = known
        self._has_begun = False

    @property
    def always_frozen(self) -> frozenset[str]:
        """Parameters of the whole model that no step of the run trains."""
        return self.known.fixed

    def enter(self, run: RunContext, step: int) -> None:
        """Begin ``step``. If it is the first of this start, or of a phase, tell the parts of the model what is not
        trained."""
        if not self._has_begun:
            self._has_begun = True
            tell_frozen(run.parts, self.known.fixed)

    def drop_frozen_gradients(self, step: int) -> None:
        """Leave parameters that are frozen in ``step`` without a gradient. An optimizer skips these, with their state
        and their decay; FSDP never learns of it, as it would not thaw what was frozen when it looked."""

    def split_groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Split the groups of an optimizer until ``scale_of`` has one answer for each, at every step."""

    def scale_of(self, group: Mapping[str, Any], step: int) -> float:
        """The factor on the learning rate of a group that has been split."""
        return 1.0


def tell_frozen(parts: Sequence[nn.Module], names: frozenset[str]) -> None:
    """Tell the parts of a model, each a ``FreezableModel`` or not, what is not trained from now on."""
    for part in parts:
        if hasattr(part, "set_frozen"):
            part.set_frozen(names)  # type: ignore[operator]  # the contract of a FreezableModel


class PhasePlanFactory(Protocol):
    """The signature of the factory that a description names."""

    def __call__(
        self, config: Any, /, *, job: Job, parameters: Mapping[str, nn.Parameter], known: KnownParameters
    ) -> PhasePlan:
        """Build the plan of a run whose job has phases, on each rank.

        Args:
            parameters: this rank's, by name.
            known: all of the model.

        Raises:
            ConfigError: what a phase says does not fit the model.
        """
