"""Whether the machines of a run are well, while it trains."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from forge_core.contracts.callback import Callback, RunContext, StepContext
from forge_core.errors import ForgeError
from forge_plugins_monitor.config import HealthConfig
from forge_plugins_monitor.nvml import GpuState, Nvml

_MEMINFO = Path("/proc/meminfo")


class Health(Callback):
    """Looks every ``interval`` steps. What is found is told on rank 0, once until it changes."""

    def __init__(self, config: HealthConfig) -> None:
        self._config = config
        self._gpu: Nvml | None = None
        self._first_look: GpuState | None = None
        self._retries = 0
        self._told: set[str] = set()
        self._group: dist.ProcessGroup | None = None

    def run_start(self, run: RunContext) -> None:
        if run.device.type == "cuda":
            try:
                self._gpu = Nvml(run.device)
                self._first_look = self._gpu.look()
            except RuntimeError as error:
                run.log(f"health: the GPU of rank {run.rank} is not looked at: {error}")
        if run.world_size > 1:
            # its own, so that no other collective's time counts; gloo has to give up later than this callback does
            later = timedelta(seconds=2 * self._config.collective_timeout)
            backend = "cpu:gloo,cuda:nccl" if run.device.type == "cuda" else "gloo"
            self._group = dist.new_group(backend=backend, timeout=later, group_desc="forge_health")

    def step_end(self, run: RunContext, context: StepContext) -> None:
        if context.step % self._config.interval:
            return
        found = list(self._findings())
        if self._group is not None:
            self._check_collective(run)
            found = self._gathered(run, found)
        self._tell(run, found)

    def run_end(self, run: RunContext, step: int, stopped: str) -> None:
        self._close()

    def run_failed(self, run: RunContext, step: int, error: BaseException) -> None:
        self._close()

    def _findings(self) -> Iterator[tuple[str, bool]]:
        """Sentences without their numbers' noise, and whether each is about memory errors."""
        least = self._config.least_free
        if self._gpu is not None and self._first_look is not None:
            yield from self._findings_of_gpu(self._gpu, self._first_look, least)
        if host_memory_free() < least:
            yield f"less than {least:.0%} of the host's memory is free", False

    def _findings_of_gpu(self, gpu: Nvml, first_look: GpuState, least: float) -> Iterator[tuple[str, bool]]:
        try:
            now = gpu.look()
        except RuntimeError as error:  # if the GPU itself is gone, training finds that out
            self._close()
            yield f"{first_look.name} is not looked at any more: {error}", False
            return
        new = (now.memory_errors or 0) - (first_look.memory_errors or 0)
        if new > 0:
            yield f"{now.name} has had {new} uncorrected memory errors since the run began", True
        if now.waits_for_reset:
            yield f"{now.name} has broken memory that a reset would take out of use", False
        if now.slowed_down_by:
            yield f"{now.name} is slowed down by {' and '.join(now.slowed_down_by)}", False
        if now.free < least:
            yield f"{now.name} has less than {least:.0%} of its memory free", False
        retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
        if retries > self._retries:
            way_out = "take smaller microbatches, or set PYTORCH_ALLOC_CONF=expandable_segments:True"
            yield (
                f"{now.name} has no memory left in one piece, so that torch frees its cache and waits; {way_out}",
                False,
            )
        self._retries = retries

    def _check_collective(self, run: RunContext) -> None:
        """A small all-reduce over all ranks, on the device.

        Raises:
            ForgeError: its result is wrong.
            RuntimeError: it does not end in time; worded as torch words it, so that the engine names the missing rank.
        """
        mine = torch.full((256,), run.rank + 1, dtype=torch.int64, device=run.device)
        work = dist.all_reduce(mine, group=self._group, async_op=True)
        assert work is not None
        deadline = time.monotonic() + self._config.collective_timeout
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError(f"the all-reduce of health timed out after {self._config.collective_timeout:g} s")
            time.sleep(0.0005)
        work.wait()
        expected = run.world_size * (run.world_size + 1) // 2
        if not bool((mine == expected).all()):
            raise ForgeError(
                f"health: rank {run.rank} on {socket.gethostname()}: an all-reduce over {run.world_size} ranks gave "
                f"{mine.unique().tolist()} instead of {expected}: a device or a link corrupts data"  # type: ignore[no-untyped-call]  # torch's
            )

    def _gathered(self, run: RunContext, found: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
        """Those of all ranks, with their places, on every rank."""
        place = f"rank {run.rank} on {socket.gethostname()}"
        everybody: list[list[tuple[str, bool]]] = [[] for _ in range(run.world_size)]
        # few have something to say; those who have not cost 64 bits
        counts = torch.tensor([len(found)])
        dist.all_reduce(counts, group=self._group)
        if not int(counts):
            return []
        dist.all_gather_object(everybody, [(f"{place}: {what}", is_ecc) for what, is_ecc in found], group=self._group)
        return [entry for entries in everybody for entry in entries]

    def _tell(self, run: RunContext, found: list[tuple[str, bool]]) -> None:
        for sentence, is_memory_error in found:
            if sentence not in self._told:
                run.log(f"health: {sentence}")
                if is_memory_error and self._config.on_memory_errors == "stop":
                    run.requests.stop = f"health: {sentence}"
        self._told = {sentence for sentence, _ in found}

    def _close(self) -> None:
        if self._gpu is not None:
            self._gpu.close()
            self._gpu = None


def host_memory_free() -> float:
    """The part of this host's memory that could still be given out; 1 where it cannot be known."""
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return 1.0
    kib = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
    return kib["MemAvailable"] / kib["MemTotal"] if kib.get("MemTotal") and "MemAvailable" in kib else 1.0
