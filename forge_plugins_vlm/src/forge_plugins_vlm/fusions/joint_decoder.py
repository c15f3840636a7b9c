"""The fusion ``joint_decoder``: image tokens are tokens."""

from __future__ import annotations

from torch import nn

from forge_core.contracts.builder import Builder
from forge_plugins_dense.block import Block
from forge_plugins_vlm.config import VisionLanguageConfig
from forge_plugins_vlm.fusions.config import JointDecoderConfig


class JointDecoder:
    """Image tokens stand in the residual stream, and the blocks are the decoder's own (LLaVA, Liu et al. 2023,
    arXiv 2304.08485)."""

    def __init__(self, config: JointDecoderConfig, *, model: VisionLanguageConfig, build: Builder) -> None:
        self._model, self._build = model, build

    def block(self, layer: int) -> nn.Module:
        """Same as ``Fusion.block``."""
        return Block(self._model, layer, self._build)
