"""When the operations of a step begin and end: on the device, on the host, and on the links between ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import attrs

from forge_plugins_plan.machine import Machine
from forge_plugins_plan.timeline import Repeat, Timeline
from forge_plugins_plan.work import (
    ALL_GATHER,
    ATTENTION,
    COLLECTIVES,
    MEMORY,
    PRODUCT,
    RECEIVE,
    SEND,
    Microbatch,
    Work,
)

PARTS = ("products", "attention", "memory", "optimizer", "communication", "bubble", "host")
"""What a step's time is for:

* ``products``, ``attention``: of matrices, and attention, forward and backward;
* ``memory``: what else forward and backward do, which takes as long as its bytes do;
* ``optimizer``: its step, and the clipping of gradients;
* ``communication``: collectives, as far as nothing is computed beside them;
* ``bubble``: waiting for other stages of a pipeline;
* ``host``: the device waits for Python.
"""
_PART_OF = {PRODUCT: "products", ATTENTION: "attention", MEMORY: "memory"}

FUSION = 2.6
"""How many times fewer bytes compiled blocks move than blocks as they are written; an assumption."""


_Reading = tuple[float, float, dict[str, float]]
"""Of a clock: ``now``, ``hidden`` and ``parts``."""


class StuckError(Exception):
    """Stages of a pipeline wait for each other."""


@attrs.frozen
class StepTime:
    """What a step takes, in seconds."""

    seconds: float
    parts: Mapping[str, float]
    """By the names of ``PARTS``, of the stage that has most to do; they add up to ``seconds``."""
    hidden: float
    """Collectives that run beside what is computed, on that stage."""


def step_time(
    stages: Sequence[tuple[Timeline, Timeline]], machine: Machine, microbatches: int = 1, *, compiled: bool = False
) -> StepTime:
    """What a step takes whose stages do this, each on its own ranks.

    Args:
        stages: forward and backward, and what the optimizer does.
        microbatches: of a step without a pipeline. Of more than two, those in the middle take what the shorter of the
            first and the last takes.
        compiled: blocks are compiled.

    Raises:
        StuckError: stages wait for each other.
    """
    sent: dict[tuple[int, int], list[float]] = defaultdict(list)
    clocks = [Clock(machine, compiled, stage, sent) for stage in range(len(stages))]
    playing = {stage: clocks[stage].play(run) for stage, (run, _) in enumerate(stages)}
    while playing:
        before = sum(clock.progress for clock in clocks)
        for stage, player in [*playing.items()]:
            if next(player, "done") == "done":
                del playing[stage]
        if playing and sum(clock.progress for clock in clocks) == before:
            raise StuckError("the stages of the pipeline wait for each other")
    for clock in clocks:
        clock.finish_run(microbatches)
    last = max(clock.now for clock in clocks)
    for clock, (_, changes) in zip(clocks, stages, strict=True):
        clock.wait(last, "bubble")
        for _ in clock.play(changes):
            raise AssertionError("an optimizer waits for no stage")
        clock.drain()
    total = max(clock.now for clock in clocks)
    busiest = min(clocks, key=lambda clock: clock.parts["bubble"])
    busiest.wait(total, "bubble")
    return StepTime(total, {part: busiest.parts[part] for part in PARTS}, busiest.hidden)


def busy_time(run: Timeline, changes: Timeline, machine: Machine, *, compiled: bool) -> tuple[StepTime, StepTime]:
    """What one stage of a pipeline has to do, without its waits: forward and backward, and the optimizer."""
    ends = []
    for timeline in (run, changes):
        clock = Clock(machine, compiled)
        for one in timeline:
            if isinstance(one, (Work, Repeat)) and not (isinstance(one, Work) and one.kind in (SEND, RECEIVE)):
                clock.do(one)
        clock.drain()
        ends.append(StepTime(clock.now, dict(clock.parts), clock.hidden))
    return ends[0], ends[1]


@attrs.define
class Clock:
    """Of one rank."""

    machine: Machine
    compiled: bool = False
    stage: int = 0
    sent: dict[tuple[int, int], list[float]] = attrs.field(factory=lambda: defaultdict(list))
    """When what a stage has sent to another is there, in order."""
    now: float = 0.0
    """The device has done all that it has been asked."""
    progress: int = 0
    parts: dict[str, float] = attrs.field(factory=lambda: dict.fromkeys(PARTS, 0.0))
    hidden: float = 0.0
    _host: float = 0.0
    """The host has asked for all that it has come to."""
    _links: float = 0.0
    """Collectives beside the computation are done."""
    _may_gather: float = 0.0
    """The next unit is gathered from here on: FSDP gathers one while it computes another."""
    _gathers: list[float] = attrs.field(factory=list)
    """When units are there that nothing has waited for yet."""
    _marks: list[_Reading] = attrs.field(factory=list)
    _known: dict[Work, float] = attrs.field(factory=dict)

    def play(self, timeline: Timeline) -> Iterator[None]:
        """Do what it says, and pause where something has to be received that no stage has sent yet."""
        for one in timeline:
            if isinstance(one, Work) and one.kind == RECEIVE:
                while len(self.sent[one.peer, self.stage]) <= one.number:
                    yield
                self.wait(self.sent[one.peer, self.stage][one.number], "bubble")
                self.progress += 1
            elif isinstance(one, Work) and one.kind == SEND:
                self._send(one)
            elif isinstance(one, (Work, Repeat, Microbatch)):
                self.do(one)

    def wait(self, until: float, part: str) -> None:
        """Nothing is done until then, for the reason that is ``part``."""
        if until > self.now:
            self.parts[part] += until - self.now
            self.now = until

    def drain(self) -> None:
        """Wait for collectives that run beside the computation."""
        waited = max(0.0, self._links - self.now)
        self.hidden -= waited
        self.wait(self._links, "communication")

    def finish_run(self, microbatches: int) -> None:
        """Forward and backward end; those of the microbatches that have not been played are added."""
        self.drain()
        if len(self._marks) < 2 or microbatches <= 2:
            return
        ends = [*self._marks[1:], (self.now, self.hidden, dict(self.parts))]
        spans = [(end[0] - start[0], start, end) for start, end in zip(self._marks, ends, strict=True)]
        _, start, end = min(spans, key=lambda span: span[0])
        self._add(start, end, microbatches - 2)

    def do(self, one: Work | Repeat | Microbatch) -> None:
        """What needs nothing from another stage."""
        if isinstance(one, Microbatch):
            self._marks.append((self.now, self.hidden, dict(self.parts)))
        elif isinstance(one, Repeat):
            self._repeat(one)
        elif one.kind in COLLECTIVES:
            self._collective(one)
        else:
            self._operation(one)

    def _repeat(self, one: Repeat) -> None:
        """After the first time, each takes what the second takes."""
        work = [each for each in one.changes if isinstance(each, Work)]
        for each in work:
            self.do(each)
        start = self.now, self.hidden, dict(self.parts)
        others = self._host, self._links, self._may_gather
        for each in work:
            self.do(each)
        end = self.now, self.hidden, dict(self.parts)
        times = one.times - 2
        self._host += times * (self._host - others[0])
        self._links += times * (self._links - others[1])
        self._may_gather += times * (self._may_gather - others[2])
        self._gathers = [there + times * (end[0] - start[0]) for there in self._gathers]
        self._add(start, end, times)

    def _add(self, start: _Reading, end: _Reading, times: int) -> None:
        self.now += times * (end[0] - start[0])
        self.hidden += times * (end[1] - start[1])
        for part in end[2]:
            self.parts[part] += times * (end[2][part] - start[2][part])

    def _operation(self, one: Work) -> None:
        seconds = self._seconds(one)
        part = "optimizer" if one.during == "optimizer" else _PART_OF[one.kind]
        fused = self.compiled and one.during == "activations"
        if fused and one.kind == MEMORY:
            seconds /= FUSION
        if one.overlaps and self._gathers:
            there = self._gathers.pop(0)
            self.hidden -= max(0.0, there - self.now)
            self.wait(there, "communication")
            self._may_gather = self.now
        self._ask(0.0 if fused else self.machine.host_seconds)
        self.now += seconds
        self.parts[part] += seconds

    def _collective(self, one: Work) -> None:
        seconds = self._seconds(one)
        self._ask(self.machine.host_seconds)
        if not (one.overlaps and self.machine.runs_ahead):
            self.now += seconds
            self.parts["communication"] += seconds
            return
        self.hidden += seconds
        gathers = one.kind == ALL_GATHER
        self._links = max(self._links, self._may_gather if gathers else self.now) + seconds
        if gathers:
            self._gathers.append(self._links)

    def _send(self, one: Work) -> None:
        self._ask(self.machine.host_seconds)
        self.sent[self.stage, one.peer].append(self.now + self._seconds(one))
        self.progress += 1

    def _ask(self, seconds: float) -> None:
        """The host is busy for so long, and the device cannot begin before it is asked."""
        if not self.machine.runs_ahead:
            self.now += seconds
            self.parts["host"] += seconds
            return
        self._host += seconds
        self.wait(self._host, "host")

    def _seconds(self, one: Work) -> float:
        if one not in self._known:
            self._known[one] = self.machine.seconds(one)
        return self._known[one]
