"""What the operations of a step ask of a machine: products, attention, bytes that are read and written, collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

PRODUCT, ATTENTION, MEMORY = "product", "attention", "memory"
ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, ALL_TO_ALL = "all_gather", "reduce_scatter", "all_reduce", "all_to_all"
SEND, RECEIVE = "send", "receive"

COLLECTIVES = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, ALL_TO_ALL)


class Work(NamedTuple):
    """One operation. Equal ones take equally long."""

    kind: str
    during: str = ""
    """The phase of the ledger: ``activations`` is forward and backward."""
    dtype: str = ""
    """Of the first tensor, as torch names it."""
    flops: float = 0.0
    """Of attention over the whole square, masked or not."""
    size: int = 0
    """Bytes that it reads and writes; of a collective those of the whole tensor, which its ranks share."""
    shape: tuple[int, ...] = ()
    """Of a product ``(batch, m, n, k)``, of attention ``(queries, keys, width of a head)``."""
    form: str = ""
    """Of a product ``straight``, or ``across`` if its first factor is transposed; of attention ``causal`` or ``whole``,
    with ``, backward``; of what takes the memory's time ``math``, ``index``, ``strided`` or ``plain``."""
    ranks: int = 1
    """Of a collective's group."""
    ranks_of_node: int = 1
    """Of these, how many share a node."""
    peer: int = -1
    """The rank of the group that is sent to or received from."""
    number: int = -1
    """Of what is received from that rank, the how manieth it is, from 0."""
    overlaps: bool = False
    """Whether a collective runs beside what is computed: FSDP's do, on a GPU. Of other work, whether it waits for what
    has been gathered."""


class Microbatch(NamedTuple):
    """In a log: here the forward of a microbatch begins."""

    number: int


