"""Folders that are no checkpoints, as a warm start reads checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from forge_core.config.builder import ComponentBuilder
from forge_core.config.sections import Job
from forge_core.contracts.weight_source import SourceWeights, WeightSource
from forge_core.distributed.collective_errors import run_on_all_ranks, run_on_rank0
from forge_core.errors import ConfigError
from forge_core.registry.catalog import Catalog
from forge_core.train.initialisation import local_slices


@attrs.frozen
class ForeignWeights:
    """The part of ``Checkpoint`` that a warm start asks for."""

    path: Path
    weights: SourceWeights

    def saved_tensors(self) -> Mapping[str, Any]:
        """Same as ``Checkpoint.saved_tensors``, for the keys alone."""
        return {f"model.{name}": None for name in self.weights.shapes()}

    def state(self) -> Mapping[str, Any]:
        """There is none."""
        return {}

    def refuse_misfits(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Same as ``Checkpoint.refuse_misfits``; dtypes may differ."""
        shapes = self.weights.shapes()
        for key, tensor in tensors.items():
            there, here = tuple(shapes[_name(key)]), tuple(tensor.shape)
            if there != here:
                misfit = f"{key} has shape {here}, there {there}"
                raise ConfigError(f"{self.path} does not fit this model: {misfit}; give the run its [model]")

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Same as ``Checkpoint.load``."""

        @torch.no_grad()
        def read() -> None:
            for key, tensor in tensors.items():
                own: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                own.copy_(self.weights.read(_name(key), local_slices(tensor)))

        run_on_all_ranks(read)


def find_foreign_weights(path: Path, job: Job, catalog: Catalog, say: Callable[[str], None]) -> ForeignWeights | None:
    """The weights in a folder that an installed source recognises. All ranks call it together.

    Raises:
        ConfigError: as ``WeightSource.open``.
    """
    build = ComponentBuilder(catalog)
    for entry in catalog.components("weight_source"):
        source: WeightSource = build(build.resolve("weight_source", entry.qualified_name))
        if run_on_rank0(lambda source=source: source.recognises(path)):  # type: ignore[misc]  # mypy loses the default
            return ForeignWeights(path, source.open(path, job.model, catalog, say))
    return None


def _name(key: str) -> str:
    return key.removeprefix("model.")
