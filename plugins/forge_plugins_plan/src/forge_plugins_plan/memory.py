"""Counts the memory of tensors, real or fake, by what it is for."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_iter

from forge_core.ops.local_tensor import local_tensor

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "logits", "gathered", "temporary")
"""What memory is for:

* ``parameters``: this rank's shards, and buffers;
* ``gradients``: those of this rank's shards, as the optimizer reads them;
* ``optimizer``: its state;
* ``activations``: whatever forward made and has not freed;
* ``logits``: whatever has the vocabulary as its last dimension: logits, their softmax, their gradient;
* ``gathered``: what collectives gather into or reduce from: whole parameters of a unit, and its gradients on their way;
* ``temporary``: whatever else backward and the optimizer make, recomputed activations included.
"""


@attrs.define(eq=False)
class _Storage:
    size: int
    category: str
    birth: int
    """How many changes the ledger had seen when the storage was made."""


class MemoryLedger(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """While it is active, every storage that an operation returns is counted until it is freed.

    What kernels use inside and do not return is not seen. Storages are bytes as asked for: allocators round up.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.phase = "parameters"
        """The category of what is made now, unless an operation says more."""
        self.vocabulary: frozenset[int] = frozenset()
        """Last dimensions that make a tensor count as logits."""
        self._live: dict[int, _Storage] = {}
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._current: Counter[str] = Counter()
        self._changes = 0
        self.restart()

    def restart(self) -> None:
        """Look for the peak from here on."""
        self.peak = sum(self._current.values())
        self._at_peak = Counter(self._current)
        self._peak_at = self._changes
        self.largest = Counter(self._current)
        """The most that each category has had, each at its own time."""

    def at_peak(self, known: Mapping[str, Iterable[torch.Tensor]]) -> dict[str, int]:
        """Bytes by category at the peak, adding up to ``peak``.

        Args:
            known: tensors whose category shows only afterwards (gradients are made by backward like all else), by it.
        """
        found = Counter(self._at_peak)
        for category, tensors in known.items():
            for key in {storage._cdata for tensor in tensors for storage in _storages(tensor)}:
                entry = self._live.get(key)
                if entry is not None and entry.birth <= self._peak_at:
                    found[entry.category] -= entry.size
                    found[category] += entry.size
        return {category: found[category] for category in CATEGORIES}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # a DTensor's operation is seen again as those on its local tensor and its collectives
        if any(is_traceable_wrapper_subclass_type(one) for one in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        gathers = "all_gather" in func.__name__ or func.namespace == "fsdp"
        for tensor in tree_iter((result, args, kwargs) if gathers else result):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor, gathers)
        return result

    def __enter__(self) -> MemoryLedger:
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._resize_and_see()  # type: ignore[method-assign]  # FSDP frees by resizing
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch's
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def _see(self, tensor: torch.Tensor, gathers: bool) -> None:
        for storage in _storages(tensor):
            entry = self._live.get(storage._cdata)
            if entry is None:
                self._add(storage, "gathered" if gathers else self._category(tensor))
            elif gathers and entry.category in ("activations", "temporary"):
                self._change(entry, entry.size, "gathered")

    def _category(self, tensor: torch.Tensor) -> str:
        if tensor.ndim > 1 and tensor.shape[-1] in self.vocabulary and self.phase in ("activations", "optimizer"):
            return "logits"
        if self.phase == "activations" and torch._C._current_graph_task_id() != -1:  # inside backward
            return "temporary"
        return self.phase

    def _add(self, storage: torch.UntypedStorage, category: str) -> None:
        key = storage._cdata
        entry = _Storage(0, category, self._changes)
        self._live[key] = entry
        self._watched[key] = weakref.ref(storage, lambda _: self._forget(key))
        self._change(entry, storage.size(), category)

    def _forget(self, key: int) -> None:
        del self._watched[key]
        entry = self._live.pop(key)
        self._change(entry, 0, entry.category)

    def _change(self, entry: _Storage, size: int, category: str) -> None:
        self._current[entry.category] -= entry.size
        self._current[category] += size
        entry.size, entry.category = size, category
        self._changes += 1
        self.largest[category] = max(self.largest[category], self._current[category])
        total = sum(self._current.values())
        if total > self.peak:
            self.peak, self._at_peak, self._peak_at = total, Counter(self._current), self._changes

    def _resize_and_see(self) -> Any:
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = self._resize(storage, size)
            entry = self._live.get(storage._cdata)
            if entry is None:
                self._add(storage, "gathered")
            else:
                self._change(entry, storage.size(), "gathered")
            return result

        return resize


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Of this rank's parts, a shared storage once."""
    return sum({storage._cdata: storage.size() for tensor in tensors for storage in _storages(tensor)}.values())


def _storages(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    local = local_tensor(tensor)
    if is_traceable_wrapper_subclass_type(type(local)):  # such as a collective that is under way
        names, _ = local.__tensor_flatten__()  # type: ignore[attr-defined]
        return [storage for name in names for storage in _storages(getattr(local, name))]
    try:
        return [local.untyped_storage()]
    except NotImplementedError:  # a tensor without one
        return []
