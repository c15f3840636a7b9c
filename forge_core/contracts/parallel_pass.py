"""Passes: transformations of the built model, between construction on meta and initialisation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs

if TYPE_CHECKING:
    import torch
    from torch import nn

    from forge_core.config.sections import Job
    from forge_core.contracts.batch import Entry
    from forge_core.contracts.executor import Executor
    from forge_core.contracts.gpu import Gpu
    from forge_core.contracts.loss import Loss
    from forge_core.distributed.mesh import Mesh


@attrs.frozen
class PassContext:
    """Facts that a pass may use."""

    mesh: Mesh
    job: Job
    device: torch.device
    """Where the model will be materialised; during passes its parameters are on meta."""
    planned_gpu: Gpu | None = None
    """The GPU that a plan is about, which is simulated on ``device``; ``None`` in a run."""
    entries: Mapping[str, Entry | None] = attrs.field(factory=dict)
    """The entries of the run's batches, by name; ``None`` for one that its source does not describe. Empty: not
    known, as in a test of a pass alone."""


class ParallelPass(Protocol):
    """Where a pass stands among others is declared in its ``PassComponent``, not here.

    A module that a pass makes impossible to compile as a part of one graph (what it exchanges depends on data) gets an
    attribute ``breaks_graph = True``.

    Where a parameter is whole on each rank along a mesh axis and gets a part of its gradient on each, the engine sums
    the gradient, once per step and in fp32: its module has an attribute ``partial_gradients``, such as
    ``{"bias": "tp"}``. All ranks of the axis must have a gradient of it, or none.

    A pass is driven by what the model declares (``forge_core.contracts.model``): its blocks, plans and roles. It may
    not ask for the class of a block nor look for attribute names of its own.
    """

    def apply(self, model: nn.Module, context: PassContext) -> tuple[nn.Module, Sequence[str]]:
        """Transform the model.

        Returns:
            The transformed model (usually the same object) and the qualified names of the modules touched; the empty
            name stands for the model itself. A pass that finds nothing to do returns none, and the engine refuses
            that: a pass that was asked for may not silently do nothing.

        Raises:
            ConfigError: what the job asks for cannot be done to this model.
        """


@attrs.frozen
class Folded:
    """A weight of the model as it is without a pass."""

    reads: tuple[str, ...]
    """Names of weights of the model with the pass."""
    make: Callable[..., torch.Tensor]
    """Given those, whole and in this order, on any device."""
    scale: float | None = None
    """Where it is ``reads[0] + scale · reads[1] · reads[2]``, a low-rank adapter, which others have a format for."""


class AddingPass(ParallelPass, Protocol):
    """A pass that adds parameters. Its ``PassComponent`` says ``adds_parameters = True``."""

    def add(self, model: nn.Module) -> None:
        """Add them to the whole model, on meta, before any pass is applied. From then on the model's ``init_weights``,
        ``parameter_roles`` and ``flops_per_token`` count them. ``apply`` is called at the pass's own place, on each
        part.

        Raises:
            ConfigError: what the job asks for cannot be done to this model.
        """

    def folded(self, names: Collection[str]) -> Mapping[str, Folded]:
        """Tell how a checkpoint is used without the pass: by ``forge generate``, and by a conversion.

        Args:
            names: of the weights in the checkpoint.

        Returns:
            The weights that the pass changes, by name; others stay as they are.
        """


class OffloadingPass(ParallelPass, Protocol):
    """A pass that brings parameters to the device as they are needed, and gradients back."""

    parameters_on_host: bool
    """It does so. The engine then gives parameters their memory on the CPU (buffers on the device), and the
    optimizer, whose state follows them, runs there; gradients are to be on the CPU after backward."""


@attrs.frozen
class Traffic:
    """Bytes that a rank sends in a step, on average."""

    what: str
    """For what; names with ``*`` for numbers."""
    within_node: float | None
    """Bytes to other ranks of its node; ``None``: it cannot be told."""
    between_nodes: float | None
    """Bytes to ranks of other nodes."""
    reason: str
    """How it comes about."""


class TravellingPass(ParallelPass, Protocol):
    """A pass that can tell ``forge plan`` what ranks send each other for it."""

    def traffic(self, model: nn.Module, context: PassContext) -> Sequence[Traffic]:
        """Check one part of the model, to which all passes have been applied.

        Tensors of the model have no values. The process group is a simulated one, and ``LOCAL_WORLD_SIZE`` in the
        environment says how many ranks a node has.
        """


class SplitPass(Protocol):
    """A pass of the phase ``split``: it cuts the model into parts, and says how they are run."""

    def split(self, model: nn.Module, context: PassContext) -> tuple[Sequence[nn.Module], Sequence[str]]:
        """Cut the whole model, on meta.

        Returns:
            This rank's parts, in the order in which a batch passes them; every later pass is applied to each. Names in
            a part are those of the whole model. And the names of the modules that this rank holds.

            A part may have an attribute ``borrowed``: the names of parameters that are another part's, each with its
            name there, such as ``{"head.weight": "embed.weight"}``. The executor brings their values and returns their
            gradients; they are updated and saved where they belong.

        Raises:
            ConfigError: the model cannot be cut so.
        """

    def executor(self, parts: Sequence[nn.Module], loss: Loss, context: PassContext) -> Executor:
        """Build the executor of the parts, for after all passes and initialisation."""


class PassFactory(Protocol):
    """The signature of the factory that a description names."""

    def __call__(self, config: Any, /) -> ParallelPass | SplitPass:
        """Build the pass."""
