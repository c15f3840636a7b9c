"""Problems of a ``[checkpoint]`` section, seen with the rest of the job."""

from __future__ import annotations

from collections.abc import Iterator

from forge_core.config.problems import Problem
from forge_core.config.sections import Job


def checkpoint_problems(job: Job) -> list[Problem]:
    """Keys that contradict each other, or would do nothing."""
    return [Problem(("checkpoint", *path), sentence) for path, sentence in _found(job)]


def _found(job: Job) -> Iterator[tuple[tuple[str, ...], str]]:
    section = job.checkpoint
    start, end = section.powers_of_two_from, section.powers_of_two_until
    if start and not end:
        yield ("powers_of_two_from",), "has no effect without powers_of_two_until, the step up to which they are saved"
    elif start > end:
        yield ("powers_of_two_from",), f"{start} is after powers_of_two_until = {end}"
    elif start > job.train.steps:
        yield ("powers_of_two_from",), f"{start} is after the last step, train.steps = {job.train.steps}"
    for key in ("keep_every", "keep_best"):
        if getattr(section, key) and section.keep_last is None and section.mirror_keep_last is None:
            yield (key,), "has no effect without keep_last, since all are kept; set how many of the newest to keep"
    if section.keep_best:
        yield from _best_problems(job)
    if section.mirror is None and section.mirror_keep_last is not None:
        yield ("mirror_keep_last",), "has no effect without mirror"
    if section.load is not None and section.resume not in ("auto", "never"):
        yield ("load",), f"has no effect: checkpoint.resume = {section.resume!r} starts from a whole checkpoint"


def _best_problems(job: Job) -> Iterator[tuple[tuple[str, ...], str]]:
    """A checkpoint is judged by the evaluation of its own step."""
    interval, evaluated = job.checkpoint.interval, job.eval.interval
    if not evaluated:
        yield ("keep_best",), "nothing is evaluated to tell which are the best; set eval.interval"
    elif not interval:
        yield ("keep_best",), "the last checkpoint is the only one while checkpoint.interval = 0"
    elif interval % evaluated:
        sentence = (
            f"a checkpoint is judged by the evaluation at its step, so checkpoint.interval = {interval} must be a "
            f"multiple of eval.interval = {evaluated}"
        )
        yield ("keep_best",), sentence
