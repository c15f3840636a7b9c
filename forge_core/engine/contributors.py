"""Modules that do something once an optimizer step, found by protocol (``StepContributor``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from forge_core.engine.mesh import DATA_AXES, Mesh


class Contributors:
    """All such modules of this rank's parts of the model."""

    def __init__(self, parts: Sequence[nn.Module], mesh: Mesh) -> None:
        self._mesh = mesh
        self._modules: list[Any] = [  # each an nn.Module and a StepContributor
            module
            for part in parts
            for module in part.modules()
            if hasattr(module, "accumulators") and hasattr(module, "before_optimizer_step")
        ]

    @property
    def are_none(self) -> bool:
        return not self._modules

    @torch.no_grad()
    def forget(self) -> None:
        """Throw away what a step has accumulated that is not to count."""
        for module in self._modules:
            for tensor in module.accumulators().values():
                tensor.zero_()

    @torch.no_grad()
    def before_optimizer_step(self) -> None:
        """Sum all accumulators over the ranks that hold other tokens, in one collective, and hand them out."""
        if not self._modules:
            return
        named = [(module, name, tensor) for module in self._modules for name, tensor in module.accumulators().items()]
        if not named:
            for module in self._modules:
                module.before_optimizer_step({})
            return
        # counts of tokens pass 2**24, where fp32 stops counting; MPS has nothing wider
        wide = torch.float32 if named[0][2].device.type == "mps" else torch.float64
        flat = torch.cat([tensor.reshape(-1).to(wide) for _, _, tensor in named])
        self._mesh.sum_over(flat, (*DATA_AXES, "cp"))
        parts = torch.split(flat, [tensor.numel() for _, _, tensor in named])
        reduced: dict[Any, dict[str, torch.Tensor]] = {module: {} for module in self._modules}
        for (module, name, tensor), part in zip(named, parts, strict=True):
            reduced[module][name] = part.view(tensor.shape).to(tensor.dtype)
            tensor.zero_()
        for module, values in reduced.items():
            module.before_optimizer_step(values)
