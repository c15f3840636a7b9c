"""The named grid of ranks. One process is a mesh too."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from datetime import timedelta
from functools import cached_property
from math import prod
from typing import TypeVar

import attrs
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch forgets to export it
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from forge_core.config.sections import AXES, Job
from forge_core.distributed.collective_errors import gather
from forge_core.distributed.environment import allow_sockets, interface_problem, refuse_unknown_host, why_not_joined
from forge_core.errors import ConfigError, PluginError
from forge_core.job import resolve_degrees

T = TypeVar("T")

DATA_AXES = ("dp_replicate", "dp_shard")
"""Ranks along these see different samples."""
LOSS_AXES = (*DATA_AXES, "cp", "pp")
"""The loss of a step is the sum over these: other samples, other positions, and stages of which one has a loss."""


@attrs.frozen
class Mesh:
    """All axes are always there, most of them of size 1."""

    device_mesh: DeviceMesh
    degrees: Mapping[str, int]
    experts: DeviceMesh | None = None
    """The ranks of ``dp_shard`` and ``cp`` once more, for experts, which borrow them: ``expert_dp`` and, within it,
    ``ep``. Ranks along ``ep`` have other experts and see other tokens. ``None`` without expert parallelism."""

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @cached_property  # asked for in every step
    def world_size(self) -> int:
        return dist.get_world_size()

    @property
    def dp_size(self) -> int:
        """Ranks that see different samples."""
        return prod(self.degrees[axis] for axis in DATA_AXES)

    @property
    def dp_rank(self) -> int:
        """This rank's number among them, 0 to ``dp_size − 1``."""
        return self._number_along(*DATA_AXES)

    @cached_property
    def noise_rank(self) -> int:
        """Equal on ranks that must draw the same random numbers, as they compute the same (``tp``), and another one on
        those with other samples, positions or layers; 0 and up."""
        return self._number_along(*DATA_AXES, "cp", "pp")

    def _number_along(self, *axes: str) -> int:
        """This rank's number among those along ``axes``, of which the last one is counted first."""
        number = 0
        for axis in axes:
            number = number * self.degrees[axis] + self.device_mesh.get_local_rank(axis)
        return number

    def gather_over(self, axis: str, value: T) -> list[T]:
        """The values of all ranks along ``axis``, in order; they must be picklable. An axis of size 1 costs nothing."""
        if self.degrees[axis] == 1:
            return [value]
        return gather(value, self.device_mesh.get_group(axis))

    def sum_over(self, value: torch.Tensor, axes: tuple[str, ...]) -> torch.Tensor:
        """Sum ``value`` in place over the given axes, and return it. Axes of size 1 cost nothing."""
        for axis in axes:
            if self.degrees[axis] > 1:
                dist.all_reduce(value, group=self.device_mesh.get_group(axis))
        return value


