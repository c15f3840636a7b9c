"""Optimizers: how gradients become updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import attrs

if TYPE_CHECKING:
    import torch

    from forge_core.contracts.builder import Builder
    from forge_core.contracts.model import ParameterRole

UpdateSize = Literal["element", "gradient", "parameter", "orthogonal", "spectral"]
"""How large an optimizer's updates are with a learning rate of 1. Parametrizations scale rates by it.

==============  ===========================================================  ===============================
value           an update                                                    examples
==============  ===========================================================  ===============================
``element``     has elements of about 1                                      AdamW, Lion
``gradient``    is as large as the gradient                                  SGD
``parameter``   is as large as the parameter, by root mean squares           Adafactor, ``scale_parameter``
``orthogonal``  has equal singular values, and elements of about 1           Muon, ``match_adamw_rms``
``spectral``    has equal singular values, each ``√max(1, out / in)``        Muon, ``spectral``
==============  ===========================================================  ===============================
"""


@attrs.frozen
class NamedParameter:
    """A parameter as an optimizer sees it."""

    name: str
    """Qualified name in the whole model, the same on every layout."""
    parameter: torch.nn.Parameter
    """fp32 unless the run asks for less. A ``DTensor`` when it is sharded: its ``.placements`` say how."""
    role: ParameterRole
    elsewhere: frozenset[str] = frozenset()
    """The names of the parameters to train that other pipeline stages hold, the same for every parameter given: a
    pattern that matches only these is no mistake."""
    aliases: frozenset[str] = frozenset()
    """The groups of the model's parameters that it is in (``AliasedModel``), without the ``@``."""

    def is_meant(self, pattern: str) -> bool:
        """Return whether a pattern of names means it, or a group of the model's does: ``blocks.*``, ``@connector``."""
        return pattern[1:] in self.aliases if pattern.startswith("@") else fnmatchcase(self.name, pattern)


class OptimizerFactory(Protocol):
    """Gives back a ``torch.optim.Optimizer`` over exactly the given parameters.

    * Base learning rates stand in ``param_groups[i]["lr"]``; before each step the engine sets every group's ``lr`` to
      that base times the schedule's multiplier, so hyper-parameters must be read from the group at each step.
    * All state that affects later steps is in ``optimizer.state[parameter]``: tensors of the parameter's shape (sharded
      as it is), or of any shape if they are equal on all ranks, or laid out as it says itself (``StateLayout``); plain
      numbers are fine. The engine saves and restores it by parameter name, without calling ``step``.
    * An optimizer that is made of others has them as ``members``; its ``param_groups`` are theirs, the same dicts. The
      engine splits groups whose parameters have different rates in a phase (``[[phases]]``).
    * A parameter without a gradient is left alone: its value, its state, its decay. So phases freeze parameters.
    * State is created in the first ``step``, not in the constructor.
    * An optimizer whose state is not what it was has ``state_version`` and ``load_state`` (``VersionedOptimizer``).
    * One with the attribute ``leaves_out = True`` reads ``self.left_out`` in its step: ``None``, or an fp32 scalar on
      the parameters' device. Where that is 1, the step changes neither parameters nor state, though gradients may be
      NaN; where it is 0, it is as without. The host then need not wait to learn of an update that is left out.
    * One with the attribute ``scales_gradients = True`` reads ``self.gradient_scale`` in its step: ``None``, or an fp32
      scalar on the run's device. The step works with gradients times this: they are clipped where they are read, and
      not in a pass over memory of their own.
    * One whose best weights are not the ones it trains, but an average, has ``evaluation_weights``
      (``HasEvaluationWeights``); one with ``members`` passes on what these say.
    * One that works with parametrizations has ``update_size``, an ``UpdateSize``; with ``members``, each has its own.
      What it decays by and adds to roots is in its groups as ``weight_decay`` and ``eps``.
    * A step that needs whole matrices, and not this rank's parts of them, brings them together itself, as ``map_whole``
      does (``docs/write-an-optimizer.md``).
    """

    def __call__(
        self, config: Any, /, *, parameters: Sequence[NamedParameter], build: Builder
    ) -> torch.optim.Optimizer:
        """Build the optimizer.

        Args:
            build: builds optimizers that the config names. Only factories that ask for it are given it.

        Raises:
            ConfigError: a parameter-group pattern matches nothing, and the like.
        """


@runtime_checkable
class HasEvaluationWeights(Protocol):
    """The protocol of optimizers and callbacks that keep weights which are evaluated in place of the trained ones:
    averages over steps, such as an EMA."""

    def evaluation_weights(self) -> Mapping[str, torch.Tensor]:
        """Weights by the name of their parameter, of those on this rank.

        The engine puts them in place of the parameters for as long as it evaluates, and takes them back bit for bit.
        Checkpoints have them beside the trained ones, and are evaluated, sampled and exported with them, without this
        component. Parameters that are not named, and buffers, are evaluated as they are trained. No resume gives them
        back: what they are made from is state.

        It is asked on all ranks alike, from the end of ``run_start`` on, before and after any step, and changes
        nothing. The names are the same each time: before there is an average, it is the parameter.

        Returns:
            Floating-point tensors of the parameters' shapes, each sharded as its parameter is: a ``DTensor`` of the
            same placements, or a plain tensor. The engine reads them at once, and converts them to the parameters'
            dtypes.
        """


@runtime_checkable
class StateLayout(Protocol):
    """The protocol of optimizers with state that is neither sharded as its parameter is nor equal on all ranks: means
    of a matrix's rows, scales of its blocks."""

    def empty_state(
        self, parameter: torch.nn.Parameter, slot: str, shape: torch.Size, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """A tensor for saved state to be read into, laid out as ``step`` would have made it on this mesh.

        Called for each slot of each parameter of this rank that is read: in a resume, perhaps on another mesh than the
        one that wrote it, in a warm start, in the transfer from another replica; and before the first save, which
        refuses state that is laid out otherwise.

        Args:
            parameter: a ``DTensor`` if it is sharded here.
            slot: the key in ``state[parameter]``.
            shape: of the whole state, on all ranks together. It must not depend on the mesh.
            dtype: of the saved state.

        Returns:
            A tensor of this shape and dtype, a ``DTensor`` if it is sharded; or ``None``: laid out as the parameter if
            it has its shape, otherwise whole on every rank.
        """
