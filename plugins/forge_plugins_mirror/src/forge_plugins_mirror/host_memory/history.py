"""Which checkpoints in memory belong to a run: a file in the run's directory says it."""

from __future__ import annotations

import json
import math
import re
import uuid
from contextlib import suppress
from pathlib import Path

import attrs

from forge_core.checkpoint.fsync import write_durably
from forge_core.config.regular_file import read_regular_file

FILE_NAME = "memory.json"
_MAX_BYTES = 2**24


@attrs.frozen
class History:
    """The stretches of a run. A stretch is what one start trains, or what follows where the run has gone back.

    Checkpoints in memory lie in a folder of their stretch. Those of a stretch count up to the step from which a later
    one goes on: the steps after it are trained again.
    """

    directory: str
    """The run's. A copy of it elsewhere is another run, which has nothing in memory."""
    folder: str
    """Name of the folder that the run has in each node's memory. No other run has it."""
    stretches: tuple[tuple[str, int], ...] = ()
    """Name of each, which begins with that of its start, and the step from which it goes on; -1 afresh."""
    newest: str = ""
    """Name of the newest checkpoint in memory, for scripts that ask whether the run gets further."""

    @classmethod
    def new(cls, run_directory: Path) -> History:
        """A run that has nothing in memory."""
        words = re.sub(r"[^\w.]+", "-", run_directory.name)[:60]
        return cls(str(run_directory.resolve()), f"forge-{words}-{uuid.uuid4().hex[:12]}")

    @classmethod
    def read(cls, run_directory: Path) -> History | None:
        """What is known of the run in this directory; ``None`` if it has nothing in memory."""
        try:
            known = json.loads(read_regular_file(run_directory / FILE_NAME, _MAX_BYTES, follow_link=False))
            stretches = tuple((str(name), int(step)) for name, step in known["stretches"])
            found = cls(str(known["directory"]), str(known["folder"]), stretches, str(known["newest"]))
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None
        are_names = re.fullmatch(r"forge-[\w.-]+", found.folder) and all(
            re.fullmatch(r"\w[\w.-]*", name) for name, _ in stretches
        )
        return found if are_names and found.directory == str(run_directory.resolve()) else None

    def write(self) -> None:
        """Into the run's directory, flushed."""
        write_durably(Path(self.directory) / FILE_NAME, json.dumps(attrs.asdict(self)) + "\n")

    def going_on_from(self, step: int, attempt: str) -> History:
        """With another stretch, of the start with this name."""
        return attrs.evolve(self, stretches=(*self.stretches, (f"{attempt}-{len(self.stretches)}", step)))

    def has_last_start(self) -> bool:
        """Return whether the last start that has trained here was one of these. Otherwise it was one without memory,
        which may have given up steps that are there."""
        last = ""
        with suppress(OSError), (Path(self.directory) / "events.jsonl").open(errors="replace") as lines:
            for line in lines:
                last = _attempt_of(line) or last
        return bool(last) and any(name.rpartition("-")[0] == last for name, _ in self.stretches)

    @property
    def stretch(self) -> str:
        """The last one, which is trained now."""
        return self.stretches[-1][0]

    def last_steps(self) -> dict[str, float]:
        """By stretch: the last step whose checkpoint counts."""
        found: dict[str, float] = {}
        last = math.inf
        for name, start in reversed(self.stretches):
            found[name] = last
            last = min(last, start)
        return found


def _attempt_of(line: str) -> str:
    """The name of the start that a line of ``events.jsonl`` tells of; nothing if it tells something else."""
    try:
        event = json.loads(line) if '"attempt"' in line else None
    except (ValueError, RecursionError):  # cut short by a crash
        return ""
    return str(event["attempt"]) if isinstance(event, dict) and event.get("event") in ("started", "resumed") else ""