def widest(device: torch.device) -> torch.dtype:
    """The floating-point type that sums are kept in: MPS has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


class StageScalars:
    """Scalars by name, of which a pipeline stage may have others than the rest.

    Args:
        who: reports them, for a message.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self._names: list[str] | None = None

    def aligned(
        self, mesh: Mesh, values: Mapping[str, torch.Tensor], device: torch.device
    ) -> Mapping[str, torch.Tensor]:
        """The same names on each stage, with 0 where it lacks one. All ranks of a pipeline call it.

        Raises:
            PluginError: a name that no stage has had in the first call.
        """
        if mesh.degrees["pp"] == 1:
            return values
        if self._names is None:
            self._names = [*dict.fromkeys(name for stage in mesh.gather_over("pp", [*values]) for name in stage)]
        if late := values.keys() - set(self._names):
            what = f"{sorted(late)[0]!r} was not among what {self._who} reported at the first logged step"
            raise PluginError(f"{what}, and with a pipeline all that they ever report must be")
        nothing = torch.zeros((), device=device)
        return {name: values.get(name, nothing) for name in self._names}

    def summed(self, mesh: Mesh, values: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
        """Same as ``aligned``, summed over stages, on ``device``."""
        own = {name: value.to(device) for name, value in self.aligned(mesh, values, device).items()}
        if mesh.degrees["pp"] == 1 or not own:
            return own
        stacked = torch.stack([value.to(torch.float32) for value in own.values()])
        return dict(zip(own, mesh.sum_over(stacked, ("pp",)).unbind(), strict=True))


def build_mesh(job: Job, device: torch.device) -> Mesh:
    """The mesh of an initialised process group.

    Raises:
        ConfigError: the degrees do not multiply to the world size.
    """
    degrees = resolve_degrees(job.parallel, dist.get_world_size())
    kind = "cpu" if device.type == "mps" else device.type
    device_mesh = init_device_mesh(kind, tuple(degrees[axis] for axis in AXES), mesh_dim_names=AXES)
    return Mesh(device_mesh, {axis: degrees[axis] for axis in AXES}, _experts(device_mesh, job.parallel.ep))


def _experts(device_mesh: DeviceMesh, ep: int) -> DeviceMesh | None:
    if ep == 1:
        return None
    lenders = sharding_mesh(device_mesh)
    return lenders._unflatten(0, (lenders.size() // ep, ep), ("expert_dp", "ep"))


def sharding_mesh(device_mesh: DeviceMesh) -> DeviceMesh:
    """The one dimension over which parameters are sharded.

    Ranks that share a sequence (``cp``) have gradients of the same parameters from other positions, just as ranks with
    other samples have, and so shard them with those.
    """
    if device_mesh["cp"].size() == 1:
        return device_mesh["dp_shard"]
    return device_mesh["dp_shard", "cp"]._flatten("dp_shard_cp")


def choose_device(wanted: str, key: str = "run.device") -> torch.device:
    """The device of this process.

    Args:
        wanted: as ``run.device`` has it.
        key: names it in problems.

    Raises:
        ConfigError: it is not on this machine.
    """
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    kind = next(kind for kind, there in present.items() if there) if wanted == "auto" else wanted
    if not present[kind]:
        raise ConfigError(f"{key}: {kind} was asked for, but torch sees none on this machine; use auto or cpu")
    if kind != "cuda":
        return torch.device(kind)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(f"local rank {local_rank} has no GPU: this machine has {torch.cuda.device_count()}")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def emulates_bf16(device: torch.device) -> bool:
    """Return whether products in bf16 take several times what they take in fp32 on a CPU, as without AVX-512, or in
    fp16 on a GPU, as before Ampere."""
    if device.type == "cuda":
        return not torch.cuda.is_bf16_supported(including_emulation=False)
    has_kernels = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()  # type: ignore[no-untyped-call]
    return device.type == "cpu" and not has_kernels


def join_process_group(device: torch.device, timeout: float = 600.0) -> None:
    """Join the group that a launcher describes in the environment, or be a group of one.

    Args:
        timeout: seconds to wait for the other ranks, now and in every collective. After three times as long this
            process ends, if torch has not given up.

    Raises:
        ForgeError: the group does not come together; says on which host and port, and why.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if problem := interface_problem(os.environ):
        raise ConfigError(problem)
    if "RANK" in os.environ:
        refuse_unknown_host()
        allow_sockets(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # connect to the ranks that are talked to, not to all
        # torch waits for the store's port, for its first answer (without end), and for the other ranks
        watch = threading.Timer(limit := 3 * timeout + _GRACE, _leave, [limit])
        watch.daemon = True
        watch.start()
        try:
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise why_not_joined(error) from error
        finally:
            watch.cancel()
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


_GRACE = 30.0


def _leave(seconds: float) -> None:
    """End this process: torch cannot be told to give up a connection that somebody has taken and does not use."""
    error = why_not_joined(TimeoutError(f"no word in {seconds:.0f} s; another program listens, or rank 0 is stopped"))
    print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(error.exit_code)
