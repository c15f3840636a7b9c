"""Which blocks to recompute so that a step fits into memory: as little as possible."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist

from forge_core.config.builder import ComponentBuilder
from forge_core.contracts.parallel_pass import PassContext
from forge_core.errors import ConfigError, ForgeError
from forge_core.ops.local_tensor import local_tensor
from forge_core.registry.catalog import Catalog
from forge_plugins_parallel.activations import Activations, BlockActivations, measure_activations
from forge_plugins_parallel.compute_dtype import cast_dtype, compute_dtype
from forge_plugins_parallel.config import CompileConfig, FullyShardConfig, config_in
from forge_plugins_parallel.end_units import end_units
from forge_plugins_parallel.gradient_sums import sums_whole, whole_gradient_bytes
from forge_plugins_parallel.kept_operations import KeptOperations
from forge_plugins_parallel.units import units_of

GIB = 2**30
_ROOM = 0.95
"""The part of the memory that is planned for; the rest is for fragments, and for what kernels need inside."""
_SECTION = "parallel.passes.activation_checkpointing"

Choice = dict[str, Literal["full", "selective"]]


def choose(model: Any, context: PassContext, kept: KeptOperations, memory_gib: float | None) -> Choice:
    """The cheapest recomputation with which this rank is expected to fit, by the qualified names of blocks and
    further units.

    In this order, each step for as few blocks as will do: nothing; everything but the dear operations (cheap to
    compute, much to gain); everything. Compiled blocks recompute what is cheap by themselves: for them the middle step
    gains nothing and is left out.

    A rank is expected to need ``states + kept + 2 · outside + 2 · block``: the states of parameters (``_states``), what
    is kept for backward in the blocks, twice what is kept outside of them (the gradient of the logits is as large as
    they are), and one block's activations with their gradients, while it is computed again.

    Args:
        memory_gib: what a rank may use; ``None`` takes what is free on its GPU, the least over all ranks.

    Raises:
        ConfigError: even full recomputation does not fit, or there is no telling.
    """
    memory = _memory(context, memory_gib)
    measured = _measured(model, context, kept)
    fixed = _states(model, context) + 2 * measured.outside + 2 * max(one.whole for one in measured.blocks.values())
    compiled = config_in(context.job, CompileConfig) is not None
    needed = 0.0
    for choice in _candidates(list(measured.blocks), selective=bool(kept.names) and not compiled):
        needed = _most(fixed + _kept(measured.blocks, choice, compiled=compiled and bool(kept.names)))
        if needed <= memory * _ROOM:
            return choice
    raise ConfigError(
        f"{_SECTION}: about {needed / GIB / _ROOM:.3g} GiB are needed a rank with every block recomputed, and "
        f"{memory / GIB:.3g} GiB are there (states of parameters {_states(model, context) / GIB:.3g} GiB). Lower "
        'train.batch_size or shard over more ranks; mode = "full" runs without this estimate'
    )


def _memory(context: PassContext, memory_gib: float | None) -> float:
    if memory_gib is not None:
        return memory_gib * GIB
    if context.planned_gpu is not None:
        return context.planned_gpu.free_gib * GIB
    if context.device.type != "cuda":
        raise ConfigError(
            f'{_SECTION}.memory_gib: mode = "auto" needs to know how much memory a rank may use; it finds out by '
            f"itself on CUDA only, and this is {context.device.type} (a plan is told by --gpu)"
        )
    free, _ = torch.cuda.mem_get_info(context.device)
    least = torch.tensor(free, device=context.device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return float(least)


def _most(needed: float) -> float:
    """Of all ranks: an uneven vocabulary gives some of them more than others, and ranks that recompute differently
    would wait for each other."""
    if dist.get_backend() == "fake":  # a plan, of one rank
        return needed
    most = torch.tensor(needed, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most)


def _measured(model: Any, context: PassContext, kept: KeptOperations) -> Activations:
    job = context.job
    shape = (job.train.batch_size, job.train.seq_len)  # of which the model takes its share, where it is cut by position
    loss = ComponentBuilder(Catalog([]))(job.loss)
    try:
        return measure_activations(model, loss, shape, context.device, compute_dtype(job.train.precision), kept)
    except ForgeError:
        raise
    except Exception as error:
        raise ConfigError(
            f'{_SECTION}.mode = "auto": what this model keeps for backward cannot be measured ahead '
            f"({type(error).__name__}: {error}); choose another mode"
        ) from error


def _states(model: Any, context: PassContext) -> float:
    """Bytes of parameters, gradients and two moments, and of parameters and gradients gathered by FSDP.

    FSDP gathers a block ahead, frees the embedding where it frees blocks, and may hold whole gradients until the last
    of several microbatches. Where no rank shares parameters, it keeps a copy of all in the compute dtype.
    """
    job = context.job
    shards = context.mesh.degrees["dp_shard"] * context.mesh.degrees["cp"]
    own = sum(_size(parameter) for parameter in model.parameters())
    gathers = shards > 1 or cast_dtype(job.train.precision) is not None
    if not gathers:
        return 4.0 * own
    if shards == 1:
        return 4.0 * own + own * compute_dtype(job.train.precision).itemsize / 4
    blocks = [sum(_size(parameter) for parameter in block.parameters()) for block in units_of(model).values()]
    fsdp = config_in(job, FullyShardConfig) or FullyShardConfig()
    freed = sum(blocks) - 2 * max(blocks)
    if fsdp.reshards(pp=context.mesh.degrees["pp"], is_whole=False):
        tables = [end for end in end_units(model) if not end.has_head]
        freed += sum(_size(parameter) for table in tables for parameter in table.parameters())
    gathered = (own - freed) * compute_dtype(job.train.precision).itemsize / 4
    whole = whole_gradient_bytes(model)
    accumulated = whole if sums_whole(whole, fsdp.accumulate, context) else 0
    return 4.0 * own / shards + gathered + accumulated


def _candidates(blocks: list[str], *, selective: bool) -> Iterator[Choice]:
    """From nothing to everything."""
    yield {}
    base: Choice = {}
    if selective:
        for count in range(1, len(blocks) + 1):
            yield dict.fromkeys(blocks[:count], "selective")
        base = dict.fromkeys(blocks, "selective")
    for count in range(1, len(blocks) + 1):
        yield base | dict.fromkeys(blocks[:count], "full")


def _kept(blocks: Mapping[str, BlockActivations], choice: Choice, *, compiled: bool) -> int:
    total = 0
    for name, block in blocks.items():
        whole = min(block.selective, block.whole) if compiled else block.whole
        total += {"full": block.inputs, "selective": block.selective, "none": whole}[choice.get(name, "none")]
    return total


def _size(parameter: torch.Tensor) -> int:
    """Bytes of this rank's part."""
    return local_tensor(parameter).nbytes
