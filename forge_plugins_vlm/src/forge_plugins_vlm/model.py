"""The model ``vision_language``: the decoder of ``forge_plugins_dense``, and images among its text.

Shapes: B = batch, S = sequence, D = width of the residual stream, N = tiles of a row, F = image tokens of a row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from forge_core.contracts.builder import Builder
from forge_core.contracts.loss import Loss, LossSum
from forge_core.contracts.model import Initializer, ParameterRole, ShardRole
from forge_core.contracts.observation import ObservableModule, Site, within
from forge_core.errors import ConfigError
from forge_plugins_dense.cache import KeyValueCache
from forge_plugins_dense.head import make_head
from forge_plugins_dense.transformer import Transformer
from forge_plugins_vlm.config import VisionLanguageConfig
from forge_plugins_vlm.image_mask import image_mask
from forge_plugins_vlm.mrope import image_axes
from forge_plugins_vlm.placing import Placing
from forge_plugins_vlm.vision import VisionTower, of_size


class VisionLanguageModel(Transformer):
    """A ``Transformer`` whose blocks are those of a fusion, with a part ``vision`` on the first pipeline stage."""

    config: VisionLanguageConfig

    def __init__(self, config: VisionLanguageConfig, *, vocab_size: int, build: Builder) -> None:
        if config.input_tokens >= vocab_size:
            raise ConfigError(
                f"model.input_tokens: must be less than the {vocab_size} tokens of the vocabulary, got "
                f"{config.input_tokens}"
            )
        super().__init__(config, vocab_size=vocab_size, build=build)
        self.vision: VisionTower | None = VisionTower(config, build)
        if config.input_tokens:
            self.head = make_head(config.dim, vocab_size - config.input_tokens, config.output_softcap)
        self.placing = Placing() if config.fusion.config.places_tokens else None
        self._is_bidirectional = getattr(config.fusion.config, "bidirectional", False)
        self._mrope_sections = getattr(config.fusion.config, "mrope_sections", None)
        self._image_tokens_travel = "image_tokens" in self.needs
        self._further_weights = {int(layer): _further_weights(block) for layer, block in self.blocks.items()}
        """By layer; of all of them on each stage of a pipeline."""

    def make_block(self, layer: int, build: Builder) -> nn.Module:
        """The fusion's."""
        block: nn.Module = build(self.config.fusion, model=self.config).block(layer)
        return block

    def forward(  # type: ignore[override]  # further entries, and what travels between stages
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor | None = None,
        loss: Loss | None = None,
        *,
        pixels: torch.Tensor | None = None,
        tile_sizes: torch.Tensor | None = None,
        pixels_sizes: torch.Tensor | None = None,
        image_slots: torch.Tensor | None = None,
        image_range: torch.Tensor | None = None,
        image_tokens: torch.Tensor | None = None,
        cache: KeyValueCache | None = None,
        **inputs: Any,
    ) -> torch.Tensor | LossSum | tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Same as ``Transformer.forward``, with the entries of ``forge_plugins_vlm.contracts.entries``. Text alone
        needs none of them.

        Args:
            image_tokens: ``(B, F, D)``, from an earlier pipeline stage.
            cache: the first forward with it looks at all images of the rows. Later ones may be given ``image_slots``
                and ``image_range``; without them they go on with text.

        Returns:
            As ``Transformer.forward``; a stage without a head also gives the image tokens, where blocks read them.
        """
        shown = {"pixels": pixels, "tile_sizes": tile_sizes, "pixels_sizes": pixels_sizes}
        images = self._looked_at(tokens, shown, image_slots, image_range, image_tokens, cache)
        if self._mrope_sections is not None:
            images |= self._turned(images["image_slots"], inputs.get("positions"), self._grids(shown, tokens), cache)
        if self._is_bidirectional and not (cache is not None and cache.length):
            inputs["mask"] = image_mask(images, inputs.get("document"), inputs.get("positions"))
        try:
            output = super().forward(tokens, targets, loss, cache=cache, facts=images, **inputs)
        except IndexError as error:
            if self.config.input_tokens and "out of bounds" in str(error):  # as cross entropy on the CPU says it
                sentence = f"the data have targets among the last {self.config.input_tokens} tokens ({error})"
                raise ConfigError(f"model.input_tokens: {sentence}; lower it") from error
            raise
        if self.head is not None or not self._image_tokens_travel:
            return output
        return output, {"image_tokens": images["image_tokens"]}  # type: ignore[return-value]  # hidden states

    def rotary_positions(self, positions: torch.Tensor, facts: Mapping[str, torch.Tensor], pairs: int) -> torch.Tensor:
        """Same as ``Transformer.rotary_positions``: in time, row and column, where the fusion is asked for them."""
        if self._mrope_sections is None:
            return positions
        rows, columns = accumulate(self._mrope_sections[:2])  # where they begin
        place = torch.arange(pairs, device=positions.device)  # no copy from the host, which would wait for the device
        axis = (place >= rows).long() + (place >= columns).long()
        return facts["image_axes"][..., axis]

    def enter(self, hidden: torch.Tensor, facts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Image tokens in their places."""
        if self.placing is None or "image_tokens" not in facts:
            return hidden
        entered: torch.Tensor = self.placing(hidden, facts["image_slots"], image_tokens=facts["image_tokens"])
        return entered

    def stage_of(self) -> dict[str, str]:
        """Same as ``Model.stage_of``."""
        return {"vision": "first"}

    def units(self) -> Sequence[str]:
        """Same as ``Model.units``: the layers of the encoder."""
        return [] if self.vision is None else [f"vision.{name}" for name in self.vision.units()]

    def flops_of(self, unit: str) -> float:
        """Same as ``TowerModel.flops_of``, of a sequence of ``max_seq_len`` tokens with one tile."""
        if unit == "vision":
            return self._flops_of_tile(*self._tile_of_nothing()) / self.max_seq_len
        if unit == "embed":
            return 0.0
        layer = unit.removeprefix("blocks.")
        block: Any = self.blocks[layer]
        flops: float = 6.0 * block.active_parameters() + block.mixing_flops(self.max_seq_len)
        return flops + self._usual_flops_of_images(int(layer))

    def flops_beside(self, batch: Mapping[str, torch.Tensor]) -> float:
        """Same as ``TowerModel.flops_beside``: those of the encoder, the connector and the layers that look at images
        for the tiles that a batch has, with the ones that fill up rows, instead of one in ``max_seq_len`` tokens; and
        of positions of images by the weights of images. A backward of encoder and connector is counted in phases in
        which they are trained. The stage that has them counts those of all layers.
        """
        if self.vision is None:
            return 0.0
        rows, length = batch["tokens"].shape
        shape = batch["pixels"].shape if "pixels" in batch else (rows, 1, 3, *self._tile_of_nothing())
        sizes = self._sizes_of(shape[-2:], "pixels_sizes" in batch)
        trains = self.vision.trains_encoder, self.vision.trains_connector
        of_tile = sum(self._flops_of_tile(*size, trains=trains) for size in sizes)
        image_tokens = self._image_tokens(shape[1], sizes)
        of_layers = sum(self._flops_of_images(layer, image_tokens, length) for layer in range(self.config.n_layers))
        further = 6.0 * sum(self._further_weights.values())
        placed = int((batch["image_slots"] != -1).sum()) if further and "image_slots" in batch else 0
        return rows * (shape[1] * of_tile + of_layers - length * self._usual_flops) + placed * further

    def flops_per_token(self, seq_len: int) -> float:
        """Same as ``Model.flops_per_token``, with those of images for a tile in ``max_seq_len`` tokens, as ``forge
        plan`` knows no images; ``flops_beside`` has the others."""
        flops = super().flops_per_token(seq_len) + (0.0 if self.vision is None else self.flops_of("vision"))
        return flops + sum(self._usual_flops_of_images(int(layer)) for layer in self.blocks)

    def travels(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
        """Same as ``TravellingModel.travels``: image tokens, where blocks read them."""
        if not self._image_tokens_travel:
            return {}
        batch = shapes["tokens"][0]
        _, tiles, _, height, width = shapes.get("pixels", (batch, 1, 3, *self._tile_of_nothing()))
        sizes = self._sizes_of((height, width), "pixels_sizes" in shapes)
        return {"image_tokens": ((batch, self._image_tokens(tiles, sizes), self.config.dim), None)}

    def init_weights(self, rng: Initializer) -> None:
        super().init_weights(rng)
        if self.vision is not None:
            self.vision.init_weights(rng, "vision.", self.config.init_std)

    def parallel_plan(self) -> dict[str, ShardRole]:
        plan = super().parallel_plan()
        if self.vision is not None:
            plan["vision"] = "tower"
            if self.config.cut_encoder:
                plan |= {f"vision.encoder.{name}": role for name, role in self.vision.encoder.parallel_plan().items()}
        if self.placing is not None and self.embed is not None:
            plan["placing"] = "residual"
        return plan

    def parameter_roles(self) -> dict[str, ParameterRole]:
        roles = super().parameter_roles()
        if self.vision is not None:
            roles |= {f"vision.{name}": role for name, role in self.vision.parameter_roles().items()}
        return roles

    def parameter_aliases(self) -> dict[str, list[str]]:
        """Same as ``AliasedModel.parameter_aliases``: parts of ``vision``, the decoder's own weights, and what the
        blocks of a fusion have beside them."""
        of_blocks: dict[str, list[str]] = {}
        for layer, block in self.blocks.items():
            own: Any = getattr(block, "parameter_aliases", dict)
            for alias, patterns in own().items():
                of_blocks.setdefault(alias, []).extend(f"blocks.{layer}.{pattern}" for pattern in patterns)
        others = ["vision.*", *(pattern for patterns in of_blocks.values() for pattern in patterns)]
        names = [name for name, _ in self.named_parameters()]
        return {
            "vision": ["vision.*"],
            "encoder": ["vision.encoder.*"],
            "connector": ["vision.connector.*", "vision.newline"],
            "decoder": [name for name in names if not any(fnmatchcase(name, pattern) for pattern in others)],
            "embeddings": ["embed.*"],
            **of_blocks,
        }

    def sites(self) -> dict[str, Site]:
        """Same as ``ObservableModule.sites``, with those of the encoder, its features, and the tokens of the connector,
        a row for each tile of the batch."""
        found = super().sites()
        if self.vision is not None:
            dims = ("tile", "feature", "width")
            encoder = self.vision.encoder
            own = encoder.sites() if isinstance(encoder, ObservableModule) else {}
            found |= {f"vision.{name}": within("vision.encoder", site) for name, site in own.items()}
            found["image_features"] = Site(module="vision.encoder", dims=dims)
            found["image_tokens"] = Site(module="vision.connector", dims=dims)
        return found

    def _looked_at(
        self,
        tokens: torch.Tensor,
        shown: Mapping[str, torch.Tensor | None],
        slots: torch.Tensor | None,
        sees: torch.Tensor | None,
        image_tokens: torch.Tensor | None,
        cache: KeyValueCache | None,
    ) -> dict[str, torch.Tensor]:
        """The facts about images that blocks and ``enter`` need."""
        batch, length = tokens.shape[:2]
        if cache is not None and cache.beside and slots is None:  # text goes on: no image token has a place in it
            last, kept, its_tile = cache.beside[:3]
            slots = tokens.new_full((batch, length), -1, dtype=torch.int64)
            sees = last if length == 1 else last.expand(-1, length, -1)  # the same object: blocks know it again
            of_blocks = {"image_tokens": kept, "image_tile": its_tile} if self._image_tokens_travel else {}
            return {"image_slots": slots, "image_range": sees, **of_blocks}
        tile: torch.Tensor | None = None
        if cache is not None and cache.beside:
            _, image_tokens, tile = cache.beside[:3]
        elif self.vision is not None:
            if shown["pixels"] is None:
                blank = tokens.new_zeros((batch, 1, 3, *self._tile_of_nothing()), dtype=torch.uint8)
                shown = {**shown, "pixels": blank}
            image_tokens = self.vision(**shown)
        facts = {
            "image_slots": tokens.new_full((batch, length), -1, dtype=torch.int64) if slots is None else slots,
            "image_range": tokens.new_zeros((batch, length, 3), dtype=torch.int64) if sees is None else sees,
        }
        if image_tokens is None:  # a later stage of a model whose blocks do not read them
            return facts
        if tile is None:
            each = self._grids(shown, tokens).prod(dim=1, keepdim=True)
            tile = torch.arange(image_tokens.shape[1], device=tokens.device) // each
            tile = tile[0] if shown["pixels_sizes"] is None else tile
        if cache is not None:
            cache.beside = (facts["image_range"][:, -1:], image_tokens, tile, *cache.beside[3:])
        return {**facts, "image_tokens": image_tokens, "image_tile": tile}

    def _turned(
        self,
        slots: torch.Tensor,
        positions: torch.Tensor | None,
        grids: torch.Tensor,
        cache: KeyValueCache | None,
    ) -> dict[str, torch.Tensor]:
        """``image_axes`` ``(B, S, 3)``; and what a cache is to know of images before the tokens that follow."""
        begun = slots.new_zeros((len(slots), 1))
        if positions is None:
            start = 0 if cache is None else cache.length
            positions = torch.arange(start, start + slots.shape[1], device=slots.device)[None]
        if cache is not None and len(cache.beside) > 3:
            begun = cache.beside[3]
        axes, begun = image_axes(slots, positions, grids, begun)
        if cache is not None:
            cache.beside = (*cache.beside[:3], begun)
        return {"image_axes": axes}

    def _grids(self, shown: Mapping[str, torch.Tensor | None], tokens: torch.Tensor) -> torch.Tensor:
        """Rows and columns of the tokens of a tile, ``(1, 2)`` int64; of each row ``(B, 2)``, if there are several
        sizes."""
        pixels, own = shown["pixels"], shown["pixels_sizes"]
        sizes = self._sizes_of(self._tile_of_nothing() if pixels is None else pixels.shape[-2:], own is not None)
        # filled, not copied from the host, which would wait for the device
        grids = [torch.cat([tokens.new_full((1, 1), n) for n in self._token_grid(*size)], dim=1) for size in sizes]
        found = grids[0]
        for size, grid in zip(sizes, grids, strict=True):
            found = found if own is None else torch.where(of_size(own, size)[:, None], grid, found)
        return found

    def _sizes_of(self, tile_size: Sequence[int], several: bool) -> list[tuple[int, int]]:
        """The sizes in which tiles of a batch are encoded."""
        height, width = tile_size
        return self.config.sizes_within(height, width) if several else [(height, width)]

    def _token_grid(self, height: int, width: int) -> tuple[int, int]:
        config = self.config
        rows, columns = config.connector.config.grid(config.encoder.config.grid(height, width))
        return rows, columns

    def _image_tokens(self, tiles: int, sizes: Sequence[tuple[int, int]]) -> int:
        """F of rows of so many tiles."""
        return tiles * max(math.prod(self._token_grid(*size)) for size in sizes) + self.config.newline

    def _flops_of_tile(self, height: int, width: int, *, trains: tuple[bool, bool] | None = None) -> float:
        """Those of encoder and connector: forward, and backward where they are trained.

        Args:
            trains: the encoder, and the connector; by default as the configuration has it.
        """
        config = self.config
        encoder, connector = trains or (not config.freeze_encoder, True)
        own: float = config.encoder.config.flops(height, width)
        features = config.encoder.config.grid(height, width)
        behind: float = config.connector.config.flops(features, config.encoder.config.dim, config.dim)
        return own * (3 if encoder else 1) + behind * (3 if encoder or connector else 1)

    def _flops_of_images(self, layer: int, image_tokens: int, positions: int) -> float:
        """Those of a row in a layer, forward and backward, beyond what is counted for each position."""
        flops: float = self.config.fusion.config.flops_of_images(layer, self.config, image_tokens, positions)
        return 3 * flops

    @functools.cached_property  # each microbatch asks for it
    def _usual_flops(self) -> float:
        """What ``flops_per_token`` of the whole model has for images."""
        of_layers = (self._usual_flops_of_images(layer) for layer in range(self.config.n_layers))
        return self.flops_of("vision") + sum(of_layers)

    def _usual_flops_of_images(self, layer: int) -> float:
        """The same for a token, with one tile in ``max_seq_len`` tokens."""
        image_tokens = self._image_tokens(1, [self._tile_of_nothing()])
        further = 6.0 * self._further_weights[layer] * image_tokens
        return (self._flops_of_images(layer, image_tokens, self.max_seq_len) + further) / self.max_seq_len

    def _tile_of_nothing(self) -> tuple[int, int]:
        """The size of the tile that stands for none: an encoder runs on all ranks, or FSDP would wait for it."""
        height, width = self.config.encoder.config.usual_tile
        return height, width


def _further_weights(block: Any) -> int:
    """How many more weights a token of an image is multiplied by than one of text; less than 0 if it is fewer."""
    if not hasattr(block, "active_image_parameters"):
        return 0
    more: int = block.active_image_parameters() - block.active_parameters()
    return more
