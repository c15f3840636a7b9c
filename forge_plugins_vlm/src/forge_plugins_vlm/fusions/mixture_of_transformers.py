"""The fusion ``mixture_of_transformers``: weights for each modality, attention over both.

Shapes: B = batch, S = sequence, D = width of the residual stream, H = heads.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from forge_core.contracts.builder import Builder
from forge_core.contracts.model import Initializer, ParameterRole, Recompute, ShardRole
from forge_core.contracts.observation import Site, within
from forge_plugins_dense.attention import Attention, BlockInputs
from forge_plugins_dense.block import Block, sites_within
from forge_plugins_dense.cache import LayerCache
from forge_plugins_vlm.config import VisionLanguageConfig
from forge_plugins_vlm.fusions.by_modality import PRODUCTS, ByModality
from forge_plugins_vlm.fusions.config import MixtureOfTransformersConfig
from forge_plugins_vlm.fusions.selected import Selected, is_image, limited, selected_sites


class MixtureOfTransformers:
    """Mixture-of-Transformers (Liang et al. 2024, arXiv 2411.04996): each token is projected by the weights of its
    modality, all attend to all in the order of the sequence, and what they read is projected, normed and fed forward by
    the weights of their modality again. Equal weights for both make it the dense decoder."""

    def __init__(self, config: MixtureOfTransformersConfig, *, model: VisionLanguageConfig, build: Builder) -> None:
        self._model, self._build = model, build

    def block(self, layer: int) -> nn.Module:
        """Same as ``Fusion.block``."""
        return MixtureBlock(self._model, layer, self._build)


class MixtureBlock(Block):
    """A block whose own weights are those of text, with a copy of all of them for images as ``image``.

    Products are by groups, each position with the weights of its modality (``ByModality``). Where that cannot be, both
    copies see all positions, and what a position has of the other one is left out. Shapes never depend on how many
    image tokens there are.
    """

    def __init__(self, config: VisionLanguageConfig, layer: int, build: Builder) -> None:
        super().__init__(config, layer, build)
        self.image = Block(config, layer, build)
        self.mixed_text, self.mixed_image = Selected(), Selected()
        self.changed_text, self.changed_image = Selected(), Selected()

    def mixed(self, hidden: torch.Tensor, surroundings: BlockInputs, cache: LayerCache | None) -> torch.Tensor:
        """Same as ``Block.mixed``."""
        images = is_image(surroundings)
        of_text, of_image = self._attention()
        names = ("q", "k", "v", "o")
        order = ByModality.of_linear(images, *((getattr(of_text, name), getattr(of_image, name)) for name in names))
        q, k, v = self._projected(hidden, surroundings, order)
        heads = of_text.mix(q, k, v, surroundings, cache)
        if order is None:
            text, image = of_text.o(heads), of_image.o(heads)
        else:
            text = image = order.positions(order.multiplied(order.rows(heads, heads), of_text.o, of_image.o))
        if self.attention_output_norm is not None and self.image.attention_output_norm is not None:
            text, image = self.attention_output_norm(text), self.image.attention_output_norm(image)
        mixed: torch.Tensor = self.mixed_text(text, ~images) + self.mixed_image(image, images)
        return mixed

    def _projected(
        self, hidden: torch.Tensor, surroundings: BlockInputs, order: ByModality | None
    ) -> tuple[torch.Tensor, ...]:
        """Same as ``Attention.project``, of each position by the weights of its modality."""
        text, image = self._attention()
        normed, image_normed = self.attention_norm(hidden), self.image.attention_norm(hidden)
        if order is None:
            of_text, of_image = text.project(normed, surroundings), image.project(image_normed, surroundings)
        else:
            rows, pairs = order.rows(normed, image_normed), ((text.q, image.q), (text.k, image.k), (text.v, image.v))
            q, k, v = (order.positions(order.multiplied(rows, *pair)) for pair in pairs)
            of_text = text.in_heads(q, k, v, surroundings)
            if text.q_norm is None:
                return of_text
            of_image = image.in_heads(q, k, v, surroundings)
        where = is_image(surroundings)[..., None, None]
        return tuple(torch.where(where, image, text) for text, image in zip(of_text, of_image, strict=True))

    def changed(self, hidden: torch.Tensor, surroundings: BlockInputs, *, generates: bool) -> torch.Tensor:
        """Same as ``Block.changed``."""
        images = is_image(surroundings)
        if order := ByModality.of_dense(images, self.feed_forward, self.image.feed_forward):
            rows = order.rows(self.feed_forward_norm(hidden), self.image.feed_forward_norm(hidden))
            text = image = order.positions(order.fed_forward(rows, self.feed_forward, self.image.feed_forward))
            if self.feed_forward_output_norm is not None and self.image.feed_forward_output_norm is not None:
                text, image = self.feed_forward_output_norm(text), self.image.feed_forward_output_norm(image)
        else:
            text = super().changed(hidden, limited(surroundings, ~images), generates=generates)
            image = self.image.changed(hidden, limited(surroundings, images), generates=generates)
        changed: torch.Tensor = self.changed_text(text, ~images) + self.changed_image(image, images)
        return changed

    def _attention(self) -> tuple[Attention, Attention]:
        """Those of text and of images; the config refuses other mixers."""
        text, image = self.attention, self.image.attention
        assert isinstance(text, Attention), "refused by the config"
        assert isinstance(image, Attention), "refused by the config"
        return text, image

    @property
    def needs(self) -> frozenset[str]:
        """Same as ``Block.needs``."""
        return super().needs | {"image_slots"}

    def init_weights(self, rng: Initializer, prefix: str, residual_std: float, std: float) -> None:
        super().init_weights(rng, prefix, residual_std, std)
        self.image.init_weights(rng, f"{prefix}image.", residual_std, std)

    def parallel_plan(self) -> dict[str, ShardRole]:
        plan = super().parallel_plan()
        plan |= {f"image.{name}": role for name, role in self.image.parallel_plan().items()}
        return plan | dict.fromkeys(("mixed_text", "mixed_image", "changed_text", "changed_image"), "residual")

    def recompute_plan(self) -> Mapping[str, Recompute]:
        return {**super().recompute_plan(), **PRODUCTS}

    def parameter_roles(self) -> dict[str, ParameterRole]:
        roles = self.image.parameter_roles()
        return super().parameter_roles() | {f"image.{name}": role for name, role in roles.items()}

    def parameter_aliases(self) -> dict[str, list[str]]:
        """Same as ``AliasedModel.parameter_aliases``, of this block."""
        return {"image": ["image.*"]}

    def sites(self) -> dict[str, Site]:
        """Same as ``Block.sites``. What a modality computes by its own weights is ``text.q`` and ``image.q``, at all
        positions; ``text.attn_out``, ``text.mlp_out`` and those of images are zero at positions of the other one."""
        found, image = super().sites(), self.image.sites()
        of_layer = sites_within("feed_forward", self.feed_forward)
        halves = ("attn_in", "q", "k", "v", "attn_head_out", "mlp_in", *of_layer)
        found |= {f"text.{name}": found.pop(name) for name in halves}
        found |= {f"image.{name}": within("image", image[name]) for name in halves}
        del found["attn_out"], found["mlp_out"]
        return found | selected_sites("attn_out", "mixed") | selected_sites("mlp_out", "changed")
