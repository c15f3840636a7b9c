"""Where in a model values stop being finite: one further forward, in which the output of every module is looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from forge_core.contracts.model import canonical_name
from forge_core.data.loader import BatchLoader
from forge_core.registry.catalog import Catalog
from forge_core.train.build import BuiltModel


@attrs.frozen
class Origin:
    """The module whose output was the first that was not finite."""

    module: str
    """Qualified name; empty for the model itself, which then computes such a loss from finite logits."""
    type: str
    """Its class, and the plugin that has it."""
    ranks: Sequence[int]

    def __str__(self) -> str:
        return f"{self.module or 'the model and its loss'} ({self.type})"


@attrs.frozen
class Examination:
    """All ranks call it at the same step."""

    model: BuiltModel
    catalog: Catalog
    loader: BatchLoader
    device: torch.device

    def __call__(self, start: int) -> Origin | None:
        """Evaluate the samples of the step that starts at position ``start``. Nothing is changed by it.

        Returns:
            The first of all modules, in the order of the model, or nothing if all outputs are finite; the same on all
            ranks.
        """
        for batch in self.loader.step_at(start):
            on_device = {name: tensor.to(self.device) for name, tensor in batch.items()}
            own = self._first_in(on_device)
            found = [own] * dist.get_world_size()
            if dist.get_world_size() > 1:
                dist.all_gather_object(found, own)
            named = [(self._place(one[0]), rank, *one) for rank, one in enumerate(found) if one is not None]
            if named:
                place, _, module, kind = min(named)
                return Origin(module, kind, [rank for other, rank, *_ in named if other == place])
        return None

    def _first_in(self, batch: dict[str, torch.Tensor]) -> tuple[str, str] | None:
        """On this rank: a module's name, and its class."""
        seen: list[tuple[str, nn.Module, torch.Tensor]] = []
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"), self._watched(seen):
            self.model.executor.evaluate(batch)
        if not seen:
            return None
        bad = torch.stack([flag.to(self.device) for _, _, flag in seen]).tolist()
        for (name, module, _), is_bad in zip(seen, bad, strict=True):
            if is_bad:
                return name, self._kind_of(module)
        return None

    @contextmanager
    def _watched(self, seen: list[tuple[str, nn.Module, torch.Tensor]]) -> Iterator[None]:
        """In evaluation mode, as every layout can be run without gradients there."""
        training = [part.training for part in self.model.parts]
        handles = []
        for part in self.model.parts:
            part.eval()
            for name, module in part.named_modules():
                handles.append(module.register_forward_hook(_noting(canonical_name(name), seen)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for part, was_training in zip(self.model.parts, training, strict=True):
                part.train(was_training)

    def _kind_of(self, module: nn.Module) -> str:
        kind = type(module)
        owner = self.catalog.owner_of(kind.__module__)
        return kind.__qualname__ if owner is None else f"{kind.__qualname__} of {owner}"

    def _place(self, name: str) -> int:
        """In the order of the model's parameters; the model itself comes last, and a module without any where the one
        around it begins."""
        while name:
            for place, parameter in enumerate(self.model.roles):
                if parameter.startswith(f"{name}."):
                    return place
            name = name.rpartition(".")[0]
        return len(self.model.roles)


def _noting(name: str, seen: list[tuple[str, nn.Module, torch.Tensor]]) -> Callable[..., None]:
    """A forward hook. Minus infinity is no fault by itself: masks and scores of what cannot be chosen have it."""

    def note(module: nn.Module, _: Any, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                local = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
                seen.append((name, module, ((local != local) | (local == torch.inf)).any()))

    return note
