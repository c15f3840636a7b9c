"""What the memory of a GPU was used for: the history of CUDA's allocator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from forge_core.contracts.callback import Callback, RunContext, StepContext
from forge_core.errors import ConfigError
from forge_plugins_monitor.config import MemorySnapshotConfig


class MemorySnapshot(Callback):
    """Records ``steps`` steps from ``start`` on, once a run, and writes them on each of ``ranks``.

    The directory ``memory`` of the run gets ``steps_<a>_to_<b>_rank_<r>.pickle``, for pytorch.org/memory_viz: each
    allocation and free with the Python lines that made it. If one of ``ranks`` fails for want of memory while it
    records, it writes ``out_of_memory_step_<n>_rank_<r>.pickle``, and a line below the error says so.

    Raises:
        ConfigError: from the constructor, if this machine has no CUDA; in ``run_start``, for a rank that is not there.
    """

    def __init__(self, config: MemorySnapshotConfig) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(
                "memory_snapshot records the memory of CUDA, and torch sees no GPU on this machine; take it out"
            )
        self._config = config
        self._recorded = 0
        self._is_recording = False

    def run_start(self, run: RunContext) -> None:
        ranks = self._config.ranks
        if max(ranks) >= run.world_size:
            raise ConfigError(
                f"memory_snapshot.ranks: there is no rank {max(ranks)}; the run has ranks 0 to {run.world_size - 1}"
            )
        self._recorded = 0
        if self._config.on_out_of_memory and run.rank in ranks:
            self._start()

    def step_start(self, run: RunContext, step: int) -> None:
        if step == self._config.start and run.rank in self._config.ranks:
            self._start()

    def step_end(self, run: RunContext, context: StepContext) -> None:
        config = self._config
        if not self._is_recording or not config.start <= context.step < config.start + config.steps:
            return
        self._recorded += 1
        if self._recorded == config.steps:
            self._write_steps(run)

    def run_end(self, run: RunContext, step: int, stopped: str) -> None:
        if self._is_recording:
            self._write_steps(run)
            self._stop()

    def run_failed(self, run: RunContext, step: int, error: BaseException) -> None:
        if not self._is_recording:
            return
        is_short = any(isinstance(one, torch.OutOfMemoryError) for one in _with_causes(error))
        if is_short and (path := self._write(run, f"out_of_memory_step_{step}_rank_{run.rank}")):
            error.add_note(f"memory_snapshot: what was allocated is in {path}, for pytorch.org/memory_viz")
        self._stop()

    def _start(self) -> None:
        """Forget what was recorded before."""
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=self._config.entries, clear_history=True)
        self._is_recording = True

    def _stop(self) -> None:
        torch.cuda.memory._record_memory_history(enabled=None)
        self._is_recording = False

    def _write_steps(self, run: RunContext) -> None:
        """Write the steps of the record that are done, once."""
        recorded, self._recorded = self._recorded, 0
        if recorded:
            first = self._config.start
            self._write(run, f"steps_{first}_to_{first + recorded - 1}_rank_{run.rank}")
            if not self._config.on_out_of_memory:
                self._stop()

    def _write(self, run: RunContext, name: str) -> Path | None:
        """Returns where it is, unless it could not be written."""
        path = run.run_dir / "memory" / f"{name}.pickle"
        try:
            path.parent.mkdir(exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]  # torch's
        except OSError as error:
            run.log(f"memory_snapshot: cannot write to {path.parent}: {error.strerror}")
            return None
        run.log(f"memory_snapshot: {path.relative_to(run.run_dir.parent)}, for pytorch.org/memory_viz")
        return path


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """A pipeline wraps what a stage raises."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
