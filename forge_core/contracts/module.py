"""Optional protocols of any module of a model: the engine finds modules that follow them, without registration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch


@runtime_checkable
class StepModule(Protocol):
    """The protocol of modules that do something once an optimizer step (a router's balancing bias).

    The engine finds such modules in the local parts of the model, reduces all their accumulators in one collective
    over the ranks that hold other tokens, and calls them. They need no registration.
    """

    def accumulators(self) -> Mapping[str, torch.Tensor]:
        """Non-persistent buffers that ``forward`` adds to. The engine zeroes them after each step."""

    def before_optimizer_step(self, reduced: Mapping[str, torch.Tensor], progress: float) -> None:
        """Update buffers from the accumulators, summed over all ranks and microbatches.

        It may change buffers only: parameters are the optimizer's, and cut over ranks (each a ``DTensor``; its
        ``full_tensor()`` is the whole one). A persistent buffer stays as it is in a step that is left out, as its
        gradient is not finite, and in one that trains no parameter of the module that it is in, or, if that has none,
        of the nearest module around it that has some; what is reported changes as ever.

        Args:
            progress: the step over the run's last one, in (0, 1].
        """


@runtime_checkable
class ReportsMetrics(Protocol):
    """The protocol of modules that report metrics."""

    def step_metrics(self) -> Mapping[str, torch.Tensor]:
        """fp32 scalars on the device about the last step, after ``before_optimizer_step``; asked for on logged steps,
        on all ranks.

        They are reported as ``<key>/<qualified name of the module>``. One that is computed from parameters, each of
        which is a ``DTensor`` here if it is cut over ranks, is made whole. With a pipeline, a module has to report at
        the first logged step what it ever will.
        """


@runtime_checkable
class LooksAhead(Protocol):
    """The protocol of modules that may see later tokens, such as a layer whose experts choose their tokens."""

    @property
    def looks_ahead(self) -> bool:
        """A position's output depends on later positions, in the mode (training or evaluation) that is set."""
