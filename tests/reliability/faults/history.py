"""What must hold of a run's history, however often it was interrupted: checked from what it wrote down."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any


def problems_of(
    events: list[dict[str, Any]],
    metrics: list[dict[str, Any]],
    losses: Mapping[int, set[tuple[float, float]]],
    damaged: Collection[int] = (),
) -> Iterator[str]:
    """Sentences; none if all is well.

    Args:
        events: of ``events.jsonl``, of all attempts.
        metrics: of ``metrics.jsonl``, every step logged: the lineage that has survived.
        losses: by step, what every attempt that came so far had to say.
        damaged: steps whose checkpoint was damaged on purpose.
    """
    yield from _lost_or_interleaved(events, set(damaged))
    for step, values in sorted(losses.items()):
        if len(values) > 1:
            yield f"step {step} was done again, and came out otherwise: {sorted(values)}"
    yield from _gaps(metrics)


def _lost_or_interleaved(events: list[dict[str, Any]], damaged: set[int]) -> Iterator[str]:
    """What is acknowledged is resumed from; attempts follow each other; only the last one commits."""
    saved, at = 0, 0
    attempts: list[str] = []
    for event in events:
        kind = event["event"]
        if kind in ("started", "resumed"):
            if event["attempt"] in attempts:
                yield f"attempt {event['attempt']} has started twice"
            attempts.append(event["attempt"])
            at = event["step"]
            if at < saved and saved not in damaged:
                yield f"step {saved} was acknowledged, and the next attempt began at {at}"
            saved = at
        elif kind == "saved":
            if event["step"] <= at:
                yield f"step {event['step']} was saved after {at}: by another attempt"
            saved = at = event["step"]


def _gaps(metrics: list[dict[str, Any]]) -> Iterator[str]:
    """Each position in the data is consumed once: tokens grow by the same with every step, and no step is missing."""
    lines = [line for line in metrics if "loss" in line]
    for number, line in enumerate(lines, 1):
        if line["step"] != number:
            yield f"step {line['step']} is where step {number} should be"
            return
        if line["tokens"] != number * lines[0]["tokens"]:
            yield f"after step {number}, {line['tokens']} tokens have been consumed, not {number * lines[0]['tokens']}"
