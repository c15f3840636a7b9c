"""Observers: they look at every run where their package is installed, and change nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from forge_core.contracts.callback import Callback, RunContext

if TYPE_CHECKING:
    import torch

    from forge_core.registry.catalog import Catalog


@attrs.frozen
class PassTrace:
    """A pass, and what it did on each rank along ``pp``."""

    name: str
    """Qualified."""
    phase: str
    touched: Sequence[Sequence[str]]
    """Qualified names of modules, by rank; the empty one is the model itself."""


@attrs.frozen
class BadStep:
    """A step whose loss or gradient is not finite, although its inputs are."""

    batches: Iterable[Mapping[str, torch.Tensor]]
    """This rank's microbatches, read once more, in the host's memory. As many on every rank."""
    evaluate: Callable[[Mapping[str, torch.Tensor]], object]
    """Runs the model and its loss on a batch on the device, without gradients. All ranks call it together."""
    parameters: Sequence[str]
    """Names of the parameters of the whole model, in its order."""


@attrs.frozen
class Origin:
    """The module whose output was the first that was not finite."""

    module: str
    """Qualified name; empty for the model itself, which then computes such a loss from finite logits."""
    type: str
    """Its class, and the plugin that has it."""
    ranks: Sequence[int]

    def __str__(self) -> str:
        return f"{self.module or 'the model and its loss'} ({self.type})"


class Observer(Callback):
    """Base class. A callback that no job names: a run has one of each that is installed.

    It hears of the events of callbacks, before the job's own callbacks do, and of some more. All ranks have the same
    observers, and call their methods at the same points. It asks for nothing and has no state.
    """

    def dry_run(self, say: Callable[[str], None], passes: Sequence[PassTrace]) -> None:
        """The model of a dry run has been built. Called instead of all other methods.

        Args:
            say: prints a line on rank 0.
            passes: in the order in which they were applied; one at least.
        """

    def gradients_start(self, run: RunContext) -> None:
        """Nothing has been computed in this step."""

    def gradients_end(self, run: RunContext, step: int) -> None:
        """Gradients are there on this rank, not yet clipped, and no update."""

    def update_end(self, run: RunContext, names: Collection[str]) -> None:
        """The optimizer's step has been called.

        Args:
            names: of the parameters that had a gradient on this rank.
        """

    def save_start(self, run: RunContext) -> None:
        """A checkpoint is about to be saved. What an observer raises is why it is not."""

    def find_origin(self, run: RunContext, bad: BadStep) -> Origin | None:
        """Look for the module that was at fault; called at the first such step after a start.

        Returns:
            The same on all ranks; nothing if all outputs are finite.
        """
        return None


class ObserverFactory(Protocol):
    """The signature of the factory that a description names. Its keys have defaults, as no job sets them."""

    def __call__(self, config: Any, /, *, catalog: Catalog) -> Observer:
        """Build it, on each rank.

        Args:
            catalog: what is installed.
        """
