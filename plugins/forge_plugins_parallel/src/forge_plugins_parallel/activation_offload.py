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


def offload(blocks: Iterable[nn.Module], device: torch.device, *, last: nn.Module | None = None) -> None:
    """Have blocks keep in the host's memory what they save for backward.

    Copies out and back run beside the computation, on a CUDA stream each, through page-locked memory. A block has the
    time of the next one to copy out; then its memory is free. When backward comes to a block, its activations and those
    of the block before it are on their way. Parameters and buffers stay, and so does what several blocks save, such as
    tables of rotary positions.

    Args:
        device: of the activations. On the CPU they are copied all the same, for tests.
        last: the block after them, which keeps its own. When backward comes to it, those of the block before it are on
            their way, too.
    """
    shared = _Shared(device)
    for block in blocks:
        _Hooks(block, shared, keeps=False)
    if last is not None:
        _Hooks(last, shared, keeps=True)


@attrs.frozen
class _Streams:
    out: Any
    back: Any

    @classmethod
    def of(cls, device: torch.device) -> _Streams | None:
        return cls(torch.cuda.Stream(device), torch.cuda.Stream(device)) if device.type == "cuda" else None  # type: ignore[no-untyped-call]  # torch's


class _Shared:
    """What the blocks of a model know of each other."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.streams = device, _Streams.of(device)
        self.last: weakref.ref[_Visit] | None = None
        """The visit before."""
        self._savers: dict[StorageWeakRef, weakref.ref[_Visit]] = {}

    def is_saved_elsewhere(self, storage: StorageWeakRef, visit: _Visit) -> bool:
        """Return whether an earlier block, or an earlier forward of this one, has saved it and it still lives."""
        self._savers = {known: saver for known, saver in self._savers.items() if not known.expired()}  # type: ignore[no-untyped-call]  # torch's
        return self._savers.setdefault(storage, weakref.ref(visit))() is not visit


class _Hooks:
    """Those of one block."""

    def __init__(self, block: nn.Module, shared: _Shared, *, keeps: bool) -> None:
        self._block, self._shared, self._keeps = block, shared, keeps
        self._active: list[tuple[_Visit, saved_tensors_hooks]] = []
        block.register_forward_pre_hook(torch.compiler.disable(self._enter))  # type: ignore[no-untyped-call]  # torch's
        block.register_forward_hook(torch.compiler.disable(self._leave), always_call=True)  # type: ignore[no-untyped-call]  # torch's

    def _enter(self, *_: Any) -> None:
        own = {
            local_tensor(one).untyped_storage()._cdata for one in (*self._block.parameters(), *self._block.buffers())
        }
        visit = _Visit(self._shared, own)
        context = saved_tensors_hooks(_as_it_is if self._keeps else visit.pack, visit.unpack)
        context.__enter__()
        self._active.append((visit, context))

    def _leave(self, *_: Any) -> None:
        visit, context = self._active.pop()
        context.__exit__(None, None, None)
        visit.free_before()


class _Visit:
    """One forward of one block, and what it has saved."""

    def __init__(self, shared: _Shared, own: set[int]) -> None:
        self._shared, self._own = shared, own
        self._before, shared.last = shared.last, weakref.ref(self)
        self._kept: dict[StorageWeakRef, weakref.ref[_Kept]] = {}
        self._is_coming_back = False

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _Packed:
        kept = self._on_host(tensor)
        return _as_it_is(tensor) if kept is None else _Packed(kept, tensor)

    def unpack(self, packed: torch.Tensor | _Packed) -> torch.Tensor:
        self._copy_back()
        if (before := self._block_before()) is not None:
            before._copy_back()
        if isinstance(packed, torch.Tensor):
            return packed
        return packed.kept.on_device().view(packed.dtype).as_strided(*packed.form)

    def free_before(self) -> None:
        """Free what the block before has saved, unless backward has come to it."""
        before = self._block_before()
        if before is not None and not before._is_coming_back:
            for kept in before._alive():
                kept.free()

    def _on_host(self, tensor: torch.Tensor) -> _Kept | None:
        if not _is_a_view_of_bytes(tensor) or tensor.device.type != self._shared.device.type:
            return None
        whole = tensor.untyped_storage()
        name = StorageWeakRef(whole)  # type: ignore[no-untyped-call]  # torch's
        is_small = whole.nbytes() < SMALLEST
        if is_small or whole._cdata in self._own or self._shared.is_saved_elsewhere(name, self):
            return None
        kept = self._kept[name]() if name in self._kept else None
        if kept is None:
            kept = _Kept(tensor, self._shared.streams)
            self._kept[name] = weakref.ref(kept)
        return kept

    def _block_before(self) -> _Visit | None:
        return self._before() if self._before is not None else None

    def _copy_back(self) -> None:
        if self._is_coming_back:
            return
        self._is_coming_back = True
        for kept in reversed(self._alive()):  # the last that was saved is wanted first
            kept.copy_back()

    def _alive(self) -> list[_Kept]:
        return [kept for reference in self._kept.values() if (kept := reference()) is not None]


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that stays. What made it would hold itself by the tensor as such, and stay for ever."""
    return tensor if tensor.is_leaf else tensor.detach()


