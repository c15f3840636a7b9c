"""Lives of a job: from interruption to interruption, by chance."""

from __future__ import annotations

import heapq
import math
from random import Random
from typing import Literal

import attrs

from forge_plugins_plan.failures import CAUSES, UNEXPECTED, Shows
from forge_plugins_plan.figures import Figures
from forge_plugins_plan.long_job import DAY, LongJob, costs_of

LOSSES = ("detection", "lost steps", "waiting for nodes", "restart", "saves", "fewer replicas")
"""What time goes into beside steps that stay:

* ``detection``: from a failure until it is known which rank has failed;
* ``lost steps``: steps that are done again, as they came after the last checkpoint;
* ``waiting for nodes``: where no spare node takes the place of one that is lost;
* ``restart``: processes, groups of ranks, reading a checkpoint;
* ``saves``: what training waits for them;
* ``fewer replicas``: samples that replicas which are gone would have had.
"""


@attrs.frozen
class _Kind:
    """Interruptions that cost the same."""

    shows: Shows | Literal["is planned", "loses the disk"]
    takes_node: bool


def _rates(job: LongJob, figures: Figures) -> dict[_Kind, float]:
    """Interruptions a second."""
    a_second = figures.failures_per_1000_gpus_day * job.gpus / 1000 / DAY
    rates: dict[_Kind, float] = {
        _Kind("is planned", takes_node=False): figures.stops_per_day / DAY,
        _Kind("loses the disk", takes_node=False): figures.lost_file_systems_per_day / DAY,
    }
    for cause in CAUSES:
        kind = _Kind(cause.shows, cause.takes_node)
        rates[kind] = rates.get(kind, 0.0) + a_second * cause.count / UNEXPECTED
    return {kind: rate for kind, rate in rates.items() if rate > 0}


