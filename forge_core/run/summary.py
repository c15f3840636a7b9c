"""Summaries: at the start of a run, of a dry run, and at the end."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from contextlib import suppress

import attrs
import torch

from forge_core.checkpoint.compatibility import changes_that_matter, value_text
from forge_core.config.sections import Precision
from forge_core.contracts.data_source import PositionedSource
from forge_core.contracts.observer import PassTrace
from forge_core.distributed.mesh import emulates_bf16
from forge_core.errors import ConfigError, and_more
from forge_core.job import job_table, notes
from forge_core.run.global_batch import with_global_batch
from forge_core.run.setup import Begun, RunSetup
from forge_core.train.build import BuiltModel

_SHOWN = 5
"""Keys that differ, of a run that has all its steps."""


def announce(prepared: RunSetup, model: BuiltModel, attempt: str) -> None:
    """An event, and a line: fresh or resumed, from where, on what mesh."""
    job, checkpoint = prepared.job, prepared.checkpoint
    prepared.directory.write_event(
        "resumed" if checkpoint else "started",
        step=prepared.start.step,
        checkpoint=str(checkpoint.path) if checkpoint else None,
        passed_over=prepared.start.passed_over,
        loaded=_loaded(prepared) or None,
        mesh=dict(prepared.mesh.degrees),
        attempt=attempt,
    )
    axes = {axis: degree for axis, degree in _axes(prepared).items() if degree > 1}
    mesh = ", ".join(f"{axis} {degree}" for axis, degree in axes.items()) or "one process"
    prepared.console.line(
        f"{job.run.name}: {_start_words(prepared)}; {model.n_parameters:,} parameters, {job.train.precision} on "
        f"{prepared.device.type}, {mesh}; {job.train.steps} step{'s' * (job.train.steps > 1)}; files in "
        f"{prepared.directory.path}"
    )
    for line in notes(job, prepared.catalog):
        prepared.console.line(f"note: {line}")
    if words := emulation_words(job.train.precision, prepared.device):
        prepared.console.line(f"note: train.precision: {words} takes a fraction of the time")


def emulation_words(precision: Precision, device: torch.device) -> str:
    """Say that the device emulates a precision, and which one it does not; empty if it does not."""
    half = precision.removesuffix("_pure")
    if half == "fp32" or not emulates_bf16(device):
        return ""
    if device.type == "cpu":
        return f'this CPU emulates {half}; "fp32"'
    return "" if half == "fp16" else 'this GPU emulates bf16; "fp16"'


def announce_complete(begun: Begun) -> None:
    """Say that there is nothing to do, and which keys the run was trained with instead of the job's."""
    assert begun.checkpoint is not None, "it is complete"
    job = begun.job
    begun.console.line(f"{begun.directory.path} already has all {job.train.steps} steps; nothing to do")
    with suppress(ConfigError):  # other ranks that could not make up its global batch: none is trained
        job = with_global_batch(job, begun.mesh.dp_size, begun.checkpoint, lambda line: None)
    changes = changes_that_matter(begun.checkpoint.job(), job_table(job))
    changes = [one for one in changes if one.key != "train.grad_accumulation"]  # it follows from the number of ranks
    if changes:
        shown = ", ".join(f"{one.key}: {value_text(one.old)} -> {value_text(one.new)}" for one in changes[:_SHOWN])
        more = and_more(len(changes), _SHOWN)
        begun.console.line(
            f"note: it was trained with other keys ({shown}{more}); to train with these, choose another run.name"
        )


def _axes(prepared: RunSetup) -> dict[str, int]:
    """Those of the mesh, and ``ep``, whose ranks are borrowed from others."""
    ep = prepared.job.parallel.ep
    return {**prepared.mesh.degrees, **({"ep": ep} if ep > 1 else {})}


def describe(prepared: RunSetup, model: BuiltModel) -> None:
    """Print a dry run: the model, the mesh, the passes and what they touched, the data."""
    say, described = prepared.console.line, prepared.build.description_of
    size = f"{model.n_parameters:,} parameters, vocabulary {prepared.vocab_size:,}"
    say(f"model {prepared.job.model.qualified_name}: {size}")
    say("mesh " + ", ".join(f"{axis} {degree}" for axis, degree in _axes(prepared).items()))
    passes = [
        PassTrace(one.use.qualified_name, described(one.use).phase, prepared.mesh.gather_over("pp", [*one.touched]))
        for one in model.applied
    ]
    if not prepared.events.listens("dry_run"):
        say("passes " + (", ".join(one.name for one in passes) or "none"))
    elif passes:
        prepared.events.call("dry_run", say=say, passes=passes)
    else:
        say("no pass is applied")
    source, samples = prepared.source, f"samples of {prepared.job.train.seq_len} tokens"
    size = f"{samples}, without end" if isinstance(source, PositionedSource) else f"{len(source):,} {samples} an epoch"
    say(f"data {size}")
    say("dry run: stopped before the first step; nothing was written")


def _loaded(prepared: RunSetup) -> str:
    """The checkpoints of which a fresh start takes parts."""
    return ", ".join(map(str, prepared.warm_start.sources)) if prepared.warm_start else ""


def _start_words(prepared: RunSetup) -> str:
    if (checkpoint := prepared.checkpoint) is None:
        loaded = _loaded(prepared)
        return f"fresh start with tensors of {loaded}" if loaded else "fresh start"
    is_own = checkpoint.path.parent == prepared.store.path.resolve()
    words = f"resumed from {checkpoint.path.name if is_own else checkpoint.path}"
    if prepared.start.passed_over:
        words += f", as those of steps {', '.join(map(str, prepared.start.passed_over))} are damaged"
    skipped = checkpoint.state().get("anomalies", {}).get("skipped", 0)
    return words + (f", with {skipped} updates left out before" if skipped else "")


@attrs.define
class EndReport:
    """Made when training begins. ``note`` is given what is recorded, on rank 0."""

    prepared: RunSetup
    _loss: str = ""
    _since: float = attrs.field(factory=time.monotonic)

    def note(self, values: Mapping[str, float]) -> None:
        """Keep the newest loss; of evaluations, if there has been one."""
        for name in ("loss", "eval/loss"):
            if name in values and not (name == "loss" and self._loss.startswith("eval/")):
                self._loss = f"{name} {values[name]:.4g}"

    def line(self, step: int) -> str:
        """Such as ``done: 400 steps in 3 min 12 s; eval/loss 2.31; forge generate runs/demo``."""
        prepared = self.prepared
        here = step - prepared.start.step
        how_many = f"{step} step{'s' * (step > 1)}" if here == step else f"{step} steps, the last {here}"
        directory = str(prepared.directory.path)
        can_sample = prepared.source.tokenizer is not None and "generate" in prepared.catalog.commands
        where = f"forge generate {shlex.quote(directory)}" if can_sample else f"files in {directory}"
        took = duration_words(time.monotonic() - self._since)
        return "; ".join(filter(None, [f"done: {how_many} in {took}", self._loss, where]))


def duration_words(seconds: float) -> str:
    """``3 min 12 s``: the largest unit and the one below it."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, size, smaller, part in (("d", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part} {smaller}"
    return f"{whole} s"
