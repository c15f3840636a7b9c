"""A base for models of one's own: what passes and optimizers ask of a model follows from its modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from forge_core.contracts.loss import Loss, LossSum
from forge_core.contracts.model import Initializer, ParameterRole, Recompute, ShardRole
from forge_plugins_dense.initial_values import normal, ones, zeros

KEPT = (
    "aten.mm",
    "aten.addmm",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
)
"""Operations whose results selective activation checkpointing keeps."""
_NORMS = (nn.RMSNorm, nn.LayerNorm)


class DeclaredModel(nn.Module):
    """The contract ``forge_core.contracts.model.Model``. A subclass makes ``embed``, ``blocks``, ``norm`` and ``head``
    and overrides what differs.

    ===================  ==========================================================================================
    ``parameter_roles``  ``embedding`` and ``head`` by the part; ``norm`` of ``nn.RMSNorm`` and ``nn.LayerNorm``;
                         ``bias`` of one dimension; ``matrix`` otherwise
    ``init_weights``     N(0, ``init_std``²); norms 1, biases 0; buffers are the subclass' own
    ``parallel_plan``    ``tp`` cuts embedding and head, and sequences elsewhere: a block may not mix positions
    ``recompute_plan``   products and attention are kept, the rest is computed again
    ``flops_per_token``  6 a weight of a matrix or of the head; what attention adds, ``12 · layers · D · S``, and a tied
                         head are the subclass' own
    ===================  ==========================================================================================

    Args:
        vocab_size: token ids.
    """

    init_std = 0.02
    max_seq_len = 1 << 20
    embed: nn.Module | None
    blocks: nn.ModuleDict
    norm: nn.Module | None
    head: nn.Module | None

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor | None = None, loss: Loss | None = None, **inputs: Any
    ) -> torch.Tensor | LossSum:
        hidden = tokens if self.embed is None else self.embed(tokens)
        for block in self.blocks.values():
            hidden = self.run_block(block, hidden, **inputs)
        if self.norm is not None:
            hidden = self.norm(hidden)
        if self.head is None:
            return hidden
        logits: torch.Tensor
        if loss is None:
            logits = self.head(hidden)
            return logits
        assert targets is not None, "a loss is given with targets"
        return loss(hidden, self.head, targets)

    def run_block(self, block: nn.Module, hidden: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """One block, with its residual connection.

        Args:
            hidden: ``(B, S, D)``.
            inputs: ``positions`` and ``document``, as ``Model.forward`` is given them; blocks that do not mix positions
                need neither.
        """
        output: torch.Tensor = hidden + block(hidden)
        return output

    def init_weights(self, rng: Initializer) -> None:
        roles = self.parameter_roles()
        for name, parameter in self.named_parameters():
            is_bias = roles[name] == "bias" or name.endswith(".bias")
            fill = zeros if is_bias else ones if roles[name] == "norm" else normal(self.init_std)
            rng.fill(name, parameter, fill)

    def parallel_plan(self) -> Mapping[str, ShardRole]:
        return {"embed": "embedding", "blocks.*": "residual", "norm": "sequence", "head": "vocab"}

    def recompute_plan(self) -> Mapping[str, Recompute]:
        return dict.fromkeys(KEPT, "keep")

    def parameter_roles(self) -> Mapping[str, ParameterRole]:
        return {name: self._role(name, parameter) for name, parameter in self.named_parameters()}

    def flops_per_token(self, seq_len: int) -> float:
        multiplied = (p for name, p in self.named_parameters() if self._role(name, p) in ("matrix", "head"))
        return 6.0 * sum(parameter.numel() for parameter in multiplied)

    def _role(self, name: str, parameter: nn.Parameter) -> ParameterRole:
        part, own = name.partition(".")[0], self.get_submodule(name.rpartition(".")[0])
        if isinstance(own, _NORMS):
            return "norm"
        if part in ("embed", "head"):
            return "embedding" if part == "embed" else "head"
        return "bias" if parameter.ndim == 1 else "matrix"
