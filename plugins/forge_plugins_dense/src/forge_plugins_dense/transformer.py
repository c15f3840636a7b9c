"""The dense decoder: embedding, pre-norm blocks, norm, head.

Shapes: B = batch, S = sequence, D = width of the residual stream, V = vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask

from forge_core.contracts.builder import Builder
from forge_core.contracts.loss import Loss, LossSum
from forge_core.contracts.model import Initializer, ParameterRole, Recompute, ShardRole
from forge_core.errors import ConfigError
from forge_core.ops.sequence_sum import number_sequences
from forge_plugins_dense.attention import Attention, BlockInputs
from forge_plugins_dense.cache import KeyValueCache, LayerCache
from forge_plugins_dense.config import CUDA_KERNELS, TransformerConfig
from forge_plugins_dense.initial_values import normal
from forge_plugins_dense.latent_attention import LatentAttention
from forge_plugins_dense.mask import cache_mask, document_block_mask, document_mask
from forge_plugins_dense.multi_token import LookingAhead, attach_predictions, count_further_targets
from forge_plugins_dense.multi_token_config import MultiTokenConfig
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
        self.n_predictors = config.n_predictors
        if config.multi_token is not None:
            self._add_predictors(config, config.multi_token, build)
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
        token_ids: torch.Tensor | None = None,
        mask: torch.Tensor | BlockMask | None = None,
        cache: KeyValueCache | None = None,
        further_tokens: torch.Tensor | None = None,
        further_targets: torch.Tensor | None = None,
    ) -> torch.Tensor | LossSum:
        """Same as ``Model.forward``. Without a cache, padding belongs at the right, where nothing attends to it.

        ``further_tokens`` and ``further_targets``, ``(B, S, K)``, come from ``LookingAhead``.

        Raises:
            ConfigError: the sequence is longer than ``max_seq_len``, or the chosen attention kernel cannot do this.
            ValueError: a cache without room, or together with documents or a mask.
        """
        surroundings = self._surroundings(tokens, positions, document, mask, cache)
        surroundings.facts = self._facts(tokens, document, token_ids)
        predicts = self.training and loss is not None and further_targets is not None
        hidden, embedded = self._enter(tokens, further_tokens, predicts=predicts)
        for layer in self._layers():
            hidden = self.blocks[layer](hidden, surroundings, None if cache is None else cache.layers[layer])
        normed = hidden if self.norm is None else _times(self.config.output_multiplier, self.norm(hidden))
        if self.head is None:
            return normed if embedded is None else torch.cat((normed, embedded.flatten(2)), dim=-1)
        if loss is None:
            return self.head(normed)
        if targets is None:
            raise ValueError("a loss needs targets")
        summed = loss(normed, self.head, targets)
        if embedded is None or not predicts:
            return summed
        each = self._surroundings_ahead(surroundings, further_tokens)
        predictors, config = self._predictors(), self.config.multi_token
        scaled = functools.partial(_times, self.config.output_multiplier)
        return attach_predictions(
            summed, hidden, embedded, predictors, each, loss, self.head, further_targets, config, scaled
        )

    def init_weights(self, rng: Initializer) -> None:
        std = self.config.init_std
        residual_std = std / math.sqrt(2 * (self.config.init_layers or self.config.n_layers))
        if self.embed is not None:
            rng.fill("embed.weight", self.embed.weight, normal(std))
        for layer, block in self.blocks.items():
            block.init_weights(rng, f"blocks.{layer}.", residual_std, std)
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
        if self.n_predictors and self.embed is None and self.head is not None:
            plan["arrival"] = "whole"
        if self.n_predictors and self.embed is not None and self.head is None:
            plan["departure"] = "sequence"
        return plan

    @property
    def needs(self) -> frozenset[str]:
        """What its feed-forward layers need to know of tokens."""
        return frozenset().union(*(block.needs for block in self.blocks.values()))

    def context_plan(self) -> list[str]:
        return [f"blocks.{layer}.{name}" for layer, block in self.blocks.items() for name in block.context_plan()]

    def recompute_plan(self) -> dict[str, Recompute]:
        plan: dict[str, Recompute] = dict.fromkeys(_DEAR, "keep")
        for block in self.blocks.values():
            plan |= block.recompute_plan()
        return plan

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
        """Same as ``Model.flops_per_token``, of the parts that are present; ``D`` is ``n_heads`` times the features
        of a head, in latent attention the mean of those of keys and of values."""
        weights = sum(block.active_parameters() for block in self.blocks.values())
        if self.head is not None:
            weights += self.head.weight.numel() * (1 + self.n_predictors)
        attention = len(self.blocks) * self.config.n_heads * self.config.mean_head_size * seq_len
        return float(6 * weights + 12 * attention)

    def make_cache(self, batch_size: int, max_len: int) -> KeyValueCache:
        """Same as ``GenerativeModel.make_cache``.

        Raises:
            ConfigError: ``max_len`` is more than ``max_seq_len``.
        """
        self._check_length(max_len)
        return KeyValueCache(self._layers(), batch_size, max_len)

    @property
    def stage_width(self) -> int:
        """Same as ``MultiTokenModel.stage_width``: the stage that has the embedding sends those of further tokens
        along."""
        return self.config.dim * (1 + self.n_predictors)

    def count_targets(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Same as ``MultiTokenModel.count_targets``."""
        return {} if self.config.multi_token is None else count_further_targets(batch, self.config.multi_token)

    def _add_predictors(self, config: TransformerConfig, multi_token: MultiTokenConfig, build: Builder) -> None:
        norm = functools.partial(make_norm, config.norm, config.dim, config.norm_eps)
        for layer in range(config.n_layers, config.n_layers + multi_token.depths):
            block = Block(config, layer, build)
            self.blocks[str(layer)] = build(multi_token.predictor, dim=config.dim, block=block, make_norm=norm)
        # where the embeddings of further tokens, which no block passes on, leave and reach a pipeline stage
        self.departure, self.arrival = nn.Identity(), nn.Identity()
        self.register_forward_pre_hook(LookingAhead(multi_token.depths), with_kwargs=True)

    def _layers(self) -> list[str]:
        """The keys of the blocks that lead to the next token."""
        return [layer for layer in self.blocks if int(layer) < self.config.n_layers]

    def _predictors(self) -> list[Any]:
        return [block for layer, block in self.blocks.items() if int(layer) >= self.config.n_layers]

    def _enter(
        self, tokens: torch.Tensor, further_tokens: torch.Tensor | None, *, predicts: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states ``(B, S, D)``; and the embeddings of further tokens ``(B, S, K, D)``, where predictors, or
        those of a later stage, are to read them."""
        if self.n_predictors == 0:
            return tokens if self.embed is None else self.embed(tokens), None
        if self.embed is None:
            hidden, along = tokens.split((self.config.dim, tokens.shape[-1] - self.config.dim), dim=-1)
            along = along.unflatten(-1, (self.n_predictors, self.config.dim))
            return hidden, along if self.head is None else self.arrival(along)
        hidden = self.embed(tokens)
        if self.head is None:
            return hidden, self.departure(self.embed(further_tokens.clamp(min=0)))
        return hidden, self.embed(further_tokens.clamp(min=0)) if predicts else None

    def _surroundings_ahead(self, surroundings: BlockInputs, further_tokens: torch.Tensor) -> list[BlockInputs]:
        """For each predictor: a position counts if it has the token ahead, which is then what it knows last."""
        each = []
        for ids in further_tokens.unbind(-1):
            facts = dict(surroundings.facts)
            if "token_ids" in facts:
                facts["token_ids"] = ids.clamp(min=0)
            cos, sin, mask, causal = surroundings.cos, surroundings.sin, surroundings.mask, surroundings.causal
            each.append(BlockInputs(cos, sin, mask, causal, valid=ids >= 0, facts=facts))
        return each

    def _surroundings(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None,
        document: torch.Tensor | None,
        mask: torch.Tensor | BlockMask | None,
        cache: KeyValueCache | None,
    ) -> BlockInputs:
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
        cos, sin = rotary_tables(
            positions, self.config.rotary_size, self.config.rope_theta, self.config.rope_scaling or self.config.yarn
        )
        return BlockInputs(cos, sin, mask, causal, valid)

    def _facts(
        self, tokens: torch.Tensor, document: torch.Tensor | None, token_ids: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """``BlockInputs.facts``; those that no layer asks for cost nothing."""
        needs = self.needs
        facts: dict[str, torch.Tensor] = {}
        if "sequence" in needs:
            facts["sequence"] = number_sequences(document, tokens)
        if "token_ids" in needs:
            if self.embed is None and token_ids is None:
                raise ValueError("a stage without the embedding must be given token_ids, as its layers need them")
            facts["token_ids"] = tokens if token_ids is None else token_ids
        return facts

    def _mask(
        self, tokens: torch.Tensor, document: torch.Tensor | None
    ) -> tuple[torch.Tensor | BlockMask | None, bool]:
        """``BlockInputs.mask`` and ``BlockInputs.causal``."""
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
        """Return whether the head's weight goes by its own name, and not by the embedding's."""
        return self.head is not None and not (self.config.tie_embeddings and self.embed is not None)

    def _check_length(self, length: int) -> None:
        if length > self.max_seq_len:
            raise ConfigError(f"a sequence of {length} tokens is longer than model.max_seq_len = {self.max_seq_len}")


class Block(nn.Module):
    """Attention and a feed-forward layer, each reading from and adding to the residual stream."""

    def __init__(self, config: TransformerConfig, layer: int, build: Builder) -> None:
        super().__init__()
        self.attention_norm = make_norm(config.norm, config.dim, config.norm_eps)
        latent = config.latent_attention
        self.attention = Attention(config) if latent is None else LatentAttention(config, latent)
        self.feed_forward_norm = make_norm(config.norm, config.dim, config.norm_eps)
        self.feed_forward = build(config.feed_forward, dim=config.dim, layer=layer, n_layers=config.n_layers)
        self.residual_multiplier = config.residual_multiplier

    def forward(self, hidden: torch.Tensor, surroundings: BlockInputs, cache: LayerCache | None = None) -> torch.Tensor:
        """``(B, S, D)`` to ``(B, S, D)``."""
        mixed = self.attention(self.attention_norm(hidden), surroundings, cache)
        hidden = hidden + _times(self.residual_multiplier, mixed)
        facts = {name: surroundings.facts[name] for name in self.needs}
        layer: Any = self.feed_forward
        work = layer.generate if cache is not None and hasattr(layer, "generate") else layer
        changed = work(self.feed_forward_norm(hidden), surroundings.valid, **facts)
        return hidden + _times(self.residual_multiplier, changed)

    @property
    def needs(self) -> frozenset[str]:
        """What its feed-forward layer needs to know of tokens."""
        return frozenset(getattr(self.feed_forward, "needs", ()))

    def init_weights(self, rng: Initializer, prefix: str, residual_std: float, std: float) -> None:
        """Same as ``FeedForward.init_weights``."""
        init_norm(self.attention_norm, rng, f"{prefix}attention_norm.")
        self.attention.init_weights(rng, f"{prefix}attention.", residual_std, std)
        init_norm(self.feed_forward_norm, rng, f"{prefix}feed_forward_norm.")
        self.feed_forward.init_weights(rng, f"{prefix}feed_forward.", residual_std, std)

    def parallel_plan(self) -> dict[str, ShardRole]:
        """Same as ``FeedForward.parallel_plan``."""
        plan: dict[str, ShardRole] = {"attention_norm": "sequence", "feed_forward_norm": "sequence"}
        plan |= {f"attention.{name}": role for name, role in self.attention.parallel_plan().items()}
        for name, role in self.feed_forward.parallel_plan().items():
            plan[f"feed_forward.{name}" if name else "feed_forward"] = role
        return plan

    def context_plan(self) -> list[str]:
        """Same as ``ContextParallelModel.context_plan``, names relative to this module."""
        return ["attention.core"]

    def recompute_plan(self) -> Mapping[str, Recompute]:
        """Same as ``Model.recompute_plan``, for operations that other layers do not have."""
        layer: Any = self.feed_forward
        return layer.recompute_plan() if hasattr(layer, "recompute_plan") else {}

    def parameter_roles(self) -> dict[str, ParameterRole]:
        """Same as ``FeedForward.parameter_roles``."""
        roles = norm_roles(self.attention_norm, "attention_norm.") | norm_roles(
            self.feed_forward_norm, "feed_forward_norm."
        )
        for part in ("attention", "feed_forward"):
            roles |= {f"{part}.{name}": role for name, role in getattr(self, part).parameter_roles().items()}
        return roles

    def active_parameters(self) -> int:
        """Weights of matrices that are multiplied for one token."""
        return self.attention.active_parameters() + self.feed_forward.active_parameters()


def _times(factor: float, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if factor == 1 else tensor * factor


_DEAR = (
    "aten.mm",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "higher_order.flex_attention",
)
"""Matrix products and attention take nearly all of the time; what lies between is cheap to compute again."""
