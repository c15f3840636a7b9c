"""Diagnosis: which rank is missing, from the signs of life that have been read."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import attrs

from forge_core.errors import and_more
from forge_plugins_monitor.peers.pulses import SILENCE

_NAMED = 4
"""Ranks in a sentence; of more, the number is given."""


class Need(IntEnum):
    """How much a rank wants to know how the others are."""

    NONE = 0
    LATE = 1
    """A third of its time for a step has passed: signs of life are collected, and nothing is said."""
    OVERDUE = 2
    """All of it has passed, or a collective has timed out."""
    LOST = 3
    """A collective has failed, or the process of a rank is gone."""


@attrs.frozen
class Finding:
    """A sentence for all ranks, and the ranks that it is about."""

    sentence: str
    ranks: Sequence[int] = ()
    have_ended: bool = False
    """The processes of these ranks are gone."""


@attrs.frozen
class Sign:
    """The latest sign of life of a rank."""

    said: Mapping[str, Any]
    age: float
    """Seconds since it came."""
    is_gone: bool = False
    """Its process has ended, as its node sees."""

    @property
    def where(self) -> str:
        """Where in the code it is. A rank says so once it is late, or another one asks."""
        return str(self.said["where"] or "an unknown place")

    @property
    def is_awaited(self) -> bool:
        """Return whether others may be waiting for it: it has not given up itself, and is not at its end."""
        return not self.said["gave_up"] and not self.said["done"]

    @property
    def died(self) -> bool:
        """Return whether it has ended without a word."""
        return self.is_gone and self.is_awaited and not self.said["failure"]


@attrs.frozen
class Diagnosis:
    """The state of all ranks, as far as it is known."""

    signs: Mapping[int, Sign]
    store_silent: float = 0.0
    """Seconds since the store has answered last."""

    def missing(self) -> Finding | None:
        """Name the ranks that have ended, or that give no sign of life."""
        failed = [(rank, f"has ended: {one.said['failure']}") for rank, one in self._each() if one.said["failure"]]
        if failed:
            return self._finding(failed)
        gone = [
            (rank, f"has ended without a word: its process {one.said['process']['number']} is gone")
            for rank, one in self._each()
            if one.died
        ]
        if gone:
            return self._finding(gone, have_ended=True)
        silent = [
            (rank, f"has given no sign of life for {one.age:.0f} s, since step {one.said['step']}")
            for rank, one in self._each()
            if one.is_awaited and one.age >= SILENCE
        ]
        if self.store_silent >= SILENCE:
            at = os.environ.get("MASTER_ADDR", "its host")
            others = [(rank, what) for rank, what in silent if rank]
            silent = [(0, f"does not answer: nothing has come from {at} for {self.store_silent:.0f} s"), *others]
        return self._finding(silent)

    def not_coming(self) -> Finding | None:
        """Name the ranks that live, and have not given up waiting as others have."""
        return self._finding(
            [
                (rank, f"is alive and does not come: it is in step {one.said['step']}, at {one.where}")
                for rank, one in self._each()
                if one.is_awaited
            ]
        )

    def waiting(self) -> Finding:
        """Say where all are; first the ranks at a position where few are."""
        count = Counter(one.where for _, one in self._each())
        each = sorted(self._each(), key=lambda entry: count[entry[1].where])
        found = self._finding([(rank, f"is in step {one.said['step']}, at {one.where}") for rank, one in each])
        wait = "all of them still give signs of life, and wait for each other"
        return Finding(f"{wait}: {found.sentence}" if found else wait)

    def _each(self) -> list[tuple[int, Sign]]:
        return sorted(self.signs.items())

    def _finding(self, ranks: Sequence[tuple[int, str]], *, have_ended: bool = False) -> Finding | None:
        if not ranks:
            return None
        hosts = {rank: f" on {one.said['host']}" for rank, one in self.signs.items()}
        named = [f"rank {rank}{hosts.get(rank, '')} {what}" for rank, what in ranks[:_NAMED]]
        more = and_more(len(ranks), _NAMED, "; ")
        return Finding("; ".join(named) + more, [rank for rank, _ in ranks], have_ended)
