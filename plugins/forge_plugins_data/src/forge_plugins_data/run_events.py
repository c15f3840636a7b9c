"""What the events of a run say of its samples."""

from __future__ import annotations

import json
from pathlib import Path


def steps_without_update(events: Path) -> set[int] | None:
    """The steps whose updates a run has left out, and not done again later.

    Args:
        events: its ``events.jsonl``.

    Returns:
        ``None`` if the file cannot be read.
    """
    try:
        lines = events.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    found: set[int] = set()
    for line in lines:
        try:
            event = json.loads(line)
            name, step = event["event"], int(event["to_step"] if event["event"] == "rolled_back" else event["step"])
        except (ValueError, TypeError, KeyError):  # a line that a crash has cut off, or an event without a step
            continue
        if name == "skipped":
            found.add(step)
        elif name in ("started", "resumed", "rolled_back"):  # the steps after it are done again
            found = {one for one in found if one <= step}
    return found
