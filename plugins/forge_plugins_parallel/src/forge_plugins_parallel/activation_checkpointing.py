"""Activation checkpointing: what a block computes on the way forward is computed again on the way back, not kept on the
device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import copy
from functools import partial
from typing import Any, Literal

import attrs
import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from forge_core.contracts.parallel_pass import PassContext
from forge_core.errors import ConfigError
from forge_plugins_parallel.activation_offload import offload
from forge_plugins_parallel.config import ActivationCheckpointingConfig, splits_backward
from forge_plugins_parallel.kept_operations import KeptOperations
from forge_plugins_parallel.recompute_choice import choose
from forge_plugins_parallel.units import replace_unit, units_of

Recomputation = Literal["full", "selective"]
"""Of one block: keep its inputs only, or also the results of the operations that the model calls dear."""

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class ActivationCheckpointing:
    """Wraps blocks and further units of any class. Names of parameters stay those of the model
    (``canonical_name``)."""

    def __init__(self, config: ActivationCheckpointingConfig) -> None:
        self._config = config

    def apply(self, model: nn.Module, context: PassContext) -> tuple[nn.Module, Sequence[str]]:
        """Same as ``ParallelPass.apply``. The model itself counts as touched where the answer is to recompute nothing.

        Raises:
            ConfigError: the model declares no operation to keep, or not even full recomputation would fit.
        """
        units = units_of(model)
        if self._config.mode == "budget":
            assert self._config.budget is not None, "the config class sees to it"
            # read by the partitioner when a block is compiled, which is at its first forward
            functorch_config.activation_memory_budget = self._config.budget
            return model, list(units)
        if self._config.mode == "offload":
            return model, self._offload(model, units, context)
        kept = KeptOperations.of(model, self._config.keep, self._config.products_every)
        chosen = self._choose(model, context, kept)
        kept_by = {"selective": kept, "full": KeptOperations()}
        # one object for all blocks, which then share one compiled graph
        kept_by_compiler = {name: _with_attention(one, context) for name, one in kept_by.items()}
        again = splits_backward(context.job)
        for name, recomputation in chosen.items():
            block = _checkpointed(units[name], kept_by[recomputation], kept_by_compiler[recomputation], again=again)
            replace_unit(model, name, block)
        return model, list(chosen) or [""]

    def _choose(self, model: Any, context: PassContext, kept: KeptOperations) -> dict[str, Recomputation]:
        """By qualified names of blocks and further units."""
        mode = self._config.mode
        if mode == "auto":
            return choose(model, context, kept, self._config.memory_gib)
        if mode == "selective" and not kept.names:
            raise ConfigError(
                f'parallel.passes.activation_checkpointing.mode = "selective", but {type(model).__qualname__} names no '
                'operation to keep in its recompute_plan; take "full", or name some in keep'
            )
        if mode == "full" or mode == "selective":
            return dict.fromkeys(self._every(model), mode)
        return {}

    def _every(self, model: Any) -> list[str]:
        """Every n-th block, and all further units."""
        blocks = [f"blocks.{name}" for name in model.blocks]
        left_out = set(blocks) - set(blocks[:: self._config.every])
        return [name for name in units_of(model) if name not in left_out]

    def _offload(self, model: Any, units: Mapping[str, nn.Module], context: PassContext) -> list[str]:
        """Without a pipeline, what the last block keeps would come back at once."""
        last = f"blocks.{list(model.blocks)[-1]}" if context.mesh.degrees["pp"] == 1 else None
        chosen = [name for name in self._every(model) if name != last]
        if not chosen:
            raise ConfigError(
                'parallel.passes.activation_checkpointing.mode = "offload" keeps the activations of the last block '
                "on the GPU, and no other is meant; take the pass out"
            )
        offload((units[name] for name in chosen), context.device, last=None if last is None else units[last])
        return chosen


def _with_attention(kept: KeptOperations, context: PassContext) -> KeptOperations:
    """``kept``, and attention where torch 2.13 cannot recompute it: on a CPU a compiled block saves the state of its
    random generator behind the mesh of a parameter that is cut, and takes the mesh for a tensor."""
    if context.device.type != "cpu" or context.mesh.degrees["tp"] == 1:
        return kept
    return attrs.evolve(kept, names=kept.names | {"aten._scaled_dot_product_flash_attention_for_cpu"})


def _checkpointed(
    block: nn.Module, kept: KeptOperations, kept_by_compiler: KeptOperations, *, again: bool
) -> nn.Module:
    """``block``, recomputed in backward but for the results of the operations ``kept``, or if the block is compiled
    of those of ``kept_by_compiler``.

    Args:
        again: a forward has several backwards, for the input and for each weight.
    """
    selective = partial(_keeping_eagerly, kept, again=again) if kept.names else None
    counting = [module for module in block.modules() if hasattr(module, "accumulators")]
    traced = {"context_fn": partial(_keeping, kept_by_compiler)} if kept_by_compiler.names else {}
    eager = {"context_fn": selective} if selective else {}
    if counting:
        eager = {"context_fn": partial(_accumulating_once, selective or noop_context_fn, counting)}

    def run(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # A compiled block keeps its side effects out of the recomputation by itself, and can trace no other contexts.
        options: dict[str, Any] = traced if torch.compiler.is_compiling() else eager
        return checkpoint(block, *args, use_reentrant=False, **options, **kwargs)

    return checkpoint_wrapper(block, checkpoint_fn=run)


def _keeping(kept: KeptOperations) -> Contexts:
    """Of one forward of a block, and of when it is computed again."""
    forward, again = kept.in_one_forward(), kept.in_one_forward()

    def policy(context: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keeps = again if context.is_recompute else forward
        return CheckpointPolicy.MUST_SAVE if keeps(operation) else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: Contexts = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]  # torch's
    return contexts


def _keeping_eagerly(kept: KeptOperations, *, again: bool) -> Contexts:
    forward, recomputation = _keeping(kept)
    return forward, _Refusing(_GivingOutAgain(recomputation) if again else recomputation)


class _Refusing(AbstractContextManager[None]):
    """Says what is wrong where torch only says that it is: a kept result must be as it was for the recomputation."""

    def __init__(self, recomputation: AbstractContextManager[Any]) -> None:
        self._recomputation = recomputation

    def __enter__(self) -> None:
        self._recomputation.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._recomputation.__exit__(kind, error, trace)
        if isinstance(error, RuntimeError) and "selective activation checkpoint has been mutated" in str(error):
            raise ConfigError(
                "parallel.passes.activation_checkpointing.keep: a block changes a result in place that is to be kept; "
                'name fewer operations, such as "aten.mm" and "*attention*"'
            ) from error


class _GivingOutAgain(AbstractContextManager[None]):
    """Gives out what was kept in each backward, where torch does so in one."""

    def __init__(self, recomputation: Any) -> None:
        self._recomputation = recomputation
        self._kept: dict[Any, Any] = {}

    def __enter__(self) -> None:
        self._kept = {operation: copy(results) for operation, results in self._recomputation.storage.items()}
        self._recomputation.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._recomputation.__exit__(*raised)
        self._recomputation.storage.update(self._kept)


def _accumulating_once(contexts: Callable[[], Contexts], counting: Sequence[Any]) -> Contexts:
    """``contexts`` for a block whose forward counts something (``StepModule``): the second forward does not."""
    forward, recomputation = contexts()
    return forward, _Restoring(recomputation, counting)


class _Restoring(AbstractContextManager[None]):
    """``_restoring``, which is entered again in each backward: a zero-bubble schedule has several."""

    def __init__(self, recomputation: AbstractContextManager[Any], counting: Sequence[Any]) -> None:
        self._again = partial(_restoring, recomputation, counting)
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(self._again())

    def __exit__(self, *raised: Any) -> bool | None:
        return self._stack.__exit__(*raised)


@contextmanager
def _restoring(recomputation: AbstractContextManager[Any], counting: Sequence[Any]) -> Iterator[None]:
    accumulators = [tensor for module in counting for tensor in module.accumulators().values()]
    before = [tensor.clone() for tensor in accumulators]
    try:
        with ExitStack() as stack:
            stack.enter_context(recomputation)
            yield
    finally:
        for tensor, value in zip(accumulators, before, strict=True):
            # out of sight of autograd: forwards of other microbatches may have saved it, for its place (`accumulate`)
            tensor.data.copy_(value)
