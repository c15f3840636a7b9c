"""torch.compile, block by block."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from forge_core.contracts.parallel_pass import PassContext
from forge_plugins_parallel.config import CompileConfig


class Compile:
    """Compiles each block in place: blocks of one shape share one graph, and parameter names stay as they are."""

    def __init__(self, config: CompileConfig) -> None:
        self._config = config

    def apply(self, model: nn.Module, context: PassContext) -> tuple[nn.Module, Sequence[str]]:
        touched = []
        for name, block in model.blocks.items():  # type: ignore[union-attr,operator]  # declared by the model
            block.compile(mode=self._config.mode, fullgraph=self._config.fullgraph)
            touched.append(f"blocks.{name}")
        return model, touched
