"""Blocks that predict tokens beyond the next.

Shapes: B = batch, S = sequence, D = width of the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from forge_core.contracts.model import Initializer, ParameterRole, Recompute, ShardRole
from forge_plugins_dense.attention import BlockInputs
from forge_plugins_dense.block import Block
from forge_plugins_dense.initial_values import normal, zeros
from forge_plugins_dense.multi_token_config import SequentialConfig
from forge_plugins_dense.norm import init_norm, norm_roles


class Predictor(nn.Module):
    """The base of components of the kind ``predictor``: a block of the decoder that reads ``combine`` of the hidden
    states and of tokens that lie ahead, and a norm before the shared head.

    A subclass defines ``combine``, which looks at each position by itself. If it has parameters, it adds them to what
    ``init_weights``, ``parallel_plan``, ``parameter_roles`` and ``active_parameters`` give; their role in the plan is
    ``residual``.

    Of a step it reports ``multi_token_loss``, the mean over its targets in nats, and ``multi_token_acceptance``, the
    fraction of the positions looked at where its likeliest token is the target.
    """

    measured: torch.Tensor
    last_measured: torch.Tensor

    def __init__(self, *, block: Block, make_norm: Callable[[], nn.Module]) -> None:
        """
        Args:
            block: a block as the decoder's own are, with a feed-forward layer of its own.
            make_norm: makes a norm over D, such as the decoder's.
        """
        super().__init__()
        self.block = block
        self.norm = make_norm()
        for name in ("measured", "last_measured"):  # summed loss, its tokens, tokens accepted, tokens looked at
            self.register_buffer(name, torch.empty(4), persistent=False)

    def combine(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """What the block reads, ``(B, S, D)``; as ``forward``."""
        raise NotImplementedError

    def forward(
        self, hidden: torch.Tensor, embedded: torch.Tensor, surroundings: BlockInputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            hidden: ``(B, S, D)`` of the predictor before; of the decoder's last block for the first.
            embedded: ``(B, S, D)``, the embedding of the token k ahead of each position. Where that is in another
                document or padding, it is that of any token, and ``surroundings.valid`` is false.

        Returns:
            ``(B, S, D)`` each: what the next predictor reads, and what the head reads.
        """
        hidden = self.block(self.combine(hidden, embedded), surroundings)
        return hidden, self.norm(hidden)

    @property
    def needs(self) -> frozenset[str]:
        """Same as ``Block.needs``."""
        return self.block.needs

    def init_weights(self, rng: Initializer, prefix: str, residual_std: float, std: float) -> None:
        """Same as ``FeedForward.init_weights``."""
        self.block.init_weights(rng, f"{prefix}block.", residual_std, std)
        init_norm(self.norm, rng, f"{prefix}norm.")
        for name, buffer in self.named_buffers(recurse=False):
            rng.fill(prefix + name, buffer, zeros)

    def parallel_plan(self) -> dict[str, ShardRole]:
        """Same as ``FeedForward.parallel_plan``."""
        plan = {f"block.{name}": role for name, role in self.block.parallel_plan().items()}
        return plan | {"norm": "sequence"}

    def context_plan(self) -> list[str]:
        """Same as ``ContextParallelModel.context_plan``, names relative to this module."""
        return [f"block.{name}" for name in self.block.context_plan()]

    def recompute_plan(self) -> Mapping[str, Recompute]:
        """Same as ``Model.recompute_plan``, for operations that other layers do not have."""
        return self.block.recompute_plan()

    def parameter_roles(self) -> dict[str, ParameterRole]:
        """Same as ``FeedForward.parameter_roles``."""
        roles = {f"block.{name}": role for name, role in self.block.parameter_roles().items()}
        return roles | norm_roles(self.norm, "norm.")

    def active_parameters(self) -> int:
        """Same as ``FeedForward.active_parameters``, without the head."""
        return self.block.active_parameters()

    def mixing_flops(self, seq_len: int) -> float:
        """Same as ``SequenceMixer.mixing_flops``."""
        return self.block.mixing_flops(seq_len)

    def accumulators(self) -> Mapping[str, torch.Tensor]:
        return {"measured": self.measured}

    def before_optimizer_step(self, reduced: Mapping[str, torch.Tensor], progress: float) -> None:
        """It only keeps what it reports."""
        self.last_measured.copy_(reduced["measured"])

    def step_metrics(self) -> Mapping[str, torch.Tensor]:
        loss, tokens, accepted, looked_at = self.last_measured
        return {
            "multi_token_loss": loss / tokens.clamp(min=1),
            "multi_token_acceptance": accepted / looked_at.clamp(min=1),
        }


class SequentialPredictor(Predictor):
    """DeepSeek-V3's: ``h' = M [RMSNorm(Emb(t_{i+k})) ; RMSNorm(h_i)]`` (arXiv 2412.19437, equation 21).

    The order of the two halves is that of the released weights, not that of the paper; so are the names.
    """

    def __init__(
        self, config: SequentialConfig, /, *, dim: int, block: Block, make_norm: Callable[[], nn.Module], **_: object
    ) -> None:
        super().__init__(block=block, make_norm=make_norm)
        self.enorm = make_norm()
        self.hnorm = make_norm()
        self.eh_proj = nn.Linear(2 * dim, dim, bias=False)

    def combine(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        combined: torch.Tensor = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        return combined

    def init_weights(self, rng: Initializer, prefix: str, residual_std: float, std: float) -> None:
        super().init_weights(rng, prefix, residual_std, std)
        init_norm(self.enorm, rng, f"{prefix}enorm.")
        init_norm(self.hnorm, rng, f"{prefix}hnorm.")
        rng.fill(f"{prefix}eh_proj.weight", self.eh_proj.weight, normal(std))

    def parallel_plan(self) -> dict[str, ShardRole]:
        return super().parallel_plan() | {"enorm": "residual", "hnorm": "residual", "eh_proj": "residual"}

    def parameter_roles(self) -> dict[str, ParameterRole]:
        norms = norm_roles(self.enorm, "enorm.") | norm_roles(self.hnorm, "hnorm.")
        return super().parameter_roles() | norms | {"eh_proj.weight": "matrix"}

    def active_parameters(self) -> int:
        return super().active_parameters() + self.eh_proj.weight.numel()


class PredictorFactory(Protocol):
    """The signature of the factory that a description names."""

    def __call__(self, config: Any, /, *, dim: int, block: Block, make_norm: Callable[[], nn.Module]) -> Predictor:
        """Build the predictor of one depth; ``block`` and ``make_norm`` as ``Predictor`` takes them."""
        ...
