"""The fusion ``moma``: shared attention, and a feed-forward layer for each modality.

Shapes: B = batch, S = sequence, D = width of the residual stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from forge_core.contracts.builder import Builder
from forge_core.contracts.model import Initializer, ParameterRole, Recompute, ShardRole
from forge_core.contracts.observation import Site
from forge_plugins_dense.attention import BlockInputs
from forge_plugins_dense.block import Block, generating, sites_within
from forge_plugins_vlm.config import VisionLanguageConfig
from forge_plugins_vlm.fusions.by_modality import PRODUCTS, ByModality
from forge_plugins_vlm.fusions.config import MoMaConfig
from forge_plugins_vlm.fusions.selected import Selected, is_image, limited, selected_sites


class MoMa:
    """Mixture of modality-aware experts (Lin et al. 2024, arXiv 2407.21770): tokens of a modality visit the experts of
    theirs alone, by the router ``expert_choice`` in the paper."""

    def __init__(self, config: MoMaConfig, *, model: VisionLanguageConfig, build: Builder) -> None:
        self._config, self._model, self._build = config, model, build

    def block(self, layer: int) -> nn.Module:
        """Same as ``Fusion.block``."""
        model = self._model
        image = self._build(self._config.image, dim=model.dim, layer=layer, n_layers=model.n_layers)
        return MoMaBlock(model, layer, self._build, image)


class MoMaBlock(Block):
    """A block whose ``feed_forward`` is that of text, with the one of images as ``image_feed_forward``."""

    def __init__(self, config: VisionLanguageConfig, layer: int, build: Builder, image: Any) -> None:
        super().__init__(config, layer, build)
        self.image_feed_forward = image
        self.changed_text, self.changed_image = Selected(), Selected()

    def changed(self, hidden: torch.Tensor, surroundings: BlockInputs, *, generates: bool) -> torch.Tensor:
        """Same as ``Block.changed``."""
        normed, images = self.feed_forward_norm(hidden), is_image(surroundings)
        if order := ByModality.of_dense(images, self.feed_forward, self.image_feed_forward):
            rows = order.fed_forward(order.rows(normed, normed), self.feed_forward, self.image_feed_forward)
            text = image = order.positions(rows)
        else:
            text = self._by(self.feed_forward, normed, limited(surroundings, ~images), generates)
            image = self._by(self.image_feed_forward, normed, limited(surroundings, images), generates)
        changed: torch.Tensor = self.changed_text(text, ~images) + self.changed_image(image, images)
        return changed if self.feed_forward_output_norm is None else self.feed_forward_output_norm(changed)

    def _by(self, layer: Any, normed: torch.Tensor, surroundings: BlockInputs, generates: bool) -> torch.Tensor:
        facts = {name: surroundings.facts[name] for name in getattr(layer, "needs", ())}
        with generating(layer) if generates else nullcontext():
            update: torch.Tensor = layer(normed, surroundings.valid, **facts)
        return update

    @property
    def needs(self) -> frozenset[str]:
        """Same as ``Block.needs``."""
        return super().needs | {"image_slots"} | frozenset(getattr(self.image_feed_forward, "needs", ()))

    def init_weights(self, rng: Initializer, prefix: str, residual_std: float, std: float) -> None:
        super().init_weights(rng, prefix, residual_std, std)
        self.image_feed_forward.init_weights(rng, f"{prefix}image_feed_forward.", residual_std, std)

    def parallel_plan(self) -> dict[str, ShardRole]:
        plan: dict[str, ShardRole] = {
            **super().parallel_plan(),
            "changed_text": "residual",
            "changed_image": "residual",
        }
        for name, role in self.image_feed_forward.parallel_plan().items():
            plan[f"image_feed_forward.{name}" if name else "image_feed_forward"] = role
        return plan

    def recompute_plan(self) -> Mapping[str, Recompute]:
        layer = self.image_feed_forward
        own = layer.recompute_plan() if hasattr(layer, "recompute_plan") else {}
        return {**super().recompute_plan(), **own, **PRODUCTS}

    def parameter_roles(self) -> dict[str, ParameterRole]:
        roles = self.image_feed_forward.parameter_roles()
        return super().parameter_roles() | {f"image_feed_forward.{name}": role for name, role in roles.items()}

    def active_image_parameters(self) -> int:
        """Those of a token of an image, as ``active_parameters`` has those of text (``Fusion.block``)."""
        weights: int = self.attention.active_parameters() + self.image_feed_forward.active_parameters()
        return weights

    def parameter_aliases(self) -> dict[str, list[str]]:
        """Same as ``AliasedModel.parameter_aliases``, of this block."""
        return {"image": ["image_feed_forward.*"]}

    def sites(self) -> dict[str, Site]:
        """Same as ``Block.sites``. What is inside of the feed-forward layers is that of text and of images apart, as
        ``text.mlp_out`` and ``image.mlp_out``, which is zero at positions of the other one."""
        found = super().sites()
        of_text, of_image = (sites_within(name, getattr(self, name)) for name in ("feed_forward", "image_feed_forward"))
        kept = {name: site for name, site in found.items() if name not in (*of_text, "mlp_out")}
        kept |= {f"text.{name}": site for name, site in of_text.items()}
        kept |= {f"image.{name}": site for name, site in of_image.items()}
        return kept | selected_sites("mlp_out", "changed")
