"""Counts the memory of tensors, real or fake, by what it is for."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import attrs
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_iter

from forge_core.ops.local_tensor import local_tensor
from forge_plugins_plan.operations import asked
from forge_plugins_plan.timeline import Change, Tally
from forge_plugins_plan.work import Recorder

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "logits", "gathered", "temporary")
"""What memory is for:

* ``parameters``: this rank's shards, and buffers;
* ``gradients``: those of this rank's shards, as the optimizer reads them;
* ``optimizer``: its state;
* ``activations``: what forward made and has not freed;
* ``logits``: what has the vocabulary as its last dimension: logits, their softmax, their gradient;
* ``gathered``: what collectives gather into or reduce from: whole parameters of a unit, and its gradients on their way;
* ``temporary``: what else backward and the optimizer make, recomputed activations included.
"""


_DEVICE = torch.ops.prim.device.default
_wraps = functools.cache(is_traceable_wrapper_subclass_type)


@attrs.define(eq=False)
class Storage:
    """Memory that has been seen."""

    size: int
    category: str
    birth: int
    """Its place in the log, or one of these."""
    freed: int | None = None
    """The place in the log, if it has been."""


_BEFORE = -1
"""It was made before the log began."""
_UNSEEN = -2
"""It stands for something that is in no log."""


@attrs.frozen(eq=False)
class StandIn:
    """The form of a tensor that has been seen."""

    form: torch.Tensor
    entry: Storage
    size: int
    """Bytes of its storage when it was seen."""


class MemoryLedger(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """While it is active, every storage that an operation returns is noted, and when it is freed.

    What kernels use inside and do not return is not seen. Storages are bytes as asked for: allocators round up.
    """

    def __init__(self, recorder: Recorder | None = None) -> None:
        """
        Args:
            recorder: makes entries of the log of what operations do, beside what they do to memory.
        """
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.recorder = recorder
        self.phase = "parameters"
        """The part of a build or a step that runs."""
        self._makes = self.phase
        """The category of what is made now, unless an operation says more."""
        self.vocabulary: frozenset[int] = frozenset()
        """Last dimensions that make a tensor count as logits."""
        self.log: list[Any] = []
        """``Change`` and ``Work`` since ``restart``, and what else is put there to mark a place."""
        self.freed: dict[int, int] = {}
        """The places in the log where storages are freed, by the places where they have been made."""
        self._at_start: Counter[str] = Counter()
        self._live: dict[int, Storage] = {}
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._equal: dict[Any, Any] = {}

    def restart(self) -> None:
        """Begin the log."""
        self.log.clear()
        self.freed.clear()
        self._at_start.clear()
        for entry in self._live.values():
            entry.birth = _BEFORE
            self._at_start[entry.category] += entry.size

    def start(self, known: Mapping[str, Iterable[torch.Tensor]]) -> Tally:
        """What was there when the log began.

        Args:
            known: tensors whose category shows only afterwards, by it.
        """
        tally = Tally(Counter(self._at_start))
        for category, entry in self._entries(known):
            if entry.birth == _BEFORE:
                tally.known[entry.category] -= entry.size
                tally.known[category] += entry.size
        tally.restart()
        return tally

    def resolve(self, known: Mapping[str, Iterable[torch.Tensor]]) -> None:
        """Note in the log what tensors are for that show it only now (gradients are made by backward like all else)."""
        for category, entry in self._entries(known):
            if entry.birth >= 0:
                made = self.log[entry.birth]
                self.log[entry.birth] = made._replace(
                    known_as=category, known_size=entry.size, category_then=entry.category
                )

    def stand_in(self, tensor: torch.Tensor) -> StandIn:
        """The form of a tensor, and what becomes of it."""
        (entry,) = self.storages([tensor])
        with self.paused():
            return StandIn(torch.empty_like(tensor), entry, entry.size)

    def category(self, tensor: torch.Tensor) -> str:
        """What a tensor is for, as far as it has shown."""
        return self.storages([tensor])[0].category

    def storages(self, tensors: Iterable[torch.Tensor]) -> list[Storage]:
        """What has been seen of them, each once."""
        return [entry for _, entry in self._entries({"": tensors})]

    def again(self, like: StandIn) -> torch.Tensor:
        """Make a tensor as one that has been seen. That it is made is not noted; when it is freed is."""
        with self.paused():
            tensor = torch.empty_like(like.form)
        self.adopt(tensor, like.entry.category, like.size)
        return tensor

    def adopt(self, tensor: torch.Tensor, category: str, size: int | None = None) -> None:
        """See when ``tensor`` is freed. It counts as having been made in this category, which is not noted."""
        for storage in _storages(tensor):
            self._watch(storage, Storage(storage.size() if size is None else size, category, _UNSEEN))

    @contextmanager
    def unnoted(self, storages: Iterable[Storage]) -> Iterator[None]:
        """Where these are freed meanwhile, it is not noted."""
        sizes = {storage: storage.size for storage in storages}
        for storage in sizes:
            storage.size = 0
        yield
        for storage, size in sizes.items():
            storage.size = size

    def _entries(self, known: Mapping[str, Iterable[torch.Tensor]]) -> Iterator[tuple[str, Storage]]:
        for category, tensors in known.items():
            for key in {storage._cdata: None for tensor in tensors for storage in _storages(tensor)}:
                if key in self._live:
                    yield category, self._live[key]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch's: not to switch Dynamo off and on with each operation, as nothing is compiled here."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:  # most of what is called
            return args[0].device
        if func.namespace in ("prim", "profiler"):
            with torch._C._DisableTorchDispatch() if func.namespace == "profiler" else nullcontext():
                return func(*args, **(kwargs or {}))
        # a DTensor's operation is seen again as those on its local tensor and its collectives
        if any(map(_wraps, types)):
            return NotImplemented
        kwargs = kwargs or {}
        of_form, result = asked(func, args, kwargs)
        # in a forward or backward, what tensor and context parallelism gather are activations
        gathers = func.namespace == "fsdp" or ("all_gather" in func.__name__ and self.phase != "activations")
        for tensor in tree_iter((result, args, kwargs) if gathers else result):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor, gathers)
        if self.recorder is not None:
            for work in self.recorder.works(func, args, kwargs, result, self.phase, of_form):
                self.log.append(self._equal.setdefault(work, work))
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
    def paused(self) -> Iterator[None]:
        """What is made meanwhile is not seen."""
        before, self._see = self._see, lambda *_: None  # type: ignore[method-assign]
        recorder, self.recorder = self.recorder, None
        try:
            yield
        finally:
            self._see, self.recorder = before, recorder  # type: ignore[method-assign]

    @contextmanager
    def during(self, phase: str, *, makes: str = "") -> Iterator[None]:
        """
        Args:
            makes: the category of what is made, by default the phase.
        """
        before, self.phase, self._makes = (self.phase, self._makes), phase, makes or phase
        try:
            yield
        finally:
            self.phase, self._makes = before

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
        return self._makes

    def _add(self, storage: torch.UntypedStorage, category: str) -> None:
        entry = Storage(0, category, len(self.log))
        self._watch(storage, entry)
        self._change(entry, storage.size(), category)

    def _watch(self, storage: torch.UntypedStorage, entry: Storage) -> None:
        key = storage._cdata
        self._live[key] = entry
        self._watched[key] = weakref.ref(storage, lambda _: self._forget(key))

    def _forget(self, key: int) -> None:
        del self._watched[key]
        entry = self._live.pop(key)
        entry.freed = len(self.log)
        if entry.size > 0:
            if entry.birth >= 0:
                self.freed[entry.birth] = entry.freed
            self._change(entry, 0, entry.category)

    def _change(self, entry: Storage, size: int, category: str) -> None:
        change = Change(entry.category, entry.size, category, size)
        self.log.append(self._equal.setdefault(change, change))  # few are unlike all others
        entry.size, entry.category = size, category

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
