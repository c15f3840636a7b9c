"""Checkpoints as folders that ``transformers`` reads, while a run trains."""

from __future__ import annotations

import os
import shutil
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

from forge_core.checkpoint.manifest import FILE_NAME
from forge_core.contracts.callback import PREEMPTIONS, Callback, RunContext, StepContext
from forge_plugins_hf.export_config import ExportConfig
from forge_plugins_hf.export_process import ExportProcess


@attrs.frozen
class _Held:
    """A checkpoint to be exported."""

    step: int
    path: Path


class Export(Callback):
    """On rank 0, a process of ``forge convert`` at a time makes a folder of each checkpoint, beside training.

    A checkpoint that is committed before the last one is exported waits, and takes the place of another that waits.
    Nothing that goes wrong ends the run: it is said, and an event.
    """

    def __init__(self, config: ExportConfig) -> None:
        self._config = config
        self._step: int | None = None
        self._process: ExportProcess | None = None
        self._exporting: _Held | None = None
        self._waiting: _Held | None = None

    def run_start(self, run: RunContext) -> None:
        """A checkpoint whose export a killed process has not finished is exported now."""
        if run.rank > 0:
            return
        self._remove_unfinished(run)
        if self._step is not None:
            checkpoint = run.run_dir / "checkpoints" / f"step_{self._step:08d}"
            if checkpoint.exists():
                self._export(run, self._step, checkpoint)

    def step_end(self, run: RunContext, context: StepContext) -> None:
        self._step = context.step
        if self._exporting is not None:
            self._go_on(run)

    def checkpoint_saved(self, run: RunContext, step: int, path: Path) -> None:
        if run.rank == 0:
            self._export(run, step, path)

    def run_end(self, run: RunContext, step: int, stopped: str) -> None:
        """The last export is waited for, unless somebody else wants the machine."""
        if self._exporting is None:
            return
        if stopped in PREEMPTIONS:
            run.log(
                f"the export of step {self._exporting.step} is not finished; the next start of the run does it again"
            )
            self._give_up(run)
            return
        limit = run.job.checkpoint.timeout
        deadline = time.monotonic() + limit
        with run.patient(limit):
            while self._exporting is not None and time.monotonic() < deadline:
                time.sleep(0.1)
                self._go_on(run)
        if self._exporting is not None:
            self._fail(run, self._exporting.step, f"it takes longer than checkpoint.timeout = {limit:g} s")
            self._give_up(run)

    def run_failed(self, run: RunContext, step: int, error: BaseException) -> None:
        self._give_up(run)

    def state(self) -> Mapping[str, Any]:
        return {"step": self._step}

    def load_state(self, state: Mapping[str, Any], version: int) -> None:
        self._step = state["step"]

    def _export(self, run: RunContext, step: int, checkpoint: Path) -> None:
        is_due = step % self._config.interval == 0 or step == run.total_steps
        if not is_due or _is_current(self._out(run, step), checkpoint):
            return
        if self._waiting is not None:
            run.log(f"step {self._waiting.step} is not exported: the export before it takes too long")
            run.write_event("export_skipped", step=self._waiting.step)
            _remove(self._waiting.path, run)
        self._waiting = _Held(step, _held(checkpoint, run))
        self._go_on(run)

    def _go_on(self, run: RunContext) -> None:
        """Look whether a process has ended, and begin the next one."""
        if self._process is not None and self._process.is_running:
            return
        if self._process is not None:
            self._end(run, self._process)
        if self._waiting is not None:
            self._exporting, self._waiting = self._waiting, None
            self._begin(run, self._exporting)

    def _begin(self, run: RunContext, held: _Held) -> None:
        out, options = self._out(run, held.step), ["--dtype", self._config.dtype] if self._config.dtype else []
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            if out.exists():  # of a checkpoint in whose place this one is
                _begin_to_remove(out)
            self._process = ExportProcess(held.path.absolute(), out.absolute(), options)
        except OSError as error:
            self._fail(run, held.step, f"cannot write {error.filename or out}: {error.strerror}")
            self._forget(run)

    def _end(self, run: RunContext, process: ExportProcess) -> None:
        assert self._exporting is not None, "a process works on it"
        step = self._exporting.step
        if problem := process.problem():
            self._fail(run, step, problem)
        else:
            out = self._out(run, step)
            run.log(f"exported {out}")
            run.write_event("exported", step=step, seconds=process.seconds, path=str(out))
            self._prune(run, step)
        self._forget(run)

    def _fail(self, run: RunContext, step: int, problem: str) -> None:
        run.log(f"exporting step {step} failed: {problem}")
        run.write_event("export_failed", step=step, error=problem)

    def _forget(self, run: RunContext) -> None:
        """Nothing is being exported any more."""
        if self._exporting is not None:
            _remove(self._exporting.path, run)
        self._process = self._exporting = None

    def _give_up(self, run: RunContext) -> None:
        if self._process is not None:
            self._process.kill()
        if run.rank == 0:
            self._remove_unfinished(run)
        self._process = self._exporting = self._waiting = None

    def _prune(self, run: RunContext, newest: int) -> None:
        """Later ones than ``newest`` are of a time to which the run has gone back, and are replaced one by one."""
        if not self._config.keep_last:
            return
        names = (path.name.removeprefix("step_") for path in self._folder(run).glob("step_*"))
        steps = sorted(int(name) for name in names if name.isdecimal() and int(name) <= newest)
        try:
            for step in steps[: -self._config.keep_last]:
                _begin_to_remove(self._out(run, step))
        except OSError as error:
            run.log(f"could not remove an export that is no longer kept: {error}")

    def _remove_unfinished(self, run: RunContext) -> None:
        """What a killed process has left."""
        for path in (_links(run), *self._folder(run).glob(".step_*")):
            shutil.rmtree(path, ignore_errors=True)

    def _folder(self, run: RunContext) -> Path:
        """The folder of this run's exports."""
        if self._config.path is None:
            return run.run_dir / "exports"
        return self._config.path.expanduser() / run.run_dir.relative_to(run.job.run.dir.expanduser())

    def _out(self, run: RunContext, step: int) -> Path:
        return self._folder(run) / f"step_{step:08d}"


def _is_current(out: Path, checkpoint: Path) -> bool:
    """Return whether there is an export of this checkpoint, and not of one that was in its place before."""
    try:
        return out.stat().st_mtime_ns >= (checkpoint / FILE_NAME).stat().st_mtime_ns
    except OSError:
        return False


def _held(checkpoint: Path, run: RunContext) -> Path:
    """Hard links to the files of a checkpoint, which stay there when the run removes it; or, where the disk has no
    links, the checkpoint itself."""
    links = _links(run) / f"{checkpoint.name}.{uuid.uuid4().hex[:8]}"  # the same step may be held already
    try:
        shutil.copytree(checkpoint, links, copy_function=os.link)
    except OSError:
        shutil.rmtree(links, ignore_errors=True)
        return checkpoint
    return links


def _links(run: RunContext) -> Path:
    return run.run_dir / ".exporting"


def _remove(held: Path, run: RunContext) -> None:
    if held.parent == _links(run):
        shutil.rmtree(held, ignore_errors=True)
        with suppress(OSError):  # another one waits in it
            held.parent.rmdir()


def _begin_to_remove(out: Path) -> None:
    """It loses its name at once; its files go beside training, which many of them would hold up."""
    removed = out.with_name(f".{out.name}.removed")
    out.rename(removed)
    threading.Thread(target=shutil.rmtree, args=(removed,), kwargs={"ignore_errors": True}, name="forge-export").start()
