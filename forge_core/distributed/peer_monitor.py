"""The other ranks: who is there, who is not, and how this one ends when one of them is lost."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from forge_core.config.sections import RunSection
from forge_core.contracts.callback import Callback, RunContext
from forge_core.distributed.diagnosis import SILENCE, Finding
from forge_core.distributed.heartbeat import BEAT, Condition, Heartbeat
from forge_core.distributed.position import position_of_error
from forge_core.distributed.step_timeout import LEAVE_AFTER, SAY_AFTER, End, StepTimeout
from forge_core.distributed.torchrun import agent_without_restarts
from forge_core.distributed.watchdog import Watchdog
from forge_core.errors import LostPeerError, SaveError

_LEAVING = 8.0
"""Seconds that a rank which has lost another gets to close its files."""

_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "No route to host",
    "Network is unreachable",
    "Connection refused",
    "pair closure",
    "timed out",
    "Timed out waiting",
    "timeout after",
    "remote process exited",
    "ncclRemoteError",
)
"""How gloo, NCCL and torch's stores say that another rank is gone or does not come."""


class PeerMonitor(Callback):
    """Tells the other ranks how far this one is (heartbeat), finds out who is missing when they wait in vain
    (diagnosis), and ends this rank if it comes no further (step timeout).

    The training thread calls ``beat``; if it does not within the time that the run gives it, this process ends with
    exit code 5. A group of one has nothing to wait for, and none of this happens.
    """

    def __init__(self, run: RunSection, run_directory: Path) -> None:
        self._run = run
        self._alone = dist.get_world_size() == 1
        if self._alone:
            return
        self._rank = dist.get_rank()
        self._who = f"rank {self._rank} on {socket.gethostname()}"
        self._steps = 0
        self._sentence = ""
        """Which rank is lost, once it is known."""
        self._leaving_since = 0.0
        self._own = Condition()
        stacks = run_directory / "stacks" / f"rank_{self._rank}.txt"
        self._timeout = StepTimeout(
            run.first_step_timeout, Watchdog(self._who, stacks, agent_without_restarts(os.environ))
        )
        self._heartbeat = Heartbeat(self._own, lambda: self._timeout.is_late)
        self.beat()
        self._timeout.guard(self._end)

    def run_start(self, run: RunContext) -> None:
        self.beat()

    def step_start(self, run: RunContext, step: int) -> None:
        if self._alone:
            return
        self._steps += 1
        self._own.step = step
        if self._steps == 2:
            self._timeout.limit = self._run.step_timeout
        self.beat()

    def beat(self, more: float = 0.0) -> None:
        """The training thread has got further.

        Args:
            more: seconds that it may take from here, beyond those of a step.
        """
        if not self._alone:
            self._timeout.beat(self._own.step, more)

    @contextmanager
    def patient(self, seconds: float) -> Iterator[None]:
        """Let the work in this context take so much longer than a step."""
        self.beat(seconds)
        yield
        self.beat()

    @contextmanager
    def naming_lost_ranks(self) -> Iterator[None]:
        """Turn what a collective raises when another rank is gone into a sentence that says which one.

        Raises:
            LostPeerError: instead of the collective's error.
        """
        try:
            yield
        except (RuntimeError, SaveError) as error:  # torch's own errors are RuntimeErrors, and a save wraps them
            if self._alone or not any(words in str(error) for words in _LOST):
                self._fail(error)
                raise
            self._own.gave_up_at = position_of_error(error)
            sentence = self._find_out(is_timeout="imed out" in str(error))
            self._leaving_since = time.monotonic()  # the guard looks at it once there is a sentence
            self._sentence, self._own.has_concluded = sentence, True
            self._timeout.allow(self._own.step, _LEAVING)
            raise LostPeerError(self._sentence) from error
        except BaseException as error:
            self._fail(error)
            raise

    def close(self) -> None:
        """The last thing that a rank does with the group."""
        if self._alone:
            return
        self._own.is_done = True
        self._heartbeat.close()
        self._timeout.close()

    def _fail(self, error: BaseException) -> None:
        """For the others to read: this rank ends, and not because of them."""
        if not self._alone and not self._sentence:
            self._own.failure = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            self._heartbeat.beat_now()

    def _find_out(self, *, is_timeout: bool) -> str:
        """Ask until it is clear who is missing, for a few seconds at most; tell the others."""
        heartbeat = self._heartbeat
        self._own.has_given_up = True
        heartbeat.beat_now()
        self._timeout.allow(self._own.step, SILENCE + 3 * BEAT)  # this rank hangs no longer
        deadline = time.monotonic() + max(1.5, SILENCE + 1.5 * BEAT - heartbeat.seconds_watched)
        while not (found := self._missing()) and time.monotonic() < deadline:
            time.sleep(0.1)
        if not found and is_timeout:
            found = heartbeat.diagnosis().not_coming()
        if heartbeat.verdict is None and found:
            heartbeat.publish(found)
            if not (_store_stays() and heartbeat.diagnosis().have_ended(found[1])):
                time.sleep(1.2 * BEAT)  # the others shall have read it; and who fails shall be the first to end
        return self._worded(heartbeat.verdict or found)

    def _missing(self) -> Finding | None:
        return self._heartbeat.verdict or self._heartbeat.diagnosis().missing()

    def _worded(self, found: Finding | None) -> str:
        step = self._own.step
        if found is None:
            sentence = f"{self._who} has lost another rank in step {step}: all of them still give signs of life"
            waiting = self._heartbeat.diagnosis().positions()
            return f"{sentence}, and wait for each other: {waiting}" if waiting else sentence
        sentence, ranks = found
        if self._rank in ranks:
            return f"{self._who} was given up by the others in step {step}: {sentence}"
        return f"{self._who} has lost another rank in step {step}: {sentence}"

    def _end(self) -> End:
        """The end of this rank: it has lost another one, was told of it, or takes too long for its step."""
        heartbeat, timeout = self._heartbeat, self._timeout
        if self._sentence:
            return End(self._leaving_since, self._sentence, leave_after=_LEAVING)
        quiet = math.inf if self._own.has_given_up else 0.0  # it is being found out
        if heartbeat.verdict is not None:
            return End(heartbeat.verdict_at, self._worded(heartbeat.verdict), max(quiet, LEAVE_AFTER - 1))
        return End(timeout.beaten + timeout.seconds, self._too_slow(), max(quiet, SAY_AFTER))

    def _too_slow(self) -> str:
        if (missing := self._missing()) is not None:
            return self._worded(missing)
        heartbeat = self._heartbeat
        return (
            f"{self._who} has got no further for {time.monotonic() - self._timeout.beaten:.0f} s in step "
            f"{self._own.step}, at {heartbeat.where}; "
            f"{heartbeat.diagnosis().positions(without=self._rank) or 'of the others nothing is known'}"
        )


def _store_stays() -> bool:
    """Return whether what this rank has said in the store can be read when it has ended: not if rank 0 keeps the
    store, nor if the launcher of one of several hosts does, which ends after its own ranks."""
    kept_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return kept_by_launcher and os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
