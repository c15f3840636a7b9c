"""Feed-forward layers: the position-wise half of a block, dense or sparse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

    from forge_core.contracts.builder import Builder
    from forge_core.contracts.model import Initializer, ParameterRole, ShardRole


class FeedForward(Protocol):
    """An ``nn.Module`` that maps ``(B, S, D)`` to ``(B, S, D)``, each position on its own.

    It may have an attribute ``needs``, names of ``TOKEN_FACTS`` (``forge_core.contracts.router``), which ``forward`` is
    then given as keyword arguments, ``(B, S)`` each; a method ``generate``, called in place of ``forward`` when text is
    generated, where that is another thing; ``recompute_plan``, as ``Model.recompute_plan``, for operations
    that other layers do not have; and ``looks_ahead``, whether what a position gets depends on later ones in the mode
    that the module is in. The engine says so beside ``eval/loss``, of any module.
    """

    def forward(self, hidden: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        """The layer's share of the residual stream, ``(B, S, D)`` in the dtype of ``hidden``.

        Args:
            hidden: ``(B, S, D)``.
            valid: ``(B, S)`` bool, false at padding, which a sparse layer must neither route nor count; ``None``: all.
        """

    def init_weights(self, rng: Initializer, prefix: str, residual_std: float, std: float) -> None:
        """Fill every parameter and buffer; ``prefix`` is the qualified name of this module with a final dot.

        Args:
            residual_std: for projections that write into the residual stream.
            std: for all other matrices.
        """

    def parallel_plan(self) -> Mapping[str, ShardRole]:
        """Same as ``Model.parallel_plan``, names relative to this module; ``""`` for the module itself."""

    def parameter_roles(self) -> Mapping[str, ParameterRole]:
        """Same as ``Model.parameter_roles``, names relative to this module."""

    def active_parameters(self) -> int:
        """Weights multiplied for one token (all of them in a dense layer; the chosen experts' in a sparse one)."""


class FeedForwardFactory(Protocol):
    """The signature of the factory that a description names."""

    def __call__(self, config: Any, /, *, dim: int, layer: int, n_layers: int, build: Builder) -> nn.Module:
        """Build the layer of block ``layer`` (0 to ``n_layers − 1``) for hidden states of width ``dim``.

        Blocks that predict further tokens (``MultiTokenModel``) go on counting, from ``n_layers``.
        """
