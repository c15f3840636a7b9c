"""A small model that keeps the whole contract, for checks of what is done to models, and a job around it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from forge_core.config.sections import Job, ParallelSection, TrainSection
from forge_core.contracts.component_ref import ComponentRef
from forge_core.contracts.loss import IGNORED, Loss, LossSum
from forge_core.contracts.model import Initializer, ParameterRole, Recompute, ShardRole

SEQ_LEN = 8


class SmallModel(nn.Module):
    """A decoder without positions: causal attention with one head, and a GELU layer, in three blocks."""

    def __init__(self, vocab_size: int = 32, dim: int = 16, n_layers: int = 3) -> None:
        super().__init__()
        self.vocab_size, self.max_seq_len, self.dim, self.n_layers = vocab_size, 64, dim, n_layers
        self.embed: nn.Embedding | None = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleDict({str(layer): SmallBlock(dim) for layer in range(n_layers)})
        self.norm: nn.RMSNorm | None = nn.RMSNorm(dim)
        self.head: nn.Linear | None = nn.Linear(dim, vocab_size, bias=False)

    def forward(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor | None = None,
        loss: Loss | None = None,
        document: torch.Tensor | None = None,
        **inputs: Any,
    ) -> torch.Tensor | LossSum:
        hidden = tokens if self.embed is None else self.embed(tokens)
        place = torch.arange(hidden.shape[1], device=hidden.device)
        visible = (place[:, None] >= place)[None, None]
        if document is not None:
            visible = visible & (document[:, None, :, None] == document[:, None, None, :])
        for block in self.blocks.values():
            hidden = block(hidden, visible)
        if self.norm is not None:
            hidden = self.norm(hidden)
        if self.head is None:
            return hidden
        if loss is None:
            logits: torch.Tensor = self.head(hidden)
            return logits
        assert targets is not None, "a loss needs targets"
        return loss(hidden, self.head, targets)

    def init_weights(self, rng: Initializer) -> None:
        for name, parameter in self.named_parameters():
            if "norm" in name:
                rng.fill(name, parameter, lambda full, _: full.fill_(1))
            else:
                rng.fill(name, parameter, lambda full, generator: full.normal_(0, 0.1, generator=generator))

    def parallel_plan(self) -> Mapping[str, ShardRole]:
        return {
            "embed": "embedding",
            "blocks.*.query": "column",
            "blocks.*.key": "column",
            "blocks.*.value": "column",
            "blocks.*.output": "row",
            "blocks.*.up": "column",
            "blocks.*.down": "row",
            "head": "vocab",
        }

    def recompute_plan(self) -> Mapping[str, Recompute]:
        return {"aten.mm": "keep"}

    def parameter_roles(self) -> Mapping[str, ParameterRole]:
        special: dict[str, ParameterRole] = {"embed.weight": "embedding", "head.weight": "head"}
        names = [name for name, _ in self.named_parameters()]
        return {name: special.get(name, "norm" if "norm" in name else "matrix") for name in names}

    def flops_per_token(self, seq_len: int) -> float:
        multiplied = sum(p.numel() for name, p in self.named_parameters() if name != "embed.weight")
        return 6 * multiplied + 12 * self.n_layers * self.dim * seq_len


class SmallBlock(nn.Module):
    """Pre-norm attention, then a feed-forward layer."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention_norm, self.up_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.query, self.key, self.value, self.output = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(2 * dim, dim, bias=False)

    def forward(self, hidden: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        normed = self.attention_norm(hidden)
        query, key, value = (part(normed)[:, None] for part in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=visible)[:, 0]
        hidden = hidden + self.output(attended)
        after: torch.Tensor = hidden + self.down(F.gelu(self.up(self.up_norm(hidden))))
        return after


def cross_entropy(hidden: torch.Tensor, head: nn.Module, targets: torch.Tensor) -> LossSum:
    """The plainest ``Loss``."""
    logits = head(hidden).float().flatten(0, -2)
    total = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return LossSum(total, (targets != IGNORED).sum())


def small_job(steps: int = 4, passes: Mapping[str, ComponentRef] | None = None) -> Job:
    """A job of a few steps in fp32. Its components are names only; nothing can be built from it."""

    def use(kind: str) -> ComponentRef:
        return ComponentRef(kind=kind, name="small", provider="forge-core", factory="forge_testing:none", config=None)

    return Job(
        model=use("model"),
        data=use("data_source"),
        train=TrainSection(steps=steps, seq_len=SEQ_LEN, batch_size=2, precision="fp32"),
        optimizer=use("optimizer"),
        scheduler=use("scheduler"),
        loss=use("loss"),
        parallel=ParallelSection(passes=passes or {}),
    )
