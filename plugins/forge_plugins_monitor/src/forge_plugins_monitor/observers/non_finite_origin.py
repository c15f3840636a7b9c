"""The origin of a value that is not finite: the first module of the model that has put one out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from forge_core.contracts.callback import RunContext
from forge_core.contracts.model import canonical_name
from forge_core.contracts.observer import BadStep, Observer, Origin
from forge_core.ops.local_tensor import local_tensor
from forge_core.registry.catalog import Catalog

Batch = Mapping[str, torch.Tensor]


class NonFiniteOrigin(Observer):
    """Evaluates the samples of the step once more. Nothing is changed by it."""

    def __init__(self, *, catalog: Catalog) -> None:
        self._catalog = catalog

    def find_origin(self, run: RunContext, bad: BadStep) -> Origin | None:
        """Same as ``Observer.find_origin``: the first of all modules, in the order of the model."""
        for batch in bad.batches:
            own = self._first_in(run, batch, bad.evaluate)
            found = [own] * run.world_size
            if run.world_size > 1:
                dist.all_gather_object(found, own)
            named = [(_index(one[0], bad.parameters), rank, *one) for rank, one in enumerate(found) if one is not None]
            if named:
                index, _, module, kind = min(named)
                return Origin(module, kind, [rank for other, rank, *_ in named if other == index])
        return None

    def _first_in(self, run: RunContext, batch: Batch, evaluate: Callable[[Batch], object]) -> tuple[str, str] | None:
        """On this rank: a module's name, and its class."""
        seen: list[tuple[str, nn.Module, torch.Tensor]] = []
        devices = [run.device] if run.device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"), _watched(run.parts, seen):
            evaluate({name: tensor.to(run.device) for name, tensor in batch.items()})
        if not seen:
            return None
        bad = torch.stack([flag.to(run.device) for _, _, flag in seen]).tolist()
        for (name, module, _), is_bad in zip(seen, bad, strict=True):
            if is_bad:
                return name, self._kind_of(module)
        return None

    def _kind_of(self, module: nn.Module) -> str:
        kind = type(module)
        owner = self._catalog.owner_of(kind.__module__)
        return kind.__qualname__ if owner is None else f"{kind.__qualname__} of {owner}"


@contextmanager
def _watched(parts: Sequence[nn.Module], seen: list[tuple[str, nn.Module, torch.Tensor]]) -> Iterator[None]:
    """In evaluation mode, as every layout can be run without gradients there."""
    training = [part.training for part in parts]
    handles = []
    for part in parts:
        part.eval()
        for name, module in part.named_modules():
            handles.append(module.register_forward_hook(_noting(canonical_name(name), seen)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for part, was_training in zip(parts, training, strict=True):
            part.train(was_training)


def _index(name: str, parameters: Sequence[str]) -> int:
    """In the order of the model's parameters; the model itself comes last, and a module without any where the one
    around it begins."""
    while name:
        for index, parameter in enumerate(parameters):
            if parameter.startswith(f"{name}."):
                return index
        name = name.rpartition(".")[0]
    return len(parameters)


def _noting(name: str, seen: list[tuple[str, nn.Module, torch.Tensor]]) -> Callable[..., None]:
    """A forward hook. Minus infinity is no fault by itself: masks and scores of what cannot be chosen have it."""

    def note(module: nn.Module, _: Any, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                local = local_tensor(leaf)
                seen.append((name, module, ((local != local) | (local == torch.inf)).any()))

    return note
