"""A pipeline's schedule, written down: the actions of each rank along ``pp``, in its order.

An action is a stage, its work, and a microbatch, as torch writes it: ``2F0`` is the forward of microbatch 0 in stage 2,
``B`` a whole backward, ``I`` one for the input of the stage, and ``W`` one for its weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from typing import NamedTuple

import attrs

_ACTION = re.compile(r"(\d{1,5})([FBIW])(\d{1,5})")


class Action(NamedTuple):
    """One action."""

    stage: int
    kind: str
    """``F``, ``B``, ``I`` or ``W``."""
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@attrs.frozen(slots=False)
class Actions:
    """The actions of all ranks: every stage is on one rank, and has each microbatch forward and backward once."""

    rows: Sequence[Sequence[Action]]
    """A row for each rank, in its order."""

    @cached_property
    def rank_of(self) -> Mapping[int, int]:
        """The rank that holds a stage."""
        return {one.stage: rank for rank, row in enumerate(self.rows) for one in row}

    @property
    def n_microbatches(self) -> int:
        """The number of microbatches of a step."""
        return 1 + max(one.microbatch for row in self.rows for one in row)

    @property
    def splits_backward(self) -> bool:
        """Return whether there is a backward for inputs alone."""
        return any(one.kind == "I" for row in self.rows for one in row)


@cache
def parse_actions(rows: tuple[str, ...]) -> Actions:
    """Parse a row for each rank, actions separated by spaces.

    Raises:
        ValueError: it is no schedule, or one in which ranks would wait for each other for ever.
    """
    actions = Actions([[_parsed(word, rank) for word in row.split()] for rank, row in enumerate(rows)])
    for rank, row in enumerate(actions.rows):
        if not row:
            raise ValueError(f"rank {rank} has no actions")
        _refuse_others_stages(actions, rank)
    _refuse_incomplete(actions)
    _refuse_deadlock(actions)
    return actions


def _parsed(word: str, rank: int) -> Action:
    found = _ACTION.fullmatch(word)
    if found is None:
        raise ValueError(f"rank {rank}: {word!r} is no action; one is a stage, F, B, I or W, and a microbatch, as 2F0")
    return Action(int(found[1]), found[2], int(found[3]))


def _refuse_others_stages(actions: Actions, rank: int) -> None:
    for one in actions.rows[rank]:
        if actions.rank_of[one.stage] != rank:
            raise ValueError(f"stage {one.stage} is on rank {rank} and on rank {actions.rank_of[one.stage]}")


def _refuse_incomplete(actions: Actions) -> None:
    stages, n_microbatches = sorted(actions.rank_of), actions.n_microbatches
    if stages != [*range(len(stages))]:
        raise ValueError(f"has the stages {', '.join(map(str, stages))}, and they count from 0 without a gap")
    counted: dict[tuple[int, int], str] = {}
    for row in actions.rows:
        for one in row:
            before = counted.get((one.stage, one.microbatch), "")
            if (before, one.kind) not in _ORDER:
                after = f" after {', '.join(f'{one.stage}{kind}{one.microbatch}' for kind in before)}" if before else ""
                raise ValueError(f"{one} comes{after}; a stage has each microbatch as F and B, or as F, I and W")
            counted[one.stage, one.microbatch] = before + one.kind
    for stage in stages:
        for microbatch in range(n_microbatches):
            if (done := counted.get((stage, microbatch), "")) not in ("FB", "FIW"):
                missing = {"": "F", "F": "B", "FI": "W"}[done]
                raise ValueError(f"there is no {stage}{missing}{microbatch}, of {n_microbatches} microbatches")


_ORDER = {("", "F"), ("F", "B"), ("F", "I"), ("FI", "W")}
"""What a stage has done with a microbatch, and what may come next."""


def _refuse_deadlock(actions: Actions) -> None:
    """Let each rank do what it can, until all is done or none can do anything."""
    done: set[tuple[int, str, int] | None] = {None}
    at, last = [0] * len(actions.rows), len(actions.rank_of) - 1
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(actions.rows):
            while at[rank] < len(row) and _awaited(row[at[rank]], last) in done:
                done.add(_finished(row[at[rank]]))
                at[rank], moved = at[rank] + 1, True
    for rank, row in enumerate(actions.rows):
        if at[rank] < len(row):
            one = row[at[rank]]
            raise ValueError(f"rank {rank} waits for ever before {one}: {_words(_awaited(one, last))} comes too late")


def _finished(one: Action) -> tuple[int, str, int]:
    """A backward for inputs is as good as a whole one to other stages."""
    return one.stage, "B" if one.kind == "I" else one.kind, one.microbatch


def _awaited(one: Action, last: int) -> tuple[int, str, int] | None:
    """The action of another stage that ``one`` needs, if any."""
    if one.kind == "F":
        return (one.stage - 1, "F", one.microbatch) if one.stage > 0 else None
    return (one.stage + 1, "B", one.microbatch) if one.kind != "W" and one.stage < last else None


def _words(awaited: tuple[int, str, int] | None) -> str:
    assert awaited is not None, "it waits for something"
    return "{}{}{}".format(*awaited)