class Recorder:
    """Makes ``Work`` of the operations that a dispatch mode sees."""

    def __init__(self, ranks_per_node: int) -> None:
        self._ranks_per_node = ranks_per_node
        self._groups: dict[str, tuple[int, int]] = {}
        self._of_fsdp = False
        """Whether the next collective is one of FSDP's, which copies into a buffer before it."""
        self._received: Counter[int] = Counter()
        self._unread: WeakKeyDictionary[torch.UntypedStorage, Work] = WeakKeyDictionary()
        """What has been asked of other ranks, by the storage into which it comes. Some of it is never read: of a first
        exchange, by which torch's schedules make their connections."""

    def works(
        self,
        func: Any,
        args: Any,
        kwargs: Mapping[str, Any],
        result: Any,
        during: str,
        known: dict[str, Work | None] | None = None,
    ) -> Iterator[Work]:
        """What ``func`` is to be charged with; nothing for a view, or what only asks. What it reads and another rank
        sends comes first: a pipeline asks for it early, and waits when it needs it.

        Args:
            known: what it has been charged with on arguments of the same form, by ``during``.
        """
        one = self._work(func, args, kwargs, result, during, {} if known is None else known)
        if one is None:
            return
        if one.kind == RECEIVE:
            numbered = one._replace(number=self._received[one.peer])
            self._received[one.peer] += 1
            self._unread.update((tensor.untyped_storage(), numbered) for tensor in args[0])
            return
        if self._unread and one.kind != SEND:
            for tensor in tree_iter((args, kwargs)):
                if isinstance(tensor, torch.Tensor) and (key := tensor.untyped_storage()) in self._unread:
                    yield self._unread.pop(key)
        yield one

    def unread(self, tensors: Iterable[torch.Tensor]) -> list[Work]:
        """What has been asked of other ranks and not been read yet, of what comes into these tensors."""
        return [work for one in tensors if (work := self._unread.get(one.untyped_storage())) is not None]

    def read(self, works: Iterable[Work]) -> None:
        """Note that these of what was ``unread`` have been read."""
        keys = {work: key for key, work in self._unread.items()}
        for work in works:
            del self._unread[keys[work]]

    def _work(
        self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any, during: str, known: dict[str, Work | None]
    ) -> Work | None:
        namespace, name = func.namespace, func.overloadpacket.__name__
        if namespace in ("c10d", "_c10d_functional"):
            return self._collective(func, args, kwargs, result, during)
        if namespace in _UNCHARGED or getattr(func, "is_view", False) or name in _FREE:
            return None
        if namespace == "fsdp":
            self._of_fsdp |= name in _BEFORE_COLLECTIVES
        else:
            self._of_fsdp &= during == "activations" and name in _BESIDE_COLLECTIVES
        if during not in known:
            known[during] = _charged(func, args, kwargs, result, during)
        return known[during]

    def _collective(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any, during: str) -> Work | None:
        kind = next((kind for part, kind in _KINDS.items() if part in func.__name__), None)
        group = self._group(func, args, kwargs)
        if kind is None or group is None:
            return None
        given = [one for one in tree_iter((args, kwargs)) if isinstance(one, torch.Tensor)]
        made = [one for one in tree_iter(result) if isinstance(one, torch.Tensor)] if kind == ALL_GATHER else []
        size = max(map(_bytes, (*given, *made)), default=0)
        if kind == ALL_REDUCE or kind in (SEND, RECEIVE):
            size = sum(map(_bytes, given))
        of_fsdp, self._of_fsdp = self._of_fsdp, self._of_fsdp and kind == REDUCE_SCATTER  # HSDP's sum is behind it
        peer = int(args[2]) if kind in (SEND, RECEIVE) else -1
        dtype = _name(given[0].dtype) if given else ""
        return Work(kind, during, dtype, 0.0, size, (), "", *group, peer, overlaps=of_fsdp and peer < 0)

    def _group(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> tuple[int, int] | None:
        """How many ranks it has, and how many of them are in this rank's node; nothing if it has one."""
        for place, argument in enumerate(func._schema.arguments):
            if argument.name in ("process_group", "group_name"):
                given = args[place] if place < len(args) else kwargs.get(argument.name)
                group = _group_of(given)
                name = group.group_name
                if name not in self._groups:
                    ranks, node = dist.get_process_group_ranks(group), dist.get_rank() // self._ranks_per_node
                    self._groups[name] = len(ranks), sum(rank // self._ranks_per_node == node for rank in ranks)
                return self._groups[name] if self._groups[name][0] > 1 else None
        return None


def _charged(func: Any, args: Any, kwargs: Mapping[str, Any], result: Any, during: str) -> Work | None:
    """What an operation on this rank alone takes."""
    packet, name = func.overloadpacket, func.overloadpacket.__name__
    tensors = [one for one in tree_iter((args, kwargs)) if isinstance(one, torch.Tensor)]
    made = [one for one in tree_iter(result) if isinstance(one, torch.Tensor)]
    if not tensors and not made:
        return None
    written = _mutated(func, args, kwargs) or made
    overwritten = written if name in _OVERWRITING else []
    read = {id(one): _bytes(one) for one in tensors if all(one is not other for other in overwritten)}
    if name == "all_gather_copy_in":  # it is given the whole buffer, and writes its own part of it
        written = [one for one in tensors if one.numel() and one is not args[1]]
    size = sum(read.values()) + sum(_bytes(one) for one in written)
    first = next((one for one in tensors if one.is_floating_point()), (made or tensors)[0])
    base = Work(MEMORY, during, _name(first.dtype), 0.0, size)
    formula = _FORMULAS.get(packet) or flop_registry.get(packet)
    if formula is None:
        waits = func.namespace == "fsdp" and name == "split_with_sizes_copy"
        return base._replace(form=_form(name, tensors), overlaps=waits)
    flops = float(formula(*args, **kwargs, out_val=result))
    if "attention" in name:
        return base._replace(kind=ATTENTION, flops=flops, **_attention(func, args, kwargs))
    first, second = tensors[-2:] if name in _ADDING else (tensors + tensors)[:2]
    form = "across" if first.ndim > 1 and first.stride(-1) != 1 else "straight"
    return base._replace(kind=PRODUCT, flops=flops, shape=_product_shape(first, second, flops), form=form)


def _group_of(given: Any) -> dist.ProcessGroup:
    """By its name, or as operations pass it on."""
    if isinstance(given, str):
        return distributed_c10d._resolve_process_group(given)  # type: ignore[attr-defined,arg-type]  # torch's
    return dist.ProcessGroup.unbox(given)


_UNCHARGED = ("prim", "profiler")
_FREE = (
    *("detach", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "alias"),
    *("promote_types", "lift_fresh", "_local_scalar_dense", "is_same_size", "sym_size", "set_"),
)
_BEFORE_COLLECTIVES = ("all_gather_copy_in", "chunk_cat", "chunk_cat_mixed_dtype")  # torch 2.15 has the last
_OVERWRITING = ("copy_", "fill_", "zero_", "normal_", "uniform_", "_foreach_copy_", *_BEFORE_COLLECTIVES)
"""Of what they write they read nothing."""
_BESIDE_COLLECTIVES = ("div_", "mul_", "_to_copy", "copy_", "_foreach_copy_")
"""What FSDP does between its copy and the collective, or between two of them."""
_KINDS = {
    "allgather": ALL_GATHER,
    "all_gather": ALL_GATHER,
    "reduce_scatter": REDUCE_SCATTER,
    "allreduce": ALL_REDUCE,
    "all_reduce": ALL_REDUCE,
    "alltoall": ALL_TO_ALL,
    "all_to_all": ALL_TO_ALL,
    "broadcast": ALL_GATHER,  # each rank has afterwards what is sent
    "send": SEND,
    "recv": RECEIVE,
}
_ADDING = ("addmm", "baddbmm", "addmm_", "baddbmm_")
_MATH = ("exp", "log", "silu", "gelu", "tanh", "sigmoid", "softmax", "sin", "cos", "pow", "sqrt", "norm", "erf")
_INDEX = (
    "index",
    "gather",
    "scatter",
    "embedding",
    "sort",
    "topk",
    "cumsum",
    "masked",
    "where",
    "nonzero",
    "bernoulli",
)


def _form(name: str, tensors: list[torch.Tensor]) -> str:
    """Of which sort an operation is that is none of the others."""
    if any(part in name for part in _INDEX):
        return "index"
    if any(part in name for part in _MATH):
        return "math"
    return "plain" if all(one.is_contiguous() or one.numel() < _SMALL for one in tensors) else "strided"


_SMALL = 1024


def _mutated(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """What it is given and writes into."""
    if not func._schema.is_mutable:
        return []
    names = [argument.name for argument in func._schema.arguments if argument.is_write]
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
    return [one for one in tree_iter([given.get(name) for name in names]) if isinstance(one, torch.Tensor)]


def _attention(func: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Shape and form. Queries are ``(B, H, S, D)``."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    backward = "grad_out" in names or "grad_out_" in names
    query, key = given["query"], given["key"]
    form = ("causal" if given.get("is_causal") else "whole") + (", backward" if backward else "")
    return {"shape": (query.shape[-2], key.shape[-2], query.shape[-1]), "form": form}


def _product_shape(one: torch.Tensor, other: torch.Tensor, flops: float) -> tuple[int, int, int, int]:
    """``(batch, m, n, k)``; a cube of as many FLOPs where the operation is no plain product."""
    if one.ndim == other.ndim and one.ndim in (2, 3) and one.shape[-1] == other.shape[-2]:
        batch = one.shape[0] if one.ndim == 3 else 1
        return batch, one.shape[-2], other.shape[-1], one.shape[-1]
    if one.ndim == 2 and other.ndim == 3:  # rows of experts one after the other, and a matrix for each
        batch = other.shape[0]
        return batch, max(1, one.shape[0] // batch), int(flops / 2 / max(1, one.numel())), one.shape[1]
    side = max(1, round((flops / 2) ** (1 / 3)))
    return 1, side, side, side


def _cpu_attention(times: float) -> Callable[..., float]:
    """FLOPs by the shapes of queries and keys: forward two products, flash attention's backward five."""

    def flops(*given: Any, out_val: Any = None, **_: Any) -> float:
        query, key = [one for one in given if isinstance(one, torch.Tensor)][int(times > 1) :][:2]
        return times * 4 * query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] * query.shape[3]

    return flops


def _grouped(rows: torch.Tensor, other: torch.Tensor, *_: Any, out_val: torch.Tensor, **__: Any) -> float:
    """``aten._grouped_mm`` of rows that are each multiplied once, or of outer products that are summed by group."""
    width = other.shape[-1]
    return 2.0 * rows.shape[0] * rows.shape[1] * width


def _formulas() -> Iterator[tuple[Any, Callable[..., float]]]:
    """Of operations that torch counts, and has no formula for."""
    aten = torch.ops.aten
    yield aten._scaled_dot_product_flash_attention_for_cpu, _cpu_attention(1)
    yield aten._scaled_dot_product_flash_attention_for_cpu_backward, _cpu_attention(2.5)
    if hasattr(aten, "_grouped_mm"):
        yield aten._grouped_mm, _grouped


_FORMULAS = dict(_formulas())


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes that are read: what is expanded is read once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else 1
    return elements * tensor.element_size()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
