"""A small model with more than the four parts: blocks that read a memory, which an encoder makes on the first stage.

Shapes: B = batch, S = sequence, F = positions of the memory, C = features of an input, D = width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from forge_core.contracts.batch import Entry
from forge_core.contracts.loss import Loss, LossSum
from forge_testing.small_model import SmallBlock, SmallModel

FEATURES = 6
ENTRIES: Mapping[str, Entry] = {
    "features": Entry(dims=("sample", "tile", "channel"), dtype="float32", sizes=(None, 5, FEATURES))
}
"""What its batches have beside tokens, of any number of tiles."""


class SmallTower(SmallModel):
    """A decoder all of whose blocks read the memory that ``memory`` makes of the entry ``features`` ``(B, F, C)``."""

    def __init__(self, vocab_size: int = 32, dim: int = 16, n_layers: int = 3) -> None:
        super().__init__(vocab_size, dim, n_layers)
        self.memory: SmallEncoder | None = SmallEncoder(dim)
        self.blocks = nn.ModuleDict({str(layer): ReadingBlock(dim) for layer in range(n_layers)})

    def forward(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor | None = None,
        loss: Loss | None = None,
        document: torch.Tensor | None = None,
        features: torch.Tensor | None = None,
        memory: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        """Same as ``Model.forward``; ``memory`` ``(B, F, D)`` is what travels to later stages."""
        if self.memory is not None:
            memory = self.memory(features)
        assert memory is not None, "a stage without the encoder must be given what it has made"
        hidden = tokens if self.embed is None else self.embed(tokens)
        visible = _causal(hidden, document) if mask is None else mask
        for block in self.blocks.values():
            hidden = block(hidden, visible, memory)
        if self.norm is not None:
            hidden = self.norm(hidden)
        if self.head is None:
            return hidden, {"memory": memory}
        if loss is None:
            return self.head(hidden)
        assert targets is not None, "a loss needs targets"
        summed: LossSum = loss(hidden, self.head, targets)
        return summed

    def units(self) -> Sequence[str]:
        """Same as ``TowerModel.units``."""
        return [] if self.memory is None else [f"memory.layers.{layer}" for layer in self.memory.layers]

    def context_plan(self) -> Sequence[str]:
        """Same as ``ContextParallelModel.context_plan``."""
        return [f"blocks.{layer}.core" for layer in self.blocks]

    def stage_of(self) -> Mapping[str, Literal["first", "last"]]:
        """Same as ``TowerModel.stage_of``."""
        return {"memory": "first"}

    def travels(self, shapes: Mapping[str, Sequence[int]]) -> Mapping[str, tuple[tuple[int, ...], torch.dtype | None]]:
        """Same as ``TravellingModel.travels``."""
        rows, positions, _ = shapes["features"]
        return {"memory": ((rows, positions, self.dim), None)}


def _causal(hidden: torch.Tensor, document: torch.Tensor | None) -> torch.Tensor:
    place = torch.arange(hidden.shape[1], device=hidden.device)
    visible = (place[:, None] >= place)[None, None]
    return visible if document is None else visible & (document[:, None, :, None] == document[:, None, None, :])


class SmallEncoder(nn.Module):
    """``(B, F, C)`` to ``(B, F, D)``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.read = nn.Linear(FEATURES, dim, bias=False)
        self.layers = nn.ModuleDict({str(layer): SmallEncoderLayer(dim) for layer in range(2)})

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Encode."""
        hidden: torch.Tensor = self.read(features)
        for layer in self.layers.values():
            hidden = layer(hidden)
        return hidden


class SmallEncoderLayer(nn.Module):
    """Pre-norm, position by position."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(2 * dim, dim, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``(B, F, D)`` to the same."""
        after: torch.Tensor = hidden + self.down(F.gelu(self.up(self.norm(hidden))))
        return after


class ReadingBlock(SmallBlock):
    """A block that looks at the memory first."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.ask, self.recall = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.core = Core()

    def forward(self, hidden: torch.Tensor, visible: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # it is given more
        """``(B, S, D)`` and ``(B, F, D)`` to ``(B, S, D)``."""
        hidden = hidden + self.recall(F.scaled_dot_product_attention(self.ask(hidden), memory, memory))
        normed = self.attention_norm(hidden)
        query, key, value = (part(normed)[:, None] for part in (self.query, self.key, self.value))
        hidden = hidden + self.output(self.core(query, key, value, visible)[:, 0])
        after: torch.Tensor = hidden + self.down(F.gelu(self.up(self.up_norm(hidden))))
        return after


class Core(nn.Module):
    """Attention, of queries to keys that they see."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor
    ) -> torch.Tensor:
        """``(B, 1, S, D)`` of each, and what sees what, ``(B or 1, 1, S, S)`` bool."""
        return F.scaled_dot_product_attention(query, key, value, attn_mask=visible)
