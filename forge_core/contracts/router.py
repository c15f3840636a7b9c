"""Routers: which experts see which token, with what weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from forge_core.contracts.module import ReportsMetrics, StepModule

if TYPE_CHECKING:
    import torch
    from torch import nn

    from forge_core.contracts.model import Initializer


TOKEN_FACTS = ("token_ids", "sequence", "noise")
"""Facts about each token besides its hidden state. ``token_ids``: int64 ids. ``sequence``: int64, equal for
tokens of one sequence, or, in packed samples, of one document, and below the number of tokens on all ranks that share
the sequences (``forge_core.ops.sequence_sum``). ``noise``: int64, in training a number of each token in this layer and
step, on any rank the same, from which random numbers are made; 0 in evaluation."""


class Routing(NamedTuple):
    """A flat list of assignments, so that token-choice, expert-choice and hash routers all fit.

    ``A`` is the number of assignments; a token may appear any number of times, also none.
    """

    token: torch.Tensor
    """``(A,)`` int64, indices into the router's input, each at most once together with the same expert."""
    expert: torch.Tensor
    """``(A,)`` int64, 0 to ``n_experts − 1``; or ``n_experts``, for an assignment to none. To leave such assignments
    out would make the number of assignments depend on data, for which the host has to wait."""
    weight: torch.Tensor
    """``(A,)`` fp32, what the expert's output is multiplied by; zero where the expert is none."""
    auxiliary: Mapping[str, torch.Tensor]
    """Named auxiliary losses: fp32 scalars, already multiplied by their coefficient and **summed** over the valid
    tokens (a mean must be multiplied by their number), as a loss' total is. The layer attaches each to the graph with
    ``forge_core.ops.auxiliary_loss.attach_auxiliary_loss``."""
    metrics: Mapping[str, torch.Tensor]
    """Detached tensors for whoever looks at what a router returns, as the hook of an analysis does; never host values.
    What a run is to log is ``step_metrics`` (``ReportsMetrics``)."""
    top_k: int | None = None
    """If given, every token has so many assignments, one after the other: ``A = T · top_k``, and ``token`` is
    0, …, 0, 1, …, 1, …. Layers are faster then."""


class Router(Protocol):
    """An ``nn.Module``. It never changes its own state in ``forward``, only in ``before_optimizer_step``.

    ``forward`` may add to non-persistent buffers (counts of tokens), which ``accumulators`` then names; with
    ``forge_core.ops.accumulate.accumulate`` each token is counted once, also where activations are computed twice.

    A router may have three more attributes. ``needs``: names of what ``forward`` is to be given besides, as keyword
    arguments (``TOKEN_FACTS``). ``causal = False``: a token's experts depend on later tokens, so that it cannot
    generate text; ``inference_router()`` may then return one that can. ``experts_per_token``: the mean number of
    experts a token visits, for counting FLOPs; without it, all of them. A router whose parameters or buffers are not
    named as they were has ``state_version`` and ``load_state`` (``VersionedModule``), as any module may.
    """

    def forward(self, hidden: torch.Tensor, valid: torch.Tensor | None = None) -> Routing:
        """Choose experts for all tokens of a microbatch.

        Args:
            hidden: ``(T, D)``.
            valid: ``(T,)`` bool; tokens where it is false are neither routed nor counted. ``None``: all are valid, and
                a router with ``top_k`` then assigns no token to none.
        """

    def init_weights(self, rng: Initializer, prefix: str, std: float) -> None:
        """Fill every parameter and buffer; ``prefix`` is the qualified name of this module with a final dot."""


class RouterConfig(Protocol):
    """The protocol of config classes of routers."""

    def contradictions(self, n_experts: int) -> Iterator[tuple[str, str]]:
        """Problems with so many experts: a key of the config, and a sentence about it. The layer asks at
        validation, so that it is told with file and line."""


class RouterFactory(Protocol):
    """The signature of the factory that a description names."""

    def __call__(self, config: Any, /, *, dim: int, n_experts: int) -> nn.Module:
        """Build a router for hidden states of width ``dim`` over ``n_experts`` experts."""


StepContributor, MeasuredModule = StepModule, ReportsMetrics
"""Older names of protocols that any module may follow."""
