"""What a run says when it begins, and what a dry run says instead."""

from __future__ import annotations

from forge_core.checkpoint.compatibility import changes_that_matter, value_text
from forge_core.component import PassComponent, Use
from forge_core.config.job import job_table, notes
from forge_core.engine.build import BuiltModel
from forge_core.engine.pass_table import PassRow, pass_table
from forge_core.engine.preparation import Begun, Prepared

_SHOWN = 5
"""Keys that differ, of a run that has all its steps."""


def announce(prepared: Prepared, model: BuiltModel, attempt: str) -> None:
    """An event, and a line: fresh or resumed, from where, on what mesh."""
    job, checkpoint = prepared.job, prepared.checkpoint
    prepared.directory.write_event(
        "resumed" if checkpoint else "started",
        step=prepared.start.step,
        checkpoint=str(checkpoint.path) if checkpoint else None,
        passed_over=prepared.start.passed_over,
        loaded=str(prepared.warm_start.checkpoint.path) if prepared.warm_start else None,
        mesh=dict(prepared.mesh.degrees),
        attempt=attempt,
    )
    axes = {axis: degree for axis, degree in _axes(prepared).items() if degree > 1}
    mesh = ", ".join(f"{axis} {degree}" for axis, degree in axes.items()) or "one process"
    prepared.console.line(
        f"{job.run.name}: {_start_words(prepared)}; {model.n_parameters:,} parameters, {job.train.precision} on "
        f"{prepared.device.type}, {mesh}; {job.train.steps} steps; files in {prepared.directory.path}"
    )
    for line in notes(job, prepared.catalog):
        prepared.console.line(f"note: {line}")


def announce_complete(begun: Begun) -> None:
    """That there is nothing to do, and with which keys it has been trained otherwise."""
    assert begun.checkpoint is not None, "it is complete"
    steps = begun.job.train.steps
    begun.console.line(f"{begun.directory.path} already has all {steps} steps; nothing to do")
    changes = changes_that_matter(begun.checkpoint.job(), job_table(begun.job))
    if changes:
        shown = ", ".join(f"{one.key}: {value_text(one.old)} -> {value_text(one.new)}" for one in changes[:_SHOWN])
        more = f" and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
        begun.console.line(
            f"note: it was trained with other keys ({shown}{more}); to train with these, choose another run.name"
        )


def _axes(prepared: Prepared) -> dict[str, int]:
    """Those of the mesh, and ``ep``, whose ranks are borrowed from others."""
    ep = prepared.job.parallel.ep
    return {**prepared.mesh.degrees, **({"ep": ep} if ep > 1 else {})}


def describe(prepared: Prepared, model: BuiltModel) -> None:
    """What would be trained: the model, the mesh, the passes and what they touched, the data."""
    say = prepared.console.line
    size = f"{model.n_parameters:,} parameters, vocabulary {prepared.vocab_size:,}"
    say(f"model {prepared.job.model.qualified_name}: {size}")
    say("mesh " + ", ".join(f"{axis} {degree}" for axis, degree in _axes(prepared).items()))
    rows = [
        PassRow(one.use.qualified_name, _phase(prepared, one.use), prepared.mesh.gather_over("pp", [*one.touched]))
        for one in model.applied
    ]
    for line in pass_table(rows) if rows else ["no pass is applied"]:
        say(line)
    say(f"data {len(prepared.source):,} samples of {prepared.job.train.seq_len} tokens an epoch")
    say("dry run: stopped before the first step; nothing was written")


def _start_words(prepared: Prepared) -> str:
    checkpoint = prepared.checkpoint
    if checkpoint is None:
        loaded = f" with tensors of {prepared.warm_start.checkpoint.path}" if prepared.warm_start else ""
        return f"fresh start{loaded}"
    is_own = checkpoint.path.parent == prepared.store.path.resolve()
    words = f"resumed from {checkpoint.path.name if is_own else checkpoint.path}"
    if prepared.start.passed_over:
        words += f", as those of steps {', '.join(map(str, prepared.start.passed_over))} are damaged"
    skipped = checkpoint.state().get("anomalies", {}).get("skipped", 0)
    return words + (f", with {skipped} updates left out before" if skipped else "")


def _phase(prepared: Prepared, use: Use) -> str:
    component = prepared.catalog.lookup("parallel_pass", use.qualified_name).component
    assert isinstance(component, PassComponent), "discovery refuses anything else of this kind"
    return component.phase
