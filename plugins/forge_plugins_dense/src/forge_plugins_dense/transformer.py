"""The dense decoder: embedding, pre-norm blocks, norm, head.

Shapes: B = batch, S = sequence, D = width of the residual stream, V = vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask

from forge_core.contracts.builder import Builder
from forge_core.contracts.loss import Loss, LossSum
from forge_core.contracts.model import Initializer, ParameterRole, Recompute, ShardRole
from forge_core.errors import ConfigError
from forge_plugins_dense.attention import Attention, Surroundings
from forge_plugins_dense.cache import KeyValueCache, LayerCache
from forge_plugins_dense.config import CUDA_KERNELS, TransformerConfig
from forge_plugins_dense.initial_values import normal
from forge_plugins_dense.mask import cache_mask, document_block_mask, document_mask
from forge_plugins_dense.norm import init_norm, make_norm, norm_roles
from forge_plugins_dense.rope import rotary_tables


class Transformer(nn.Module):
    """The model ``transformer``; what each method promises is in ``forge_core.contracts.model``."""

    def __init__(self, config: TransformerConfig, *, vocab_size: int, build: Builder) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.max_seq_len = config.max_seq_len
        self.embed: nn.Embedding | None = nn.Embedding(vocab_size, config.dim)
        self.blocks = nn.ModuleDict({str(layer): Block(config, layer, build) for layer in range(config.n_layers)})
        self.norm: nn.Module | None = make_norm(config.norm, config.dim, config.norm_eps)
        self.head: nn.Linear | None = nn.Linear(config.dim, vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight

    def forward(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor | None = None,
        loss: Loss | None = None,
        *,
        positions: torch.Tensor | None = None,
        document: torch.Tensor | None = None,
        mask: torch.Tensor | BlockMask | None = None,
        cache: KeyValueCache | None = None,
    ) -> torch.Tensor | LossSum:
        """As ``Model.forward``. Without a cache, padding belongs at the right, where nothing attends to it.

        Raises:
            ConfigError: the sequence is longer than ``max_seq_len``, or the chosen attention kernel cannot do this.
            ValueError: a cache without room, or together with documents or a mask.
        """
        surroundings = self._surroundings(tokens, positions, document, mask, cache)
        hidden = tokens if self.embed is None else self.embed(tokens)
        for layer, block in self.blocks.items():
            hidden = block(hidden, surroundings, None if cache is None else cache.layers[layer])
        if self.norm is not None:
            hidden = self.norm(hidden)
        if self.head is None:
            return hidden
        if loss is None:
            return self.head(hidden)
        if targets is None:
            raise ValueError("a loss needs targets")
        return loss(hidden, self.head, targets)

    def init_weights(self, rng: Initializer) -> None:
        std = self.config.init_std
        if self.embed is not None:
            rng.fill("embed.weight", self.embed.weight, normal(std))
        for layer, block in self.blocks.items():
            block.init_weights(rng, f"blocks.{layer}.", std / math.sqrt(2 * self.config.n_layers), std)
        if self.norm is not None:
            init_norm(self.norm, rng, "norm.")
        if self._has_own_head():
            rng.fill("head.weight", self.head.weight, normal(std))

    def parallel_plan(self) -> dict[str, ShardRole]:
        plan: dict[str, ShardRole] = {}
        if self.embed is not None:
            plan["embed"] = "embedding"
        for layer, block in self.blocks.items():
            plan |= {f"blocks.{layer}.{name}": role for name, role in block.parallel_plan().items()}
        if self.norm is not None:
            plan["norm"] = "sequence"
        if self.head is not None:
            plan["head"] = "vocab"
        return plan

    def context_plan(self) -> list[str]:
        return [f"blocks.{layer}.attention.core" for layer in self.blocks]

    def recompute_plan(self) -> dict[str, Recompute]:
        return dict.fromkeys(_DEAR, "keep")

    def parameter_roles(self) -> dict[str, ParameterRole]:
        roles: dict[str, ParameterRole] = {}
        if self.embed is not None:
            roles["embed.weight"] = "embedding"
        for layer, block in self.blocks.items():
            roles |= {f"blocks.{layer}.{name}": role for name, role in block.parameter_roles().items()}
        if self.norm is not None:
            roles |= norm_roles(self.norm, "norm.")
        if self._has_own_head():
            roles["head.weight"] = "head"
        return roles

    def flops_per_token(self, seq_len: int) -> float:
        """As ``Model.flops_per_token``, of the parts that are present; with ``head_dim`` given, ``D`` is
        ``n_heads · head_dim``, the width that attention works on."""
        weights = sum(block.active_parameters() for block in self.blocks.values())
        if self.head is not None:
            weights += self.head.weight.numel()
        attention = len(self.blocks) * self.config.n_heads * self.config.head_size * seq_len
        return float(6 * weights + 12 * attention)

    def make_cache(self, batch_size: int, max_len: int) -> KeyValueCache:
        """As ``GenerativeModel.make_cache``.

        Raises:
            ConfigError: ``max_len`` is more than ``max_seq_len``.
        """
        self._check_length(max_len)
        return KeyValueCache(self.blocks.keys(), batch_size, max_len)

    def _surroundings(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None,
        document: torch.Tensor | None,
        mask: torch.Tensor | BlockMask | None,
        cache: KeyValueCache | None,
    ) -> Surroundings:
        start = 0
        if cache is None:
            self._check_length(tokens.shape[1])
            mask, causal = self._mask(tokens, document) if mask is None else (self._checked(mask), False)
        else:
            if mask is not None:
                raise ValueError("what sees what in a cache cannot be given from outside")
            start = cache.length
            cache.reserve(tokens, positions)
            mask, causal = self._mask_with_cache(tokens, start, document, cache)

        valid = None if positions is None else positions >= 0
        if positions is None:
            positions = torch.arange(start, start + tokens.shape[1], device=tokens.device).unsqueeze(0)
        cos, sin = rotary_tables(positions, self.config.head_size, self.config.rope_theta, self.config.rope_scaling)
        return Surroundings(cos, sin, mask, causal, valid)

    def _mask(
        self, tokens: torch.Tensor, document: torch.Tensor | None
    ) -> tuple[torch.Tensor | BlockMask | None, bool]:
        """``Surroundings.mask`` and ``Surroundings.causal``."""
        kernel = self.config.attention
        if kernel in CUDA_KERNELS and not tokens.is_cuda:
            raise ConfigError(f'model.attention = "{kernel}" needs CUDA, and this model is on {tokens.device}')
        if kernel == "flex" or (kernel == "auto" and document is not None and tokens.is_cuda):
            if document is None:
                document = torch.zeros(tokens.shape[:2], dtype=torch.int64, device=tokens.device)
            return document_block_mask(document), False
        if document is None:
            return None, True
        if kernel == "flash" and tokens.is_cuda:
            raise ConfigError('model.attention = "flash" cannot keep packed documents apart; use "auto" or "flex"')
        return document_mask(document), False

    def _checked(self, mask: torch.Tensor | BlockMask) -> torch.Tensor | BlockMask:
        """A mask from outside, which only FlexAttention takes if it is in tiles."""
        kernel = self.config.attention
        if isinstance(mask, BlockMask) and kernel not in ("auto", "flex"):
            raise ConfigError(
                f'model.attention = "{kernel}" cannot take the mask of context parallelism on CUDA; use "auto" or '
                '"flex"'
            )
        return mask

    def _mask_with_cache(
        self, tokens: torch.Tensor, start: int, document: torch.Tensor | None, cache: KeyValueCache
    ) -> tuple[torch.Tensor | BlockMask | None, bool]:
        """The same for positions from ``start`` on that have been appended to a cache."""
        if document is not None:
            raise ValueError("documents cannot be told apart inside a cache; give each a row of its own")
        if cache.filled is None and start == 0:
            return None, True
        if cache.filled is None and tokens.shape[1] == 1:
            return None, False
        return cache_mask(start, cache.length, cache.filled, tokens.device), False

    def _has_own_head(self) -> bool:
        """Whether the head's weight goes by its own name, and not by the embedding's."""
        return self.head is not None and not (self.config.tie_embeddings and self.embed is not None)

    def _check_length(self, length: int) -> None:
        if length > self.max_seq_len:
            raise ConfigError(f"a sequence of {length} tokens is longer than model.max_seq_len = {self.max_seq_len}")


class Block(nn.Module):
    """Attention and a feed-forward layer, each reading from and adding to the residual stream."""

    def __init__(self, config: TransformerConfig, layer: int, build: Builder) -> None:
        super().__init__()
        self.attention_norm = make_norm(config.norm, config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = make_norm(config.norm, config.dim, config.norm_eps)
        self.feed_forward = build(config.feed_forward, dim=config.dim, layer=layer, n_layers=config.n_layers)

    def forward(
        self, hidden: torch.Tensor, surroundings: Surroundings, cache: LayerCache | None = None
    ) -> torch.Tensor:
        """``(B, S, D)`` to ``(B, S, D)``."""
        hidden = hidden + self.attention(self.attention_norm(hidden), surroundings, cache)
        return hidden + self.feed_forward(self.feed_forward_norm(hidden), surroundings.valid)

    def init_weights(self, rng: Initializer, prefix: str, residual_std: float, std: float) -> None:
        """As ``FeedForward.init_weights``."""
        init_norm(self.attention_norm, rng, f"{prefix}attention_norm.")
        self.attention.init_weights(rng, f"{prefix}attention.", residual_std, std)
        init_norm(self.feed_forward_norm, rng, f"{prefix}feed_forward_norm.")
        self.feed_forward.init_weights(rng, f"{prefix}feed_forward.", residual_std, std)

    def parallel_plan(self) -> dict[str, ShardRole]:
        """As ``FeedForward.parallel_plan``."""
        plan: dict[str, ShardRole] = {"attention_norm": "sequence", "feed_forward_norm": "sequence"}
        plan |= {f"attention.{name}": role for name, role in self.attention.parallel_plan().items()}
        for name, role in self.feed_forward.parallel_plan().items():
            plan[f"feed_forward.{name}" if name else "feed_forward"] = role
        return plan

    def parameter_roles(self) -> dict[str, ParameterRole]:
        """As ``FeedForward.parameter_roles``."""
        roles = norm_roles(self.attention_norm, "attention_norm.") | norm_roles(
            self.feed_forward_norm, "feed_forward_norm."
        )
        for part in ("attention", "feed_forward"):
            roles |= {f"{part}.{name}": role for name, role in getattr(self, part).parameter_roles().items()}
        return roles

    def active_parameters(self) -> int:
        """Weights of matrices that are multiplied for one token."""
        return self.attention.active_parameters() + self.feed_forward.active_parameters()


_DEAR = (
    "aten.mm",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "higher_order.flex_attention",
)
"""Matrix products and attention take nearly all of the time; what lies between is cheap to compute again."""
