"""The dense decoder: embedding, blocks, norm, head.

Shapes: B = batch, S = sequence, D = width of the residual stream, V = vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask

from forge_core.contracts.builder import Builder
from forge_core.contracts.loss import Loss, LossSum
from forge_core.contracts.model import Initializer, ParameterRole, Recompute, ShardRole, canonical_name
from forge_core.contracts.observation import Site, within
from forge_core.errors import ConfigError
from forge_core.ops.sequence_sum import number_sequences, whole_length
from forge_plugins_dense.attention import BlockInputs
from forge_plugins_dense.block import STREAM, Block, times
from forge_plugins_dense.cache import KeyValueCache
from forge_plugins_dense.config import CUDA_KERNELS, MIN_FLEX_FEATURES, TransformerConfig
from forge_plugins_dense.dropout import Dropout, noise_of_layer
from forge_plugins_dense.head import make_head
from forge_plugins_dense.initial_values import normal
from forge_plugins_dense.mask import cache_mask, causal_mask, document_block_mask, document_mask
from forge_plugins_dense.multi_token import LookingAhead, attach_predictions, count_further_targets
from forge_plugins_dense.multi_token_config import MultiTokenConfig
from forge_plugins_dense.norm import init_norm, make_norm, norm_roles
from forge_plugins_dense.rope import rotary_tables
from forge_plugins_dense.rope_config import LongRope
from forge_plugins_dense.sequence_lengths import SequenceLengths

Mask = torch.Tensor | BlockMask | None


class LayerKind(NamedTuple):
    """What layers have in common that are given the same ``BlockInputs``."""

    window: int
    rotary_size: int
    rope_theta: float
    rope_factor: float
    rope_stretched: bool


def _kind(config: TransformerConfig, number: int) -> LayerKind:
    layer = config.layer(number)
    size = config.rotary_size(layer)
    return LayerKind(layer.window, size, layer.rope_theta, layer.rope_factor, layer.rope_stretched)


class Transformer(nn.Module):
    """The model ``transformer``; what each method promises is in ``forge_core.contracts.model``."""

    def __init__(self, config: TransformerConfig, *, vocab_size: int, build: Builder) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.max_seq_len = config.max_seq_len
        self.embed: nn.Embedding | None = nn.Embedding(vocab_size, config.dim)
        if config.learned_positions:
            self.embed.positions = nn.Embedding(config.max_seq_len, config.dim)
        self.blocks = nn.ModuleDict({str(layer): self.make_block(layer, build) for layer in range(config.n_layers)})
        self.embed_dropout = Dropout(config.embedding_dropout, place=0) if config.embedding_dropout else None
        self.n_predictors = config.n_predictors
        if config.multi_token is not None:
            self._add_predictors(config, config.multi_token, build)
        if config.long_rope is not None:
            self.register_forward_pre_hook(SequenceLengths(), with_kwargs=True)
        self.kinds = {layer: _kind(config, int(layer)) for layer in self.blocks}
        self.norm: nn.Module | None = make_norm(config.norm, config.dim, config.norm_eps, build)
        self.head: nn.Linear | None = make_head(config.dim, vocab_size, config.output_softcap)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight

    def make_block(self, layer: int, build: Builder) -> nn.Module:
        """The block of a layer, with all that ``Block`` has. A model that extends this one may have others."""
        return Block(self.config, layer, build)

    def rotary_positions(self, positions: torch.Tensor, facts: Mapping[str, torch.Tensor], pairs: int) -> torch.Tensor:
        """The positions by which queries and keys are rotated: ``(B or 1, S)`` int64, or ``(B, S, pairs)``, one for
        each pair of features. A model that extends this one may have others.

        Args:
            facts: given to ``forward``, and the ones that layers ask for.
        """
        return positions

    def enter(self, hidden: torch.Tensor, facts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Hidden states ``(B, S, D)`` right after the embedding. A model that extends this one may put others in their
        place.

        Args:
            facts: given to ``forward``.
        """
        return hidden

    def forward(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor | None = None,
        loss: Loss | None = None,
        *,
        positions: torch.Tensor | None = None,
        document: torch.Tensor | None = None,
        token_ids: torch.Tensor | None = None,
        noise: torch.Tensor | None = None,
        mask: Mask | Mapping[int, Mask] = None,
        cache: KeyValueCache | None = None,
        further_tokens: torch.Tensor | None = None,
        further_targets: torch.Tensor | None = None,
        further_embedded: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        facts: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> torch.Tensor | LossSum | tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Same as ``Model.forward``. Without a cache, padding belongs at the right, where nothing attends to it.

        ``mask`` is one for each window of ``attention_windows``, by its length, where there are any.

        ``further_tokens`` and ``further_targets``, ``(B, S, K)``, come from ``LookingAhead``, ``lengths``, ``(B, S)``,
        from ``SequenceLengths``, and ``further_embedded``, ``(B, S, K, D)``, from the stage that has the embedding.
        ``facts`` come from a model that extends this one, for its blocks and ``enter``.

        Raises:
            ConfigError: the sequence is longer than ``max_seq_len``, or the chosen attention kernel cannot do this.
            ValueError: a cache without room, or together with documents or a mask.
        """
        asked = tokens.shape[1]
        if cache is not None:
            tokens, positions, lengths = self._reserve(tokens, positions, mask, cache)
        positions, valid = self._positions(tokens, positions, cache)
        known = {**facts, **self._facts(tokens, document, token_ids)}
        surroundings = self._surroundings(tokens, positions, valid, document, mask, cache, known, lengths)
        noise = noise if self.training and "noise" in self.needs else None
        predicts = self.training and loss is not None and further_targets is not None
        hidden = tokens if self.embed is None else self._enter(tokens, positions, facts)
        embedded = self._embedded_ahead(further_tokens, further_embedded, predicts=predicts)
        if self.embed is not None and self.embed_dropout is not None:
            hidden = self.embed_dropout(hidden, None if noise is None else noise_of_layer(noise, -1))
        for layer in self._layers():
            kept = None if cache is None else cache.layers[layer]
            given = surroundings[self.kinds[layer]]
            if noise is not None:
                given = given.of_layer(noise_of_layer(noise, int(layer)))
            hidden = self.blocks[layer](hidden, given, kept)
        if tokens.shape[1] != asked:
            hidden = hidden[:, -asked:]
        normed = hidden if self.norm is None else times(self.config.output_multiplier, self.norm(hidden))
        if self.head is None:
            return normed if embedded is None else (normed, {"further_embedded": embedded})
        if loss is None:
            logits: torch.Tensor = self.head(normed)
            return logits
        if targets is None:
            raise ValueError("a loss needs targets")
        summed = loss(normed, self.head, targets)
        if embedded is None or not predicts:
            return summed
        predictors, config = self._predictors(), self.config.multi_token
        assert further_tokens is not None
        assert further_targets is not None
        assert config is not None
        usual = surroundings[self.kinds[str(self.config.n_layers)]]
        each = self._surroundings_ahead(usual, further_tokens, noise)
        scaled = functools.partial(times, self.config.output_multiplier)
        return attach_predictions(
            summed, hidden, embedded, predictors, each, loss, self.head, further_targets, config, scaled
        )

    def init_weights(self, rng: Initializer) -> None:
        std = self.config.init_std
        if self.embed is not None:
            rng.fill("embed.weight", self.embed.weight, normal(std))
            if self.config.learned_positions:
                rng.fill("embed.positions.weight", self.embed.get_parameter("positions.weight"), normal(std))
        for layer, block in self._blocks_by_layer():
            block.init_weights(rng, f"blocks.{layer}.", std / math.sqrt(2 * self._depth_of(int(layer))), std)
        if self.norm is not None:
            init_norm(self.norm, rng, "norm.")
        if self.head is not None and self._has_own_head():
            rng.fill("head.weight", self.head.weight, normal(std))

    def _depth_of(self, layer: int) -> int:
        """The layers that initial values of a layer are divided for."""
        if self.config.init_depth == "layer":
            return layer + 1
        return self.config.init_layers or self.config.n_layers

    def parallel_plan(self) -> dict[str, ShardRole]:
        plan: dict[str, ShardRole] = {}
        if self.embed is not None:
            plan["embed"] = "embedding"
            if self.config.learned_positions:
                plan["embed.positions"] = "embedding"
        for layer, block in self._blocks_by_layer():
            plan |= {f"blocks.{layer}.{name}": role for name, role in block.parallel_plan().items()}
        if self.embed_dropout is not None:
            plan["embed_dropout"] = "residual"
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
        """What its layers need to know of tokens."""
        own = {"noise"} if self.config.has_dropout else ()
        return frozenset(own).union(*(block.needs for _, block in self._blocks_by_layer()))

    def context_plan(self) -> list[str]:
        return [f"blocks.{layer}.{name}" for layer, block in self._blocks_by_layer() for name in block.context_plan()]

    def attention_windows(self) -> tuple[int, ...]:
        """Same as ``ContextParallelModel.attention_windows``."""
        return self.config.windows

    def recompute_plan(self) -> dict[str, Recompute]:
        plan: dict[str, Recompute] = dict.fromkeys(_DEAR, "keep")
        for _, block in self._blocks_by_layer():
            plan |= block.recompute_plan()
        return plan

    def parameter_roles(self) -> dict[str, ParameterRole]:
        roles: dict[str, ParameterRole] = {}
        if self.embed is not None:
            roles |= {f"embed.{name}": "embedding" for name, _ in self.embed.named_parameters()}
        for layer, block in self._blocks_by_layer():
            roles |= {f"blocks.{layer}.{name}": role for name, role in block.parameter_roles().items()}
        if self.norm is not None:
            roles |= norm_roles(self.norm, "norm.")
        if self._has_own_head():
            roles["head.weight"] = "head"
        return roles

    def set_frozen(self, names: Collection[str]) -> None:
        """Same as ``FreezableModel.set_frozen``: modules within that have such a method are told names of their own."""
        for name, module in self.named_modules():
            if name and hasattr(module, "set_frozen"):
                prefix = f"{canonical_name(name)}."
                module.set_frozen({one.removeprefix(prefix) for one in names if one.startswith(prefix)})

    def sites(self) -> dict[str, Site]:
        """Same as ``ObservableModule.sites``, without blocks that predict further tokens, which train only."""
        found = {} if self.embed is None else {"embed": Site(module="embed", dims=STREAM)}
        for layer in self._layers():
            name = f"blocks.{layer}"
            block: Any = self.blocks[layer]
            found |= {f"{name}.{key}": within(name, site) for key, site in block.sites().items()}
        if self.norm is not None and self.head is not None:
            found["final_norm"] = Site(module="norm", dims=STREAM)
            found["logits"] = Site(module="head", dims=("sample", "position", "token"))
        return found

    def flops_per_token(self, seq_len: int) -> float:
        """Same as ``Model.flops_per_token``, of the parts that are present; ``D`` is ``n_heads`` times the features
        of a head, in latent attention the mean of those of keys and of values, and ``S`` at most the window."""
        weights: int = sum(block.active_parameters() for _, block in self._blocks_by_layer())
        if self.head is not None:
            weights += self.head.weight.numel() * (1 + self.n_predictors)
        mixing: float = sum(block.mixing_flops(seq_len) for _, block in self._blocks_by_layer())
        return 6.0 * weights + mixing

    def make_cache(self, batch_size: int, max_len: int) -> KeyValueCache:
        """Same as ``GenerativeModel.make_cache``.

        Raises:
            ConfigError: ``max_len`` is more than ``max_seq_len``.
        """
        self._check_length(max_len)
        cache = KeyValueCache(self._layers(), batch_size, max_len)
        for layer in self._layers():
            block: Any = self.blocks[layer]
            mixer = block.attention
            if hasattr(mixer, "make_cache"):
                cache.layers[layer] = mixer.make_cache(batch_size, max_len)
        return cache

    def travels(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
        """Same as ``TravellingModel.travels``: the stage that has the embedding sends those of further tokens along."""
        if self.n_predictors == 0:
            return {}
        return {"further_embedded": ((*shapes["tokens"], self.n_predictors, self.config.dim), None)}

    def count_targets(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Same as ``MultiTokenModel.count_targets``."""
        return {} if self.config.multi_token is None else count_further_targets(batch, self.config.multi_token)

    def _add_predictors(self, config: TransformerConfig, multi_token: MultiTokenConfig, build: Builder) -> None:
        norm = functools.partial(make_norm, config.norm, config.dim, config.norm_eps, build)
        for layer in range(config.n_layers, config.n_layers + multi_token.depths):
            block = Block(config, layer, build)
            self.blocks[str(layer)] = build(multi_token.predictor, dim=config.dim, block=block, make_norm=norm)
        # where the embeddings of further tokens, which no block passes on, leave and reach a pipeline stage
        self.departure, self.arrival = nn.Identity(), nn.Identity()
        self.register_forward_pre_hook(LookingAhead(multi_token.depths), with_kwargs=True)

    def _layers(self) -> list[str]:
        """The keys of the blocks that lead to the next token."""
        return [layer for layer in self.blocks if int(layer) < self.config.n_layers]

    def _blocks_by_layer(self) -> Iterable[tuple[str, Any]]:
        """All blocks, each with what ``Block`` has, of which torch's types know nothing."""
        return self.blocks.items()

    def _predictors(self) -> list[Any]:
        return [block for layer, block in self.blocks.items() if int(layer) >= self.config.n_layers]

    def _enter(self, tokens: torch.Tensor, positions: torch.Tensor, facts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Hidden states ``(B, S, D)``."""
        hidden = self._embedded(tokens)
        if self.config.learned_positions:
            embed: Any = self.embed  # torch's types do not know that it has positions
            hidden = hidden + embed.positions(positions.clamp(min=0))
        return self.enter(hidden, facts)

    def _embedded_ahead(
        self, further_tokens: torch.Tensor | None, further_embedded: torch.Tensor | None, *, predicts: bool
    ) -> torch.Tensor | None:
        """The embeddings of further tokens ``(B, S, K, D)``, where predictors, or those of a later stage, are to read
        them."""
        if self.n_predictors == 0:
            return None
        if self.embed is None:
            return further_embedded if self.head is None else self.arrival(further_embedded)
        if self.head is not None and not predicts:
            return None
        assert further_tokens is not None
        embedded = self._embedded(further_tokens.clamp(min=0))
        return self.departure(embedded) if self.head is None else embedded

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        assert self.embed is not None
        return times(self.config.embed_multiplier, self.embed(tokens))

    def _surroundings_ahead(
        self, surroundings: BlockInputs, further_tokens: torch.Tensor, noise: torch.Tensor | None
    ) -> list[BlockInputs]:
        """For each predictor: a position counts if it has the token ahead, which is then what it knows last."""
        each = []
        for layer, ids in enumerate(further_tokens.unbind(-1), start=self.config.n_layers):
            facts = dict(surroundings.facts)
            if "token_ids" in facts:
                facts["token_ids"] = ids.clamp(min=0)
            cos, sin, mask, causal = surroundings.cos, surroundings.sin, surroundings.mask, surroundings.causal
            own = None if noise is None else noise_of_layer(noise, layer)
            each.append(BlockInputs(cos, sin, mask, causal, valid=ids >= 0, facts=facts, noise=own))
        return each

    def _positions(
        self, tokens: torch.Tensor, positions: torch.Tensor | None, cache: KeyValueCache | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``(B or 1, S)`` int64; and where there is no padding, ``BlockInputs.valid``."""
        if positions is not None:
            return positions, positions >= 0
        end = tokens.shape[1] if cache is None else cache.length
        return torch.arange(end - tokens.shape[1], end, device=tokens.device).unsqueeze(0), None

    def _reserve(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None,
        mask: Mask | Mapping[int, Mask],
        cache: KeyValueCache,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Tokens and positions that a cache is to hold more, and how long that makes each row, ``(B, 1)``, where they
        differ."""
        if mask is not None and cache.length > 0:
            raise ValueError("what sees what in a cache that has positions cannot be given from outside")
        if self.config.long_rope is not None:
            tokens, positions = self._with_outgrown(tokens, positions, cache, self.config.long_rope)
        cache.reserve(tokens, positions)
        return tokens, positions, None if positions is None else positions[:, -1:] + 1

    def _with_outgrown(
        self, tokens: torch.Tensor, positions: torch.Tensor | None, cache: KeyValueCache, long_rope: LongRope
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens and positions to compute. Keys in a cache are turned by short factors until a sequence outgrows the
        original context; then all positions are computed anew, as they are without a cache, and as transformers does.
        """
        most, before = long_rope.original_max_seq_len, cache.length
        past = cache.past
        all_tokens, all_positions = cache.remember(tokens, positions)
        if past is None or before + tokens.shape[1] <= most:
            return tokens, positions
        if positions is None:
            has_outgrown = before <= most
        else:
            was, now = past[1][:, -1], positions[:, -1]
            has_outgrown = bool(((was >= 0) & (was < most) & (now >= most)).any())
        if not has_outgrown:
            return tokens, positions
        cache.restart(self.make_cache(cache.batch_size, cache.max_len).layers)
        return all_tokens, None if positions is None else all_positions

    def _surroundings(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        valid: torch.Tensor | None,
        document: torch.Tensor | None,
        mask: Mask | Mapping[int, Mask],
        cache: KeyValueCache | None,
        facts: Mapping[str, torch.Tensor],
        lengths: torch.Tensor | int | None,
    ) -> dict[LayerKind, BlockInputs]:
        """What the blocks of each kind are given."""
        if cache is None:
            self._check_length(tokens.shape[1])
        kinds = dict.fromkeys(self.kinds[layer] for layer in self.blocks)
        masks = {
            window: self._mask_of_window(window, tokens, document, mask, cache)
            for window in dict.fromkeys(kind.window for kind in kinds)
        }
        if lengths is None:
            lengths = whole_length(tokens.shape[1]) if cache is None else cache.length
        turned = {kind: self.rotary_positions(positions, facts, kind.rotary_size // 2) for kind in kinds}
        return {
            kind: BlockInputs(*self._rotary_tables(kind, turned[kind], lengths), *masks[kind.window], valid, facts)
            for kind in kinds
        }

    def _rotary_tables(
        self, kind: LayerKind, positions: torch.Tensor, lengths: torch.Tensor | int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scaling = self.config.frequency_scaling if kind.rope_stretched else None
        size, theta, factor = kind.rotary_size, kind.rope_theta, kind.rope_factor
        return rotary_tables(positions, size, theta, scaling, factor=factor, lengths=lengths)

    def _mask_of_window(
        self,
        window: int,
        tokens: torch.Tensor,
        document: torch.Tensor | None,
        mask: Mask | Mapping[int, Mask],
        cache: KeyValueCache | None,
    ) -> tuple[Mask, bool]:
        """``BlockInputs.mask`` and ``BlockInputs.causal`` of layers that see so many positions, 0: all."""
        if mask is not None:
            return self._checked(mask[window] if isinstance(mask, Mapping) else mask), False
        if cache is not None:
            return self._mask_with_cache(tokens, document, cache, window)
        return self._mask(tokens, document, window)

    def _facts(
        self, tokens: torch.Tensor, document: torch.Tensor | None, token_ids: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """``BlockInputs.facts``; one that no layer asks for costs nothing."""
        needs = self.needs
        facts: dict[str, torch.Tensor] = {}
        if "sequence" in needs:
            facts["sequence"] = number_sequences(document, tokens)
        if "token_ids" in needs:
            if self.embed is None and token_ids is None:
                raise ValueError("a stage without the embedding must be given token_ids, as its layers need them")
            facts["token_ids"] = tokens if token_ids is None else token_ids
        if any("noise" in block.needs for _, block in self._blocks_by_layer()):  # a layer's own takes its place
            limit = 2**62 if self.training else 1
            facts["noise"] = torch.randint(limit, tokens.shape[:2], device=tokens.device)
        return facts

    def _mask(self, tokens: torch.Tensor, document: torch.Tensor | None, window: int) -> tuple[Mask, bool]:
        """The same without a cache, and without a mask from outside."""
        kernel = self.config.attention
        if kernel in CUDA_KERNELS and not tokens.is_cuda:
            raise ConfigError(f'model.attention = "{kernel}" needs CUDA, and this model is on {tokens.device}')
        seq_len = tokens.shape[1]
        window = window if window < seq_len else 0
        is_more = document is not None or window > 0 or self.config.attention_softcap is not None
        if self.training and self.config.attention_dropout:
            is_more = False  # its weights are multiplied out
        has_kernel = tokens.is_cuda and self.config.narrowest_head >= MIN_FLEX_FEATURES
        if kernel == "flex" or (kernel == "auto" and is_more and has_kernel):
            if document is None:
                document = torch.zeros(tokens.shape[:2], dtype=torch.int64, device=tokens.device)
            return document_block_mask(document, window), False
        if document is None and window == 0:
            return None, True
        if kernel == "flash" and tokens.is_cuda:
            what = "keep packed documents apart" if document is not None else "see a window alone"
            raise ConfigError(f'model.attention = "flash" cannot {what}; use "auto" or "flex"')
        if document is None:
            return causal_mask(seq_len, window, tokens.device)[None, None], False
        return document_mask(document, window), False

    def _checked(self, mask: Mask) -> Mask:
        """A mask from outside, which only FlexAttention takes if it is in tiles."""
        kernel = self.config.attention
        if isinstance(mask, BlockMask) and kernel not in ("auto", "flex"):
            raise ConfigError(
                f'model.attention = "{kernel}" cannot take the mask of context parallelism on CUDA; use "auto" or '
                '"flex"'
            )
        if isinstance(mask, BlockMask) and self.config.narrowest_head < MIN_FLEX_FEATURES:
            raise ConfigError(
                f"context parallelism on CUDA needs heads of at least {MIN_FLEX_FEATURES} features, and model.head_dim "
                f"gives them {self.config.narrowest_head}"
            )
        return mask

    def _mask_with_cache(
        self, tokens: torch.Tensor, document: torch.Tensor | None, cache: KeyValueCache, window: int
    ) -> tuple[Mask, bool]:
        """The same for positions that have been appended to a cache."""
        if document is not None:
            raise ValueError("a cache does not keep documents of one row apart; give each a row of its own")
        start = cache.length - tokens.shape[1]
        if cache.filled is None and (window == 0 or cache.length <= window):
            if start == 0:
                return None, True
            if tokens.shape[1] == 1:
                return None, False
        return cache_mask(start, cache.length, cache.filled, tokens.device, window), False

    def _has_own_head(self) -> bool:
        """Return whether the head's weight goes by its own name, and not by the embedding's."""
        return self.head is not None and not (self.config.tie_embeddings and self.embed is not None)

    def _check_length(self, length: int) -> None:
        if length > self.max_seq_len:
            raise ConfigError(f"a sequence of {length} tokens is longer than model.max_seq_len = {self.max_seq_len}")


_DEAR = (
    "aten.mm",
    "aten.addmm",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "higher_order.flex_attention",
)
"""Matrix products and attention take nearly all of the time; what lies between is cheap to compute again."""