def _is_a_view_of_bytes(tensor: torch.Tensor) -> bool:
    """Return whether its dtype, shape and strides say all about a tensor that its bytes do not."""
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter, FakeTensor) and tensor.layout is torch.strided
    return is_plain and not tensor.is_conj() and not tensor.is_neg()


class _Packed:
    """What autograd holds in place of a tensor."""

    def __init__(self, kept: _Kept, tensor: torch.Tensor) -> None:
        self.kept, self.dtype = kept, tensor.dtype
        self.form = (tensor.shape, tensor.stride(), tensor.storage_offset())


class _Kept:
    """The bytes of a storage: on the device until they are freed there, on the host until they are copied back.

    ``record_stream`` would free them without a wait. But then memory can be used again only once the GPU is done with
    it, not in the order of what it is asked for, and a host that is ahead of the GPU takes more and more.
    """

    def __init__(self, tensor: torch.Tensor, streams: _Streams | None) -> None:
        self._device, self._streams = tensor.device, streams
        self._bytes: torch.Tensor | None
        self._host: torch.Tensor | None
        self._computing: Any = None
        self._has_left: Any = None
        self._has_arrived: Any = None
        self._size = tensor.untyped_storage().nbytes()
        if isinstance(tensor, FakeTensor):  # a plan counts memory, of which the host's is none
            self._bytes, self._host = tensor.detach(), None
            return
        whole = torch.empty(0, dtype=torch.uint8, device=self._device).set_(tensor.untyped_storage())
        self._bytes, self._host = whole, self._copied_out(whole)

    def free(self) -> None:
        if self._has_left is not None:
            torch.cuda.current_stream(self._device).wait_event(self._has_left)
        self._bytes = None

    def copy_back(self) -> None:
        if self._bytes is not None:  # backward has come before it was freed
            return
        self._bytes = torch.empty(self._size, dtype=torch.uint8, device=self._device)
        if self._host is None:
            return
        if self._streams is None:
            self._bytes.copy_(self._host)
            return
        back, self._computing = self._streams.back, torch.cuda.current_stream(self._device)
        back.wait_stream(self._computing)  # which may have used this memory before
        with torch.cuda.stream(back):
            self._bytes.copy_(self._host, non_blocking=True)
        self._has_arrived = back.record_event()

    def on_device(self) -> torch.Tensor:
        assert self._bytes is not None, "its block has not been brought back"
        if self._has_arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(self._has_arrived)
        return self._bytes

    def __del__(self) -> None:
        """Memory that nothing has read is not used again either before the copy into it is done."""
        if self._has_arrived is not None:
            self._computing.wait_event(self._has_arrived)

    def _copied_out(self, whole: torch.Tensor) -> torch.Tensor:
        if self._streams is None:
            return whole.clone()
        host = torch.empty(self._size, dtype=torch.uint8, pin_memory=True)
        out = self._streams.out
        out.wait_stream(torch.cuda.current_stream(self._device))  # which computes it
        with torch.cuda.stream(out):
            host.copy_(whole, non_blocking=True)
        self._has_left = out.record_event()
        return host