class Life:
    """One life of a job whose ranks all stop when one is lost.

    Args:
        random: decides when it is interrupted, and by what.
        horizon: seconds.
    """

    def __init__(self, job: LongJob, figures: Figures, random: Random, horizon: float) -> None:
        self.job, self.figures, self.random, self.horizon = job, figures, random, horizon
        self.costs = costs_of(job, figures)
        self.kept = 0.0
        """Seconds of steps that stay."""
        self.lost = dict.fromkeys(LOSSES, 0.0)
        self.interruptions = 0
        # a save that comes before the last one is written waits for it
        waits = max(0.0, self.costs.written - job.interval)
        self._of_save = self.costs.of_save + waits
        self._slower = 1 + self.costs.memory_blocked / job.memory_interval
        """Time that training takes with its checkpoints in memory, over time without; they are spread evenly."""
        self._not_on_disk = 0.0
        """Seconds of steps that stay, which a checkpoint in memory alone has."""
        self._cycle = job.interval * self._slower + self._of_save
        self._lag = self.costs.blocked + waits + self.costs.written
        rates = _rates(job, figures)
        self._kinds, self._weights = list(rates), list(rates.values())
        self._rate = sum(self._weights)
        self._used_spares: list[float] = []
        """When each comes back, as a heap."""

    @property
    def time(self) -> float:
        """Seconds that have gone by."""
        return self.kept + sum(self.lost.values())

    def live(self) -> None:
        """Until the horizon, or a little longer if it comes while nothing is trained."""
        while (left := self.horizon - self.time) > 0:
            up = self._until_next()
            if up >= left:
                saves = self._saves_within(left)
                self.lost["saves"] += saves
                self.kept += left - saves
                return
            kind = self._draw()
            self._train_until(up, kind)
            self._start_after(kind)

    def _until_next(self) -> float:
        return self.random.expovariate(self._rate) if self._rate else math.inf

    def _draw(self) -> _Kind:
        self.interruptions += 1
        return self.random.choices(self._kinds, self._weights)[0]

    def _saves_within(self, up: float) -> float:
        """Seconds that saves take of ``up`` seconds of training and saving from a start."""
        if math.isinf(self._cycle):
            return up * (1 - 1 / self._slower)
        cycles, rest = divmod(up + self._phase * self._slower, self._cycle)
        trained = min(rest, self.job.interval * self._slower) / self._slower
        return up - cycles * self.job.interval - trained + self._phase

    @property
    def _phase(self) -> float:
        """Seconds of training from the last step that is saved on the disk, whether or not that was, to where the run
        has started: steps are numbered, so that one which goes on from memory does not begin to count anew."""
        return self._not_on_disk % self.job.interval

    def _train_until(self, up: float, kind: _Kind) -> None:
        """Train and save for ``up`` seconds, of which stays what the last checkpoint has."""
        saves = self._saves_within(up)
        self.lost["saves"] += saves
        done = up - saves
        if kind.shows == "is planned":
            self.kept += done
            self._not_on_disk = 0.0
            self.lost["saves"] += self.costs.blocked + self.costs.written
        elif kind.shows == "loses the disk" and not self.job.has_mirror:
            self.lost["lost steps"] += self.kept + done
            self.kept = self._not_on_disk = 0.0
        else:
            saved = self._saved_within(up, self._lag + (self.costs.copied if kind.shows == "loses the disk" else 0.0))
            if saved:
                self._not_on_disk = 0.0
            if self._leaves_memory(kind):
                in_memory = max(saved, self._in_memory_within(done))
                self._not_on_disk += in_memory - saved
                saved = in_memory
            else:
                self._lose_memory()
            self.kept += saved
            self.lost["lost steps"] += done - saved

    def _saved_within(self, up: float, lag: float) -> float:
        """Seconds of training that checkpoints have which are there ``lag`` seconds after they were begun."""
        if math.isinf(self._cycle):
            return 0.0
        cycles = (up + self._phase * self._slower + self._of_save - lag) // self._cycle
        return max(0.0, cycles * self.job.interval - self._phase)

    def _in_memory_within(self, done: float) -> float:
        """The same of those in memory, of ``done`` seconds of training."""
        if math.isinf(self.job.memory_interval):
            return 0.0
        return max(0.0, (done - self.costs.memory_written) // self.job.memory_interval * self.job.memory_interval)

    def _lose_memory(self) -> None:
        """Go back to what the disk has."""
        self.kept -= self._not_on_disk
        self.lost["lost steps"] += self._not_on_disk
        self._not_on_disk = 0.0

    def _leaves_memory(self, kind: _Kind) -> bool:
        """Whether the run goes on from what is in memory: not where that may be wrong, and only within the job, which
        goes on if a spare node replaces one that is lost. Two nodes side by side are taken not to be lost at a time."""
        is_there = kind.shows in ("ends", "hangs") and not math.isinf(self.job.memory_interval)
        return is_there and (not kind.takes_node or self._has_spare())

    def _start_after(self, kind: _Kind) -> None:
        """Until it trains again; it may be interrupted while it starts."""
        in_memory = True
        while True:
            in_memory = in_memory and self._leaves_memory(kind)
            if not in_memory:
                self._lose_memory()
            start = self.costs.start + (self.costs.memory_read if in_memory else self.costs.read)
            self.lost["detection"] += self._detection(kind)
            self.lost["waiting for nodes"] += self._wait_for_node(kind)
            if kind.shows == "loses the disk" and self.job.has_mirror:
                self.lost["restart"] += self.costs.fetched
            up = self._until_next()
            if up >= start:
                self.lost["restart"] += start
                return
            self.lost["restart"] += up
            kind = self._draw()
            if kind.shows == "loses the disk" and not self.job.has_mirror:
                self.lost["lost steps"] += self.kept
                self.kept = self._not_on_disk = 0.0

    def _detection(self, kind: _Kind) -> float:
        return {
            "ends": self.figures.death_seconds,
            "hangs": self.job.step_timeout + self.figures.hang_seconds,
            "is wrong": self.figures.wrong_seconds,
            "is planned": 0.0,
            "loses the disk": self.figures.death_seconds,
        }[kind.shows]

    def _wait_for_node(self, kind: _Kind) -> float:
        if not kind.takes_node:
            return 0.0
        if self._has_spare():
            heapq.heappush(self._used_spares, self.time + self.costs.spare_away)
            return 0.0
        return self.costs.wait

    def _has_spare(self) -> bool:
        while self._used_spares and self._used_spares[0] <= self.time:
            heapq.heappop(self._used_spares)
        return len(self._used_spares) < self.figures.spares


class LifeOfReplicas(Life):
    """One life of a job whose replicas go on when another is lost, with fewer samples a step."""

    def live(self) -> None:
        """As of ``Life``; what interrupts all replicas, such as wrong numbers, does so as there."""
        self._returns: list[float] = []
        """When each replica that is gone is there again, as a heap."""
        while self.time < self.horizon:
            interrupted = self.time + self._until_next()
            self._train_up_to(min(interrupted, self.horizon))
            if interrupted >= self.horizon:
                return
            kind = self._draw()
            if kind.shows in ("ends", "hangs"):
                self._lose_one(kind)
            else:
                self._lose_steps_of_all(kind)
                self._start_after(kind)
                self._returns.clear()

    def _train_up_to(self, end: float) -> None:
        while self._returns and self._returns[0] < end:
            self._train_for(self._returns[0] - self.time)
            heapq.heappop(self._returns)
            self.lost["restart"] += self.costs.given
        self._train_for(end - self.time)

    def _train_for(self, seconds: float) -> None:
        """With the replicas that are there; saves are spread evenly."""
        seconds = max(0.0, seconds)
        saves = 0.0 if math.isinf(self._cycle) else seconds * self._of_save / self._cycle
        gone = len(self._returns) / self.figures.replicas
        self.lost["saves"] += saves
        self.lost["fewer replicas"] += (seconds - saves) * gone
        self.kept += (seconds - saves) * (1 - gone)

    def _lose_one(self, kind: _Kind) -> None:
        """The others notice, do the step again, and go on; this one is started again."""
        hit = self.random.randrange(int(self.figures.replicas))
        noticed = 0.0
        if hit < len(self._returns):  # it is gone already, and starts again
            del self._returns[hit]
            heapq.heapify(self._returns)
        else:
            noticed = self.figures.replica_death_seconds
            if kind.shows == "hangs":
                noticed = self.figures.replica_hang_seconds
            self.lost["detection"] += noticed
            self.lost["lost steps"] += self.random.random() * self.job.step_seconds
        known = max(0.0, self._detection(kind) - noticed)
        back = known + self._wait_for_node(kind) + self.costs.start + self.costs.read
        heapq.heappush(self._returns, self.time + back)

    def _lose_steps_of_all(self, kind: _Kind) -> None:
        """Since the last checkpoint, which may be anywhere between this and the next."""
        since = self.random.random() * self.job.interval + self._lag
        if kind.shows == "is planned":
            self.lost["saves"] += self.costs.blocked + self.costs.written
            return
        if kind.shows == "loses the disk":
            since = since + self.costs.copied if self.job.has_mirror else math.inf
        lost = min(self.kept, since)
        self.kept -= lost
        self.lost["lost steps"] += lost
