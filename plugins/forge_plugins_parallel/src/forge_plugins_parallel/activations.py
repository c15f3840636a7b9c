"""What a model keeps for backward, counted on tensors that have shapes and no memory."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import attrs
import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter

from forge_core.contracts.loss import Loss
from forge_plugins_parallel.kept_operations import KeptOperations
from forge_plugins_parallel.units import units_of


@attrs.frozen
class BlockActivations:
    """Bytes that one block keeps from forward to backward, for one microbatch on this rank."""

    whole: int
    """Without recomputation: all that autograd saves."""
    selective: int
    """Its inputs, and the results of the operations that are kept."""
    inputs: int
    """Its inputs alone: with full recomputation."""


@attrs.frozen
class Activations:
    """Of a whole model. What several blocks keep together counts for the first of them."""

    blocks: Mapping[str, BlockActivations]
    """Of blocks and further units, by their qualified names."""
    outside: int
    """Bytes kept outside of blocks: by the embedding, the norm, the head and the loss."""


def measure_activations(
    model: Any, loss: Loss, tokens: tuple[int, int], device: torch.device, dtype: torch.dtype, kept: KeptOperations
) -> Activations:
    """Run one forward of ``model`` on fake tensors and count. Nothing is computed, nothing is changed.

    Args:
        model: on meta; possibly sharded over ``tp``.
        tokens: the shape ``(B, S)`` of a microbatch on this rank.
        device: where the model is going to be: it decides which attention kernel is taken.
        dtype: in which parameters take part in forward.
        kept: operations whose results selective checkpointing keeps.
    """
    with ExitStack() as stack:
        if detect_fake_mode() is None:  # a plan simulates the whole build, and then there is one already
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        tensors = _materialised(model, device, dtype)
        ids = torch.zeros(tokens, dtype=torch.int64, device=device)
        counter = _Counter(units_of(model), kept, tensors.values())
        stack.enter_context(counter.watching())
        # FlexAttention compiles itself wherever it is called, and nothing compiles under what counts
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        functional_call(model, tensors, (ids,), {"targets": ids, "loss": loss})
        return counter.result()


def _materialised(model: nn.Module, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, parameter in model.named_parameters():
        taken = dtype if parameter.is_floating_point() else parameter.dtype
        empty = torch.empty_like(parameter.detach(), device=device, dtype=taken)
        tensors[name] = empty.requires_grad_(parameter.requires_grad)
    for name, buffer in model.named_buffers():
        tensors[name] = torch.empty_like(buffer, device=device)
    return tensors


class _Counter:
    """Adds up storages, each once, under the block that is running."""

    def __init__(
        self, blocks: Mapping[str, nn.Module], kept: KeptOperations, parameters: Collection[torch.Tensor]
    ) -> None:
        self._blocks = blocks
        self._kept = kept
        self._parameters = [storage for parameter in parameters for storage in _storages(parameter)]
        self._running: str | None = None
        self._keeps = kept.in_one_forward()
        self._whole, self._selective, self._inputs = (self._tally() for _ in range(3))

    def watching(self) -> ExitStack:
        """Counts until it is left."""
        stack = ExitStack()
        for name, block in self._blocks.items():
            enter = block.register_forward_pre_hook(self._entering(name), with_kwargs=True)
            leave = block.register_forward_hook(self._leaving)
            stack.callback(enter.remove)
            stack.callback(leave.remove)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._saved, lambda tensor: tensor))
        stack.enter_context(_Operations(self._computed))
        return stack

    def result(self) -> Activations:
        blocks = {
            name: BlockActivations(
                self._whole.bytes_of(name),
                self._selective.bytes_of(name) + self._inputs.bytes_of(name),
                self._inputs.bytes_of(name),
            )
            for name in self._blocks
        }
        return Activations(blocks, self._whole.bytes_of(None))

    def _tally(self) -> _Tally:
        return _Tally({storage._cdata: storage for storage in self._parameters})

    def _entering(self, name: str) -> Any:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._running, self._keeps = name, self._kept.in_one_forward()
            for value in tree_iter((args, kwargs)):
                if isinstance(value, torch.Tensor):
                    self._inputs.add(value, name)

        return enter

    def _leaving(self, *_: Any) -> None:
        self._running = None

    def _saved(self, tensor: torch.Tensor) -> torch.Tensor:
        self._whole.add(tensor, self._running)
        return tensor

    def _computed(self, operation: Any, result: Any) -> None:
        if self._running is not None and self._keeps(operation):
            for value in tree_iter(result):
                if isinstance(value, torch.Tensor):
                    self._selective.add(value, self._running)


@attrs.define
class _Tally:
    """Storages are held on to while they are counted: a freed one's address may be taken by the next."""

    _seen: dict[int, torch.UntypedStorage]
    _sizes: dict[str | None, int] = attrs.field(factory=dict)

    def add(self, tensor: torch.Tensor, owner: str | None) -> None:
        for storage in _storages(tensor):
            if storage._cdata not in self._seen:
                self._seen[storage._cdata] = storage
                self._sizes[owner] = self._sizes.get(owner, 0) + storage.nbytes()

    def bytes_of(self, owner: str | None) -> int:
        return self._sizes.get(owner, 0)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Reports every operation with its result."""

    supports_higher_order_operators = True  # FlexAttention is one

    def __init__(self, report: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._report = report

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._report(func, result)
        return result


def _storages(tensor: Any) -> Iterator[torch.UntypedStorage]:
    """Of a wrapper (DTensor, float8), those of what it wraps."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for inner in (getattr(tensor, name) for name in names):
            if isinstance(inner, torch.Tensor):  # a DTensor has its mesh among them
                yield from _storages(inner)
    else:
        yield tensor.untyped_storage()
