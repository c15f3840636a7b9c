"""Routers: which experts see which token, with what weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

    from forge_core.contracts.model import Initializer


class Routing(NamedTuple):
    """A flat list of assignments, so that token-choice, expert-choice and hash routers all fit.

    ``A`` is the number of assignments; a token may appear any number of times, also none.
    """

    token: torch.Tensor
    """``(A,)`` int64, indices into the router's input, each at most once together with the same expert."""
    expert: torch.Tensor
    """``(A,)`` int64, 0 to ``n_experts − 1``."""
    weight: torch.Tensor
    """``(A,)`` in the dtype of the hidden states, what the expert's output is multiplied by."""
    auxiliary: Mapping[str, torch.Tensor]
    """Named auxiliary losses: fp32 scalars, already multiplied by their coefficient and **summed** over the valid
    tokens (a mean must be multiplied by their number), as a loss' total is. The layer attaches each to the graph with
    ``forge_core.auxiliary.attach_auxiliary_loss``."""
    metrics: Mapping[str, torch.Tensor]
    """Detached tensors to look at, never host values."""


class Router(Protocol):
    """An ``nn.Module``. It never changes its own state in ``forward``, only in ``before_optimizer_step``.

    ``forward`` may add to non-persistent buffers (counts of tokens), which ``accumulators`` then names.
    """

    def forward(self, hidden: torch.Tensor, valid: torch.Tensor | None = None) -> Routing:
        """Choose experts for all tokens of a microbatch.

        Args:
            hidden: ``(T, D)``.
            valid: ``(T,)`` bool; tokens where it is false are neither routed nor counted. ``None``: all are valid.
        """
        ...

    def init_weights(self, rng: Initializer, prefix: str, std: float) -> None:
        """Fill every parameter and buffer; ``prefix`` is the qualified name of this module with a final dot."""
        ...


class StepContributor(Protocol):
    """What any module may implement that does something once an optimizer step (a router's balancing bias).

    The engine finds such modules in the local parts of the model, reduces all their accumulators in one collective
    over the ranks that hold other tokens, and calls them. They need no registration.
    """

    def accumulators(self) -> Mapping[str, torch.Tensor]:
        """Non-persistent buffers that ``forward`` adds to. The engine zeroes them after each step."""
        ...

    def before_optimizer_step(self, reduced: Mapping[str, torch.Tensor]) -> None:
        """Update parameters or persistent buffers from the accumulators, summed over all ranks and microbatches."""
        ...


class RouterFactory(Protocol):
    """The signature of the factory that a description names."""

    def __call__(self, config: Any, /, *, dim: int, n_experts: int) -> nn.Module:
        """Build a router for hidden states of width ``dim`` over ``n_experts`` experts."""
        ...
