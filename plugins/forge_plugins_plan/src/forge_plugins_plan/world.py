"""One rank of a world that is not there: torch's distributed state, without a loop over ranks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._mesh_layout import _MeshLayout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.distributed.tensor import DTensor, _sharding_prop
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from forge_core.ops.auxiliary_loss import LEDGER
from forge_plugins_plan.chunks import releasable


@contextmanager
def rank_of(world_size: int, rank: int, ranks_per_node: int) -> Iterator[None]:
    """Be ``rank`` of a group whose collectives do nothing.

    What this takes does not grow with ``world_size``, but for lists of ranks.
    """
    before = os.environ.get("LOCAL_WORLD_SIZE")
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks_per_node)  # as a launcher would say it
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with ExitStack() as stack:
            for owner, name, other in _OTHERWISE:
                stack.enter_context(_replaced(owner, name, other))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # torch's, about what a real run would do: it will say them then
            yield
    finally:
        # it knows meshes, and the next rank's is equal to this one's but has other groups
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # torch's
        dist.destroy_process_group()
        LEDGER.start_step(torch.ones(()))  # it holds tensors of the simulation
        if before is None:
            del os.environ["LOCAL_WORLD_SIZE"]
        else:
            os.environ["LOCAL_WORLD_SIZE"] = before


@contextmanager
def _replaced(owner: Any, name: str, other: Callable[[Any], Any]) -> Iterator[None]:
    """``owner.name`` is ``other`` of what it was; nothing is done where this torch has none."""
    if not hasattr(owner, name):
        yield
        return
    before = vars(owner)[name]
    setattr(owner, name, other(getattr(owner, name)))
    try:
        yield
    finally:
        setattr(owner, name, before)


def _own_group_only(_: Any) -> Any:
    """Of the groups along an axis of a mesh, make the one that this rank is in. torch makes all, on each rank."""

    def make(axis: Any, rank_map: torch.Tensor, dim_name: str, *_: Any) -> str:
        if axis.numel() == dist.get_world_size():
            return str(dist.group.WORLD.group_name)  # type: ignore[union-attr]  # it has been made
        layout = axis.nest() if hasattr(axis, "nest") else _MeshLayout([axis])  # torch 2.11 has the first
        groups = layout.remap_to_tensor(rank_map)
        own = groups[(groups == dist.get_rank()).any(dim=1)][0]
        return str(dist.new_group(own.tolist(), group_desc=f"mesh_{dim_name}").group_name)

    return staticmethod(make)


def _once_a_mesh(concatenate: Any) -> Any:
    """FSDP joins meshes for each parameter that is cut twice, and each of them would list all ranks."""
    made: dict[tuple[DeviceMesh, ...], DeviceMesh] = {}

    def joined(meshes: list[DeviceMesh]) -> DeviceMesh:
        key = tuple(meshes)
        if key not in made:
            made[key] = concatenate(meshes)
        return made[key]

    return staticmethod(joined)


def _once_a_slice(cut: Any) -> Any:
    """FSDP asks for a part of a mesh for each parameter."""
    made: dict[tuple[DeviceMesh, Any], DeviceMesh] = {}

    def part(mesh: DeviceMesh, names: Any) -> DeviceMesh:
        key = mesh, names
        if key not in made:
            made[key] = cut(mesh, names)
        return made[key]

    return part


@attrs.frozen
class _Chunks(Sequence[torch.Tensor]):
    """``torch.chunk`` with empty tensors for the ranks that it leaves without one; made as they are asked for."""

    tensor: torch.Tensor
    n_ranks: int
    dim: int

    def __len__(self) -> int:
        return self.n_ranks

    def __getitem__(self, rank: Any) -> Any:
        rows = self.tensor.shape[self.dim]
        each = -(-rows // self.n_ranks)
        first = rank * each
        if first >= rows and rank > 0:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, first, min(each, rows - first))


class _UncutTorch:
    """torch as FSDP's collectives use it, which cut a tensor by ranks along one dimension and join it along another."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def chunk(tensor: torch.Tensor, n_ranks: int, dim: int) -> _Chunks:
        return _Chunks(tensor, n_ranks, dim)

    @staticmethod
    def cat(tensors: Any, dim: int, out: torch.Tensor | None = None) -> torch.Tensor:
        if not isinstance(tensors, _Chunks):
            return torch.cat(tensors, dim, out=out)
        if out is not None:
            return out
        shape = list(tensors.tensor.shape)
        shape[tensors.dim] //= tensors.n_ranks
        shape[dim] *= tensors.n_ranks
        return tensors.tensor.new_empty(shape)


def _asked_once(flag: Any) -> Any:
    """torch reads the specs of all tensors of a list for each of them, to pass on one of two values."""

    def propagate(strategy: Any, schema: Any) -> None:
        distinct = vars(schema).get("_distinct")
        if distinct is None:
            specs = [one for one in schema.args_spec if any(_is_strided(each) for each in one.placements)]
            distinct = schema._distinct = {one.use_strided_shard_as_shard_order: one for one in specs}
        if distinct:
            flag(strategy, SimpleNamespace(args_spec=tuple(distinct.values())))

    return propagate


def _is_strided(placement: Any) -> bool:
    return isinstance(placement, _StridedShard)


def _without_vote(_: Any) -> Any:
    """Stages of a pipeline know their shapes. torch has all of them vote on it, and the result has no value here."""

    def elect(_: object, stages: Sequence[Any], *__: object) -> None:
        from torch.distributed.pipelining._utils import InferenceMode  # torch 2.11 has none, and no vote

        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    return elect


def _undecorated(dispatch: Any) -> Any:
    """Dynamo is switched off and on with each operation, and nothing is compiled here."""
    return getattr(dispatch, "__wrapped__", dispatch)


def _by_part(empty_like: Any) -> Any:
    """Of a ``DTensor``, its local tensor alone, and nothing that is asked of one on the meta device. All parameters are
    made so; to pass that on takes most of the time."""

    def make(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        if type(tensor) is not DTensor:
            made: torch.Tensor = empty_like(tensor, **options)
            return made
        local = tensor._local_tensor
        if type(local) is torch.Tensor and local.is_meta and local.is_contiguous() and "device" in options:
            local = torch.empty(local.shape, **{"dtype": local.dtype, **options})
        else:
            local = empty_like(local, **options)
        return DTensor(local, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]  # torch's

    return make


def _without_values(_: nn.Module) -> None:
    """Parameters without memory have none. To draw them takes a third of the time in which a model is made."""


_OTHERWISE: Sequence[tuple[Any, str, Callable[[Any], Any]]] = (
    (DeviceMesh, "_init_one_process_group", _own_group_only),
    (DeviceMesh, "_concatenate", _once_a_mesh),
    (DeviceMesh, "__getitem__", _once_a_slice),
    (_fsdp_param, "_chunk_with_empty", lambda _: _Chunks),
    (_fsdp_collectives, "torch", lambda _: _UncutTorch()),
    (_sharding_prop, "_propagate_use_strided_shard_flag", _asked_once),
    (_PipelineSchedule, "_warmup_p2p", _without_vote),
    (_PipelineStageBase, "_output_slot_is_releasable", releasable),
    (FakeTensorMode, "__torch_dispatch__", _undecorated),
    (torch, "empty_like", _by_part),
    *((layer, "reset_parameters", lambda _: _without_values) for layer in (nn.Linear, nn.Embedding, nn.RMSNorm)),
)
"""What of torch is done otherwise: all of it private, so that the figures are those of a real run."""
