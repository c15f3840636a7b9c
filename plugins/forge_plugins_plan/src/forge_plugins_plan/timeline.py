"""What a step makes and frees, in order, and the most that there is at one time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import attrs

from forge_plugins_plan.work import Microbatch, Work


class Change(NamedTuple):
    """A storage is made (``before`` is 0), freed (``after`` is 0), resized, or found to be for something else."""

    category: str
    before: int
    """Bytes."""
    category_after: str
    after: int
    known_as: str = ""
    """Of what is made: its category as it shows only later (gradients are made by backward like all else)."""
    known_size: int = 0
    category_then: str = ""
    """From which it is taken."""


@attrs.frozen
class Repeat:
    """What comes ``times`` times, 2 or more, one after the other."""

    changes: Sequence[Change | Work]
    times: int


Timeline = Sequence["Change | Work | Microbatch | Repeat"]
"""In order. ``Tally`` reads the changes of memory, ``Clock`` the work."""


@attrs.define
class Tally:
    """Bytes by category, as changes come in."""

    current: Counter[str] = attrs.field(factory=Counter)
    known: Counter[str] = attrs.field(factory=Counter)
    """What is to be added to ``current`` where it is known what becomes of it."""
    peak: int = 0
    _at_peak: Counter[str] = attrs.field(factory=Counter)
    largest: Counter[str] = attrs.field(factory=Counter)
    """The most that each category has had, each at its own time."""
    _total: int = 0

    def restart(self) -> None:
        """Look for the peak from here on."""
        self.peak = self._total = sum(self.current.values())
        self._at_peak = Counter(self.current)
        self._at_peak.update(self.known)
        self.largest = Counter(self._at_peak)

    @property
    def at_peak(self) -> Mapping[str, int]:
        """Adds up to ``peak``."""
        return self._at_peak

    def play(self, timeline: Timeline) -> None:
        for one in timeline:
            if isinstance(one, Change):
                self._change(one)
            elif isinstance(one, Repeat):
                self._repeat(one)

    def _change(self, one: Change) -> None:
        current, known = self.current, self.known
        category, before, category_after, after, known_as, known_size, category_then = one
        current[category] -= before
        current[category_after] += after
        if known_as:
            known[category_then] -= known_size
            known[known_as] += known_size
        size = current[category_after] + known[category_after]
        if size > self.largest[category_after]:
            self.largest[category_after] = size
        self._total += after - before
        if self._total > self.peak:
            self.peak = self._total
            self._at_peak = Counter(current)
            self._at_peak.update(known)

    def _repeat(self, one: Repeat) -> None:
        """The first time and the last: between them, what is there at a place grows or shrinks evenly."""
        before, known = Counter(self.current), Counter(self.known)
        self.play(one.changes)
        for counter, start in ((self.current, before), (self.known, known)):
            for category in [*counter]:
                counter[category] += (one.times - 2) * (counter[category] - start[category])
        self._total = sum(self.current.values())
        self.play(one.changes)


def left_by(timeline: Timeline) -> Counter[str]:
    """Bytes by category that are there afterwards and were not before, by what is known of them in the end."""
    left: Counter[str] = Counter()
    for one in timeline:
        if isinstance(one, Change):
            left[one.category] -= one.before
            left[one.category_after] += one.after
            if one.known_as:
                left[one.category_then] -= one.known_size
                left[one.known_as] += one.known_size
        elif isinstance(one, Repeat):
            for category, size in left_by(one.changes).items():
                left[category] += one.times * size
    return left
