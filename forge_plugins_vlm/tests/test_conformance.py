"""The model passes its contract's kit with each fusion."""

from __future__ import annotations

from typing import Any, ClassVar

import small_vlm
import torch
from small_vlm import FUSIONS, SMALL, images

from forge_plugins_vlm.contracts.entries import ENTRIES
from forge_testing.model import ModelConformance
from forge_testing.package import PluginConformance


class TestPlugin(PluginConformance):
    dist = "forge-plugins-vlm"


class _OfFusion:
    component = "vision_language"
    fusion: ClassVar[str]
    entries = {name: ENTRIES[name] for name in ("pixels", "image_slots", "image_range")}
    layouts = ("tIttttttt", "tttIttttt")

    def batch(self) -> dict[str, torch.Tensor]:
        rows = [small_vlm.entries(self.fusion, layout) for layout in self.layouts]
        found = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
        generator = torch.Generator().manual_seed(0)
        tokens, targets = (torch.randint(61, (2, 12), generator=generator) for _ in range(2))
        targets[:, -2:] = -100
        return {"tokens": tokens, "targets": targets, **found, "pixels": images(2)}

    def gradients_need(self, model: Any) -> dict[str, torch.Tensor]:
        for name, gate in model.named_parameters():
            if name.endswith("_gate.weight"):
                gate.data.fill_(0.5)
        return super().gradients_need(model)


class TestJointDecoder(_OfFusion, ModelConformance):
    fusion, config = "joint_decoder", SMALL | FUSIONS["joint_decoder"]


class TestCrossAttention(_OfFusion, ModelConformance):
    fusion, config = "cross_attention", SMALL | FUSIONS["cross_attention"]
    layouts = ("tItttttttttt", "tttItttttttt")


class TestMixtureOfTransformers(_OfFusion, ModelConformance):
    fusion, config = "mixture_of_transformers", SMALL | FUSIONS["mixture_of_transformers"]


class TestMoMa(_OfFusion, ModelConformance):
    fusion, config = "moma", SMALL | FUSIONS["moma"]
