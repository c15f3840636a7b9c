"""Diagnosis: which rank is missing, from the signs of life that have been read."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from forge_core.errors import and_more

SILENCE = 3.0
"""Seconds without a sign of life after which a rank is said to be gone."""
_NAMED = 4
"""Ranks in a sentence; of more, the number is given."""

Finding = tuple[str, Sequence[int]]
"""A sentence, and the ranks that it is about."""


@attrs.frozen
class Sign:
    """The latest sign of life of a rank, and when it came."""

    said: Mapping[str, Any]
    since: float
    is_gone: bool = False
    """Its process is on this machine, and has ended before that was read."""


@attrs.frozen
class Diagnosis:
    """The state of all ranks, as far as it is known now."""

    signs: Mapping[int, Sign]
    answered: float
    """When the store has answered last."""
    now: float = attrs.field(factory=time.monotonic)

    def missing(self) -> Finding | None:
        """Name the ranks that have ended, or that give no sign of life."""
        failed = [(rank, f"has ended: {one.said['failure']}") for rank, one in self._each() if one.said["failure"]]
        if failed:
            return self._finding(failed)
        expected = [(rank, one) for rank, one in self._each() if not one.said["gave_up"] and not one.said["done"]]
        gone = [
            (rank, f"has ended without a word: its process {one.said['process']['number']} is gone")
            for rank, one in expected
            if one.is_gone
        ]
        if gone:
            return self._finding(gone)
        silent = [
            (rank, f"has given no sign of life for {self.now - one.since:.0f} s, since step {one.said['step']}")
            for rank, one in expected
            if self.now - one.since >= SILENCE
        ]
        if self.now - self.answered >= SILENCE:
            at = os.environ.get("MASTER_ADDR", "its host")
            silent = [(0, f"does not answer: nothing has come from {at} for {self.now - self.answered:.0f} s")]
        return self._finding(silent)

    def not_coming(self) -> Finding | None:
        """Name the ranks that live, and have not given up waiting as this one has."""
        return self._finding(
            [
                (rank, f"is alive and does not come: it is in step {one.said['step']}, at {one.said['where']}")
                for rank, one in self._each()
                if not one.said["gave_up"] and not one.said["done"]
            ]
        )

    def positions(self, *, without: int | None = None) -> str:
        """Where each rank is; first the ranks at a position where few are.

        Args:
            without: a rank to leave out.
        """
        others = [(rank, one) for rank, one in self._each() if rank != without]
        count = Counter(one.said["where"] for _, one in others)
        if without is None:
            others.sort(key=lambda entry: count[entry[1].said["where"]])
        found = self._finding(
            [(rank, f"is in step {one.said['step']}, at {one.said['where']}") for rank, one in others]
        )
        return found[0] if found else ""

    def have_ended(self, ranks: Sequence[int]) -> bool:
        """Return whether the processes of all of them are gone."""
        return all(rank in self.signs and self.signs[rank].is_gone for rank in ranks)

    def _each(self) -> list[tuple[int, Sign]]:
        return sorted(self.signs.items())

    def _finding(self, ranks: Sequence[tuple[int, str]]) -> Finding | None:
        hosts = {rank: f" on {one.said['host']}" for rank, one in self.signs.items()}
        named = [f"rank {rank}{hosts.get(rank, '')} {what}" for rank, what in ranks[:_NAMED]]
        more = and_more(len(ranks), _NAMED, "; ")
        return ("; ".join(named) + more, [rank for rank, _ in ranks]) if ranks else None
