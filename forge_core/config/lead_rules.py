"""Rules about the time that a run needs to save and stop."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from forge_core.config.problems import Problem
from forge_core.config.sections import CheckpointSection, Job, RunSection
from forge_core.config.time_limit import DEFAULT_LEAD, lead_problem


def lead_problems(job: Job) -> list[Problem]:
    """With ``run.time_limit``: whether ``run.stop_before_end`` fits below it, and a step and a save into that."""
    run = job.run
    if run.time_limit is None:
        return []
    if problem := lead_problem(run.stop_before_end, run.time_limit, "run.time_limit"):
        return [Problem(("run", "stop_before_end"), problem)]
    lead = DEFAULT_LEAD if run.stop_before_end is None else run.stop_before_end
    return list(timeout_problems(job, lead, "run.stop_before_end", "run.time_limit"))


def timeout_problems(job: Job, lead: float, name: str, end: str) -> Iterator[Problem]:
    """Timeouts by which a step or a save may take longer than there is time for it before the end.

    One that has not been raised above its default says nothing about how long things take in this run.

    Args:
        lead: seconds between the moment when the run is told to stop and its end.
        name: of the key that says so.
        end: what ends it.
    """
    for section, key, what in ((CheckpointSection, "timeout", "save"), (RunSection, "step_timeout", "step")):
        place = "checkpoint" if section is CheckpointSection else "run"
        seconds = getattr(getattr(job, place), key)
        if seconds > max(getattr(attrs.fields(section), key).default, lead):
            yield Problem(
                (place, key),
                f"by {seconds:g} s, a {what} may take longer than {name} = {lead:g} s, after which {end} ends the run: "
                f"raise {name} to what a step and a save take, or lower this one below it",
            )
