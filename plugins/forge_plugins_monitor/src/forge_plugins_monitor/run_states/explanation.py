"""Why a run stopped, what it has lost, and what to type next: told from its own files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

import attrs

from forge_core.contracts.callback import TIME_LIMIT
from forge_plugins_monitor.run_states.progress import (
    RunProgress,
    holder_of,
    job_of,
    killed_by,
    objects,
    progress_of,
    tail,
)

ENDS = {"completed": 0, "preempted": 3, "stopped": 3, "failed": None}
"""Events of which one is the last of a start that is not killed, and the exit code; of a failure, it has its own."""
REGULAR = ("started", "resumed", "saved", "mirrored", "kept_in_memory", "exported", "phase", "replicas")
"""Events of every run, which explain nothing."""
TROUBLE = {
    "skipped": "updates left out",
    "rolled_back": "times back to a checkpoint",
    "save_failed": "checkpoints could not be written",
    "mirror_failed": "copies to the mirror failed",
    "mirror_skipped": "checkpoints were removed before they could be copied to the mirror",
    "export_failed": "exports failed",
    "export_skipped": "exports left out, as the one before took too long",
    "data_damaged": "files of the data are damaged",
    "step_again": "steps done again, as a replica was lost in them",
    "taken_over": "times the state of another replica was taken over",
    "stopping": "times told to stop by the clock",
}
"""Events that may be part of the reason, and what a number of them are."""
_ASKED = {
    "SIGUSR1": "SIGUSR1, with which schedulers tell of the end of a job's time",
    "SIGTERM": "SIGTERM, from a scheduler or a person",
    "SIGHUP": "SIGHUP, as its terminal was closed",
    "SIGINT": "Ctrl-C",
    TIME_LIMIT: "the clock, as its time was over",
}


@attrs.frozen(kw_only=True)
class Explanation:
    """What there is to know about the end of a run."""

    run: Path
    state: str
    """As in ``RunProgress``."""
    exit_code: int | None
    """``None`` for a run that goes on, or was killed."""
    why: str
    """Half a sentence, behind the name of the run."""
    step: int
    steps: int | None
    checkpoint: int | None
    lost_steps: int
    """Those after the newest checkpoint, of a run that is gone without saving."""
    lost_seconds: float | None
    """That they took; ``None`` where the metrics do not tell."""
    notes: Sequence[str]
    """What else happened since its last start."""
    next: str
    """The command to type."""
    aim: str
    """What that does."""


def explain(run: Path, known: str | None = None) -> Explanation:
    """Read the directory of a run, which may be running.

    Args:
        known: ``"queued"`` or ``"running"``, if somebody knows it better than the files of the run.
    """
    job, events = job_of(run / "job.toml"), _of_last_start(run)
    progress = progress_of(run, job, known)
    end = events[-1] if events and events[-1]["event"] in ENDS else {}
    has_saved = end.get("event") in ("completed", "preempted", "stopped")
    is_gone = progress.state == "failed" and not has_saved
    lost = max(0, progress.step - (progress.checkpoint or 0)) if is_gone else 0
    seconds = progress.step_seconds
    why = _why(run, progress, end)
    command, aim = _next(run, progress, end, job)
    return Explanation(
        run=run,
        state=progress.state,
        exit_code=None if progress.state in ("running", "queued") else _exit_code(end),
        why=why,
        step=progress.step,
        steps=progress.steps,
        checkpoint=progress.checkpoint,
        lost_steps=lost,
        lost_seconds=None if seconds is None else lost * seconds,
        notes=[*_notes(events), *_launcher(run, command)],
        next=command,
        aim=aim,
    )


def in_words(told: Explanation) -> str:
    """Lines: why it stopped, what it has lost, what else happened, what to type."""
    lines = [f"{told.run} {told.why}."]
    if told.state in ("failed", "stopped"):
        lines.append(_lost(told))
    lines += told.notes
    return "\n".join([*lines, f"next, {told.aim}: {told.next}"])


def _lost(told: Explanation) -> str:
    if told.checkpoint is None:
        return (
            f"There is no checkpoint, so that {told.step} steps are lost." if told.step else "Nothing was trained yet."
        )
    if not told.lost_steps:
        return f"Nothing is lost: the newest checkpoint is of step {told.checkpoint}."
    time = "" if told.lost_seconds is None else f" ({_duration(told.lost_seconds)})"
    return f"The newest checkpoint is of step {told.checkpoint}: {told.lost_steps} steps{time} are lost."


def _of_last_start(run: Path) -> list[dict[str, Any]]:
    events = [event for event in objects(run / "events.jsonl") if isinstance(event.get("event"), str)]
    starts = [index for index, event in enumerate(events) if event["event"] in ("started", "resumed")]
    return events[starts[-1] :] if starts else events


def _exit_code(end: Mapping[str, Any]) -> int | None:
    code = ENDS.get(end.get("event", "")) if end else None
    return end.get("exit_code") if code is None else code


def _why(run: Path, progress: RunProgress, end: Mapping[str, Any]) -> str:
    at = f"step {progress.step}" + ("" if progress.steps is None else f" of {progress.steps}")
    if progress.state == "running":
        return f"has not stopped: it is running, in {at}"
    if progress.state == "queued":
        return f"has not ended: its job waits in the queue, at {at}"
    if progress.state == "prepared":
        return "has never started"
    event, reason = end.get("event"), str(end.get("reason", ""))
    if event == "completed" or (event is None and progress.state == "finished"):
        return f"has reached its end, {at} (exit code 0)"
    if event in ("preempted", "stopped"):
        asked = _ASKED.get(reason) or f"a callback: {reason}"
        return f"was stopped at {at} by {asked}; it has saved (exit code 3)"
    if event == "failed":
        code = "" if end.get("exit_code") is None else f" (exit code {end['exit_code']})"
        return f"failed at {at}: {_cause(end)}{code}"
    return f"was killed at {at}: {_killer(run)}"


def _cause(end: Mapping[str, Any]) -> str:
    """The error of the event ``failed``, behind what kind of an end that is."""
    kind, _, message = str(end.get("error", "")).partition(": ")
    code = end.get("exit_code")
    said = " ".join(message.split()).rstrip(".") or kind
    if code == 130:
        return "a second Ctrl-C ended it at once"
    if "OutOfMemoryError" in kind:
        return f"the memory of the GPU was full: {said}"
    by_code = {
        2: "the configuration, the data or a plugin is wrong",
        4: "too many losses or gradients were not finite",
        5: "it lost another rank",
    }
    by_kind = {"SaveError": "a checkpoint could not be written", "LeaseLostError": "another start has taken it over"}
    words = by_kind.get(kind) or by_code.get(code if isinstance(code, int) else -1)
    return f"{words}: {said}" if words else str(end.get("error") or "an unforeseen error").rstrip(".")


def _killer(run: Path) -> str:
    """Of a start that could say nothing any more."""
    killed, holder = killed_by(run), holder_of(run)
    if killed:
        return f"by {killed}"
    if holder is not None and holder.has_ended:
        return "its process is gone without a word, as by kill -9 or by the kernel for want of memory"
    last = next(iter(tail(run / "log.txt")[-1:]), "")
    return "it has written nothing any more, and its host cannot be asked" + (
        f"; its last line: {last}" if last else ""
    )


def _next(run: Path, progress: RunProgress, end: Mapping[str, Any], job: Mapping[str, Any]) -> tuple[str, str]:
    """The command, and what it does."""
    command = _command(run, job)
    train, optimizer = (job[name] if isinstance(job.get(name), Mapping) else {} for name in ("train", "optimizer"))
    error = str(end.get("error", ""))
    if progress.state in ("running", "queued"):
        return f"forge runs -f {quote(str(run))}", "to see its lines as they come"
    if progress.state == "finished":
        return f"forge report {quote(str(run))}", "for its curves"
    if end.get("event") != "failed":
        return command, "to go on from there" if progress.checkpoint else "to start it"
    if error.startswith("LeaseLostError"):
        return f"forge runs -f {quote(str(run))}", "to see what the other start does"
    if error.startswith("SaveError"):
        return command, "when there is room on the disk"
    if end.get("exit_code") == 4 and isinstance(optimizer.get("lr"), float):
        return f"{command} optimizer.lr={optimizer['lr'] / 2:g}", "with half the learning rate"
    batch = train.get("batch_size")
    if "OutOfMemoryError" in error and isinstance(batch, int) and batch > 1:
        again = int(train.get("grad_accumulation") or 1) * 2
        keeps = "" if "global_batch_size" in train else f" train.grad_accumulation={again}"
        return f"{command} train.batch_size={batch // 2}{keeps}", "with half the microbatch, and the same batch"
    if end.get("exit_code") == 2:
        return command, "when that is mended"
    if end.get("exit_code") == 1:
        return f"{command} --debug", "which shows where, if it comes again"
    return command, "to go on from there" if progress.checkpoint else "to start it again"


def _command(run: Path, job: Mapping[str, Any]) -> str:
    """What was typed; a job of its own does without the file that was named. A directory that was copied or renamed
    would be left as it is by that alone."""
    command = _environment(run).get("command")
    if not (isinstance(command, str) and command.startswith("forge run ")):
        command = f"forge run {quote(str(run / 'job.toml'))}"
    own = run.resolve()
    if _is_of_another(own, job):
        return f"{command} {quote(f'run.dir={own.parent}')} {quote(f'run.name={own.name}')}"
    return command


def _is_of_another(own: Path, job: Mapping[str, Any]) -> bool:
    """Return whether a run's directory has the job of another one."""
    section = job.get("run")
    if not isinstance(section, Mapping):
        return False
    meant = Path(str(section.get("dir", "runs"))).expanduser() / str(section.get("name", own.name))
    # where the run was started from is not known
    is_own = not meant.is_absolute() and own.parts[-len(meant.parts) :] == meant.parts
    return not is_own and meant.resolve() != own


def _environment(run: Path) -> Mapping[str, Any]:
    try:
        environment = json.loads((run / "environment.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return environment if isinstance(environment, Mapping) else {}


def _launcher(run: Path, command: str) -> Sequence[str]:
    ranks = _environment(run).get("world_size")
    if not isinstance(ranks, int) or ranks < 2 or "--nproc" in command or not command.startswith("forge run "):
        return ()
    return (f"Its {ranks} ranks were started by a launcher, such as torchrun: start them by that again.",)


def _notes(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each kind of trouble since the start."""
    notes = []
    passed_over = events[0].get("passed_over") if events else None
    if passed_over:
        notes.append(f"The start passed over damaged checkpoints: {', '.join(map(str, passed_over))}.")
    for name, words in TROUBLE.items():
        those = [event for event in events if event["event"] == name]
        if those:
            last = those[-1]
            more = next((f": {last[key]}" for key in ("reason", "error") if last.get(key)), "")
            if "to_step" in last:
                more = f", to step {last['to_step']}"
            notes.append(f"Since its start: {len(those)} {words}, the last at step {last.get('step', '?')}{more}.")
    return notes


def _duration(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
