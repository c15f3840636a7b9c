"""Which of the logged steps a callback with an interval of its own reports in."""

from __future__ import annotations

from forge_core.contracts.callback import RunContext


def is_due(run: RunContext, step: int, interval: int) -> bool:
    """Return whether ``step`` is logged, and the first logged step at or after a multiple of ``interval``; the first
    and the last step of the run are. It follows from the job alone, and so is the same on all ranks and after a
    resume."""
    if step in (1, run.total_steps):
        return True
    logged = run.job.metrics.interval
    return step % logged == 0 and step % interval < logged
