"""One rank of many, in one process: the real build and real steps on tensors that have shapes and no memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from forge_core.auxiliary import LEDGER
from forge_core.builder import ComponentBuilder
from forge_core.catalog import Catalog
from forge_core.component import PassComponent, Use
from forge_core.config.sections import Job
from forge_core.engine.build import BuiltModel, allocate, build_model, build_optimizer
from forge_core.engine.gradients import clip_gradients, global_norm
from forge_core.engine.mesh import Mesh, build_mesh
from forge_core.errors import ForgeError
from forge_core.passes import sort_passes
from forge_core.plan.memory import MemoryLedger, bytes_of
from forge_core.plan.recompute import recompute_use

_CPU = torch.device("cpu")  # FSDP's streams of a GPU cannot be had without one; sizes are the same


@attrs.frozen
class RankMemory:
    """What one rank holds during a step, in bytes."""

    peak: int
    at_peak: Mapping[str, int]
    """Adds up to ``peak``; the categories are those of ``forge_core.plan.memory``."""
    largest: Mapping[str, int]
    """The most that each category has, each at its own time."""


@attrs.frozen
class SimulatedRank:
    """What became of the job on one rank."""

    rank: int
    stage: int
    built: BuiltModel
    parameter_bytes: int
    memory: RankMemory | None
    """``None`` if the step cannot be simulated."""
    reason: str
    """Why it cannot; otherwise empty."""


def simulate(
    job: Job, catalog: Catalog, vocab_size: int, world_size: int, stage: int, recompute: str | None = None
) -> SimulatedRank:
    """Build ``job`` for the first rank of a pipeline stage among ``world_size`` ranks, and run steps of it.

    Two steps are run, since the optimizer makes its state in the first. Compiled blocks run as they are written.

    Args:
        recompute: one of ``forge_core.plan.recompute.MODES`` in place of the job's passes of the phase
            ``checkpointing``; only the first forward and backward are run then. ``None`` is the job as it is.

    Raises:
        ForgeError: whatever the build of a real run would say.
    """
    rank = stage * (world_size // job.parallel.pp)
    passes: Sequence[Use] = sort_passes(job, catalog)
    if recompute is not None:
        passes = _with_recompute(passes, catalog, recompute)
    ledger = MemoryLedger()
    fake = FakeTensorMode(allow_non_fake_inputs=True)

    def allocate_only(part: nn.Module, device: torch.device, _: int) -> None:
        with fake, ledger:
            allocate(part, device)

    with _rank_of(world_size, rank):
        mesh = build_mesh(job, _CPU)
        build = ComponentBuilder(catalog)
        built = build_model(job, vocab_size, mesh, _CPU, passes, build, fill=allocate_only)
        size = bytes_of(tensor for part in built.parts for tensor in (*part.parameters(), *part.buffers()))
        ledger.vocabulary = _vocabulary(built, vocab_size)
        memory, reason = None, ""
        try:
            with fake, ledger:
                memory = _steps(job, mesh, built, build, ledger, updates=recompute is None)
        except ForgeError as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001  # of torch or of a plugin; what is known without a step still is
            reason = f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"
        return SimulatedRank(rank, stage, built, size, memory, reason)


def _steps(
    job: Job, mesh: Mesh, built: BuiltModel, build: ComponentBuilder, ledger: MemoryLedger, *, updates: bool
) -> RankMemory:
    microbatches = _microbatches(job)
    scale = torch.ones(())
    parameters = list(built.parameters.values())
    optimizer = build_optimizer(job, built, build)
    for step in (1, 2):
        ledger.restart()
        LEDGER.start_step(scale)
        with ledger.during("activations"):
            built.executor.run(microbatches, scale)
        known: dict[str, list[torch.Tensor]] = {"gradients": [p.grad for p in parameters if p.grad is not None]}
        if updates:
            with ledger.during("optimizer"):
                norm = global_norm(known["gradients"], mesh)
                clip_gradients(known["gradients"], norm, job.train.clip_norm)
                optimizer.step()
            known["optimizer"] = [v for entry in optimizer.state.values() for v in entry.values() if torch.is_tensor(v)]
        if step == 2 or not updates:
            break
        known.clear()  # or gradients would live on
        optimizer.zero_grad(set_to_none=True)
    largest = {**ledger.largest, **{category: bytes_of(tensors) for category, tensors in known.items()}}
    return RankMemory(ledger.peak, ledger.at_peak(known), largest)


def _microbatches(job: Job) -> list[dict[str, torch.Tensor]]:
    """Of one step. Without a pipeline, a third microbatch finds what the second found."""
    count = job.train.grad_accumulation or 1
    shape = (job.train.batch_size, job.train.seq_len)
    names = ("tokens", "targets")
    return [
        {name: torch.zeros(shape, dtype=torch.int64) for name in names}
        for _ in range(count if job.parallel.pp > 1 else min(count, 2))
    ]


def _vocabulary(built: BuiltModel, vocab_size: int) -> frozenset[int]:
    """The logits' last dimension: the whole vocabulary, or this rank's part of it."""
    heads: list[Any] = [part.head for part in built.parts if getattr(part, "head", None) is not None]
    return frozenset({vocab_size, *(_multiplied_rows(head.weight) for head in heads)})


def _multiplied_rows(weight: torch.Tensor) -> int:
    """Rows of a head that this rank multiplies with: FSDP cuts the table too, but gathers it before."""
    if not isinstance(weight, DTensor) or "tp" not in (names := weight.device_mesh.mesh_dim_names or ()):
        return weight.shape[0]
    tp = names.index("tp")
    cut = weight.placements[tp].is_shard(0)
    return -(-weight.shape[0] // weight.device_mesh.size(tp)) if cut else weight.shape[0]


def _with_recompute(passes: Sequence[Use], catalog: Catalog, mode: str) -> list[Use]:
    """The passes with those of the phase ``checkpointing`` replaced."""
    phases = {}
    for use in passes:
        component = catalog.lookup("parallel_pass", use.qualified_name).component
        assert isinstance(component, PassComponent)
        phases[use.qualified_name] = component.phase
    earlier = [use for use in passes if phases[use.qualified_name] in ("split", "shard", "experts", "swap")]
    later = [use for use in passes if phases[use.qualified_name] in ("compile", "fsdp")]
    return [*earlier, *([] if mode == "none" else [recompute_use(mode)]), *later]


@contextmanager
def _rank_of(world_size: int, rank: int) -> Iterator[None]:
    """Be ``rank`` of a group whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    schedule: Any = _PipelineSchedule
    vote, schedule._warmup_p2p = schedule._warmup_p2p, _elect_static
    try:
        with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, about what a real run would do: it will say them then
            yield
    finally:
        schedule._warmup_p2p = vote
        # it knows meshes, and the next rank's is equal to this one's but has other groups
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # torch's
        dist.destroy_process_group()


def _elect_static(_: object, stages: Sequence[Any], *__: object) -> None:
    """In place of torch's vote of all stages on whether they know their shapes, whose result has no value here."""
    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC
