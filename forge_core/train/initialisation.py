"""Same seed, same model, on any mesh: every tensor is filled from a generator named after it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from forge_core.contracts.model import canonical_name
from forge_core.errors import PluginError
from forge_core.ops.local_tensor import local_tensor


def initialise(
    model: nn.Module, seed: int, device: torch.device | None = None, scales: Mapping[str, float] = MappingProxyType({})
) -> None:
    """Fill every parameter and buffer of a materialised model by ``model.init_weights``.

    Args:
        device: where values are drawn, one tensor at a time, since each device draws others; by default where the
            tensor is.
        scales: factors on what tensors are filled with, by name; 1 where there is none.

    Raises:
        PluginError: a parameter or buffer was left out, or filled under a name that is not its own.
    """
    rng = SeededInitializer(seed, device)
    with torch.no_grad():
        model.init_weights(rng)  # type: ignore[operator]  # the contract of a model
        for name, tensor in named_tensors(model):
            if (scale := scales.get(canonical_name(name), 1.0)) != 1:
                tensor.mul_(scale)
    expected = {canonical_name(name): name for name, _ in named_tensors(model)}
    forgotten = sorted(expected.keys() - rng.filled)
    lent = getattr(model, "borrowed", {}).keys()  # a model may fill them, and the executor will again
    unknown = sorted(rng.filled - expected.keys() - lent)
    if forgotten:
        owner = model.get_submodule(expected[forgotten[0]].rpartition(".")[0])
        whose = "" if owner is model else f" or in {type(owner).__qualname__}, whose {forgotten[0]} is"
        raise PluginError(
            f"{type(model).__qualname__}.init_weights leaves {', '.join(forgotten)} uninitialised. This is a bug in "
            f"the model{whose}."
        )
    if unknown:
        raise PluginError(
            f"{type(model).__qualname__}.init_weights fills unknown {', '.join(unknown)}. This is a bug in the model."
        )


def named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers, also non-persistent ones; a tied parameter once, under its first name, and none that
    another part lends."""
    every = (*model.named_parameters(), *model.named_buffers())
    return [(name, tensor) for name, tensor in every if canonical_name(name) not in getattr(model, "borrowed", ())]


class SeededInitializer:
    """The ``Initializer`` of the model contract."""

    def __init__(self, seed: int, device: torch.device | None = None) -> None:
        self._seed = seed
        self._device = device
        self.filled: set[str] = set()

    def fill(self, name: str, tensor: torch.Tensor, fill: Callable[[torch.Tensor, torch.Generator], object]) -> None:
        name = canonical_name(name)
        self.filled.add(name)
        device = self._device or tensor.device
        generator = self._generator(name, device)
        with torch.no_grad():
            if not isinstance(tensor, DTensor) and tensor.device == device:
                fill(tensor, generator)
                return
            full = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            fill(full, generator)  # without communication: every rank computes the same
            local_tensor(tensor).copy_(full[tuple(local_slices(tensor))])

    def fill_each(
        self, name: str, tensor: torch.Tensor, fill: Callable[[torch.Tensor, torch.Generator], object]
    ) -> None:
        name = canonical_name(name)
        self.filled.add(name)
        device = self._device or tensor.device
        (first, *rest), local = local_slices(tensor), local_tensor(tensor)
        with torch.no_grad():
            for index in range(first.start, first.stop):
                full = torch.empty(tensor.shape[1:], dtype=tensor.dtype, device=device)
                fill(full, self._generator(f"{name}.{index}", device))
                local[index - first.start].copy_(full[tuple(rest)])

    def _generator(self, name: str, device: torch.device) -> torch.Generator:
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little"))


def local_slices(like: torch.Tensor) -> list[slice]:
    """Where this rank's part is in the whole tensor."""
    if not isinstance(like, DTensor):
        return [slice(0, size) for size in like.shape]
    for placement in like.placements:
        # FSDP marks with _StridedShard that it cuts what another axis to its right has cut before
        if not isinstance(placement, (Shard, _StridedShard, Replicate)):
            raise PluginError(f"a parameter cannot be initialised with the placement {placement}")
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    starts = [min(start, size) for start, size in zip(offset, like.shape, strict=True)]
    return [slice(start, start + length) for start, length in zip(starts, shape, strict=True)]
