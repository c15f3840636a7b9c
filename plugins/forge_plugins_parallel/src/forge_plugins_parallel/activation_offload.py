"""Activations in the host's memory: what a block keeps for backward waits there, and comes back before it is needed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import attrs
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from forge_core.ops.local_tensor import local_tensor

SMALLEST = 2**20
"""Bytes below which a tensor stays: copies of many small ones cost more time than they save memory."""


def offload(blocks: Iterable[nn.Module], device: torch.device) -> None:
    """Have blocks keep in the host's memory what they save for backward.

    Copies out and back run beside the computation, on a CUDA stream each, through page-locked memory. When backward
    comes to a block, its activations and those of the block before it are on their way. Parameters and buffers stay,
    and so does what several blocks save, such as tables of rotary positions.

    Args:
        device: of the activations. On the CPU they are copied all the same, for tests.
    """
    shared = _Shared(device)
    for block in blocks:
        hooks = _Hooks(block, shared)
        block.register_forward_pre_hook(torch.compiler.disable(hooks.enter))
        block.register_forward_hook(torch.compiler.disable(hooks.leave), always_call=True)


@attrs.frozen
class _Streams:
    out: Any
    back: Any

    @classmethod
    def of(cls, device: torch.device) -> _Streams | None:
        return cls(torch.cuda.Stream(device), torch.cuda.Stream(device)) if device.type == "cuda" else None


class _Shared:
    """What the blocks of a model know of each other."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.streams = device, _Streams.of(device)
        self.last: weakref.ref[_Visit] | None = None
        """The visit before."""
        self._savers: dict[StorageWeakRef, weakref.ref[_Visit]] = {}

    def is_saved_elsewhere(self, storage: StorageWeakRef, visit: _Visit) -> bool:
        """Return whether an earlier block, or an earlier forward of this one, has saved it and it still lives."""
        self._savers = {known: saver for known, saver in self._savers.items() if not known.expired()}
        return self._savers.setdefault(storage, weakref.ref(visit))() is not visit


class _Hooks:
    """Those of one block."""

    def __init__(self, block: nn.Module, shared: _Shared) -> None:
        self._block, self._shared = block, shared
        self._active: list[saved_tensors_hooks] = []

    def enter(self, *_: Any) -> None:
        own = {
            local_tensor(one).untyped_storage()._cdata for one in (*self._block.parameters(), *self._block.buffers())
        }
        visit = _Visit(self._shared, own)
        context = saved_tensors_hooks(visit.pack, _unpack)
        context.__enter__()
        self._active.append(context)

    def leave(self, *_: Any) -> None:
        self._active.pop().__exit__(None, None, None)


class _Visit:
    """One forward of one block, and what it has saved."""

    def __init__(self, shared: _Shared, own: set[int]) -> None:
        self._shared, self._own = shared, own
        self._before, shared.last = shared.last, weakref.ref(self)
        self._kept: dict[StorageWeakRef, weakref.ref[_Kept]] = {}
        self._is_coming_back = False

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _Packed:
        kept = self._on_host(tensor)
        return _as_it_is(tensor) if kept is None else _Packed(kept, self, tensor)

    def _on_host(self, tensor: torch.Tensor) -> _Kept | None:
        if not _is_a_view_of_bytes(tensor) or tensor.device.type != self._shared.device.type:
            return None
        whole = tensor.untyped_storage()
        name = StorageWeakRef(whole)
        is_small = whole.nbytes() < SMALLEST
        if is_small or whole._cdata in self._own or self._shared.is_saved_elsewhere(name, self):
            return None
        kept = self._kept[name]() if name in self._kept else None
        if kept is None:
            kept = _Kept(tensor, self._shared.streams)
            self._kept[name] = weakref.ref(kept)
        return kept

    def come_back(self) -> None:
        """Begin to copy what this block has saved, and what the one before it has, unless that has begun."""
        self._copy_back()
        before = self._before() if self._before is not None else None
        if before is not None:
            before._copy_back()

    def _copy_back(self) -> None:
        if self._is_coming_back:
            return
        self._is_coming_back = True
        for reference in self._kept.values():
            kept = reference()
            if kept is not None:
                kept.copy_back()


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that stays. What made it would hold itself by the tensor as such, and stay for ever."""
    return tensor if tensor.is_leaf else tensor.detach()


def _is_a_view_of_bytes(tensor: torch.Tensor) -> bool:
    """Return whether its dtype, shape and strides say all about a tensor that its bytes do not."""
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter, FakeTensor) and tensor.layout is torch.strided
    return is_plain and not tensor.is_conj() and not tensor.is_neg()


class _Packed:
    """What autograd holds in place of a tensor."""

    def __init__(self, kept: _Kept, visit: _Visit, tensor: torch.Tensor) -> None:
        self.kept, self.visit, self.dtype = kept, visit, tensor.dtype
        self.form = (tensor.shape, tensor.stride(), tensor.storage_offset())


def _unpack(packed: torch.Tensor | _Packed) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    packed.visit.come_back()
    return packed.kept.on_device().view(packed.dtype).as_strided(*packed.form)


class _Kept:
    """The bytes of a storage, on the host until they are copied back."""

    def __init__(self, tensor: torch.Tensor, streams: _Streams | None) -> None:
        self._device, self._streams = tensor.device, streams
        self._size = tensor.untyped_storage().nbytes()
        self._host = None if isinstance(tensor, FakeTensor) else self._copied_out(tensor)
        self._restored: torch.Tensor | None = None
        self._has_arrived: Any = None

    def copy_back(self) -> None:
        self._restored = torch.empty(self._size, dtype=torch.uint8, device=self._device)
        if self._host is None:  # a plan counts memory, of which the host's is none
            return
        if self._streams is None:
            self._restored.copy_(self._host)
            return
        back = self._streams.back
        back.wait_stream(torch.cuda.current_stream(self._device))  # which may have used this memory before
        back.wait_stream(self._streams.out)
        with torch.cuda.stream(back):
            self._restored.copy_(self._host, non_blocking=True)
        self._restored.record_stream(back)
        self._has_arrived = back.record_event()

    def on_device(self) -> torch.Tensor:
        assert self._restored is not None, "its block has not been brought back"
        if self._has_arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(self._has_arrived)
        return self._restored

    def _copied_out(self, tensor: torch.Tensor) -> torch.Tensor:
        whole = torch.empty(0, dtype=torch.uint8, device=self._device).set_(tensor.untyped_storage())
        if self._streams is None:
            return whole.clone()
        host = torch.empty(self._size, dtype=torch.uint8, pin_memory=True)
        out = self._streams.out
        out.wait_stream(torch.cuda.current_stream(self._device))  # which computes it
        with torch.cuda.stream(out):
            host.copy_(whole, non_blocking=True)
        whole.record_stream(out)  # its memory is used anew when the copy is done
        return host
