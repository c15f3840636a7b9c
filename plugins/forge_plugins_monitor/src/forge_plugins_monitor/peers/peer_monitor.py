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
from forge_core.contracts.callback import RunContext
from forge_core.contracts.supervisor import Supervisor
from forge_core.distributed.collective_errors import run_on_all_ranks
from forge_core.distributed.torchrun import agent_without_restarts
from forge_core.errors import LostPeerError, SaveError
from forge_plugins_monitor.config import PeersConfig
from forge_plugins_monitor.peers.diagnosis import Finding
from forge_plugins_monitor.peers.flight_record import FlightRecord
from forge_plugins_monitor.peers.heartbeat import Condition, Heartbeat
from forge_plugins_monitor.peers.node_watch import BEAT
from forge_plugins_monitor.peers.position import position_of_error
from forge_plugins_monitor.peers.pulses import SILENCE
from forge_plugins_monitor.peers.step_timeout import LEAVE_AFTER, SAY_AFTER, End, StepTimeout
from forge_plugins_monitor.peers.watchdog import Watchdog

_LEAVING = 8.0
"""Seconds that a rank which has lost another gets to close its files."""
_FOUND_AFTER = SILENCE + 5 * BEAT
"""Seconds after which it is known who is missing, or never will be."""

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
    "Connect timeout",
    "timeout after",
    "remote process exited",
    "ncclRemoteError",
)
"""How gloo, NCCL and torch's stores say that another rank is gone or does not come."""


class PeerMonitor(Supervisor):
    """Tells the other ranks how far this one is (heartbeat), finds out who is missing when they wait in vain
    (diagnosis), and ends this rank if it comes no further (step timeout).

    The training thread calls ``beat``; if it does not within the time that the run gives it, this process ends with
    exit code 5.
    """

    def __init__(self, config: PeersConfig, /, *, run: RunSection, run_directory: Path) -> None:
        self._run = run
        self._rank = dist.get_rank()
        self._is_alone = dist.get_world_size() == 1
        self._who = f"rank {self._rank} on {socket.gethostname()}"
        self._steps = 0
        self._sentence = ""
        """Which rank is lost, once it is known."""
        self._leaving_since = 0.0
        self._is_let_go = False
        """It does not hang: it waits for a rank that is lost."""
        self._own = Condition()
        stacks = run_directory / "stacks" / f"rank_{self._rank}.txt"
        launcher = agent_without_restarts(os.environ)
        self._timeout = run_on_all_ranks(
            lambda: StepTimeout(run.first_step_timeout, Watchdog(self._who, stacks, launcher))
        )
        self._heartbeat = Heartbeat(self._own, self._timeout, lambda: self.calling())
        of_nccl = "nccl" in dist.get_backend_config()
        self._record = FlightRecord(run_directory / "collectives", self._rank, of_nccl=of_nccl)
        self.beat()
        self._timeout.guard(self._end, self._record.write)

    def run_start(self, run: RunContext) -> None:
        self.beat()

    def step_start(self, run: RunContext, step: int) -> None:
        self._steps += 1
        self._own.step = step
        if self._steps == 2:
            self._timeout.limit = self._run.step_timeout
        self.beat()

    def beat(self, more: float = 0.0) -> None:
        self._timeout.beat(self._own.step, more)

    @contextmanager
    def naming_lost_ranks(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, SaveError) as error:  # torch's own errors are RuntimeErrors, and a save wraps them
            if self._is_alone or not any(words in str(error) for words in _LOST):
                self._fail(error)
                raise
            self._own.gave_up_at = position_of_error(error)
            sentence = self._find_out(is_timeout="imed out" in str(error))
            self._leaving_since = time.monotonic()  # the guard looks at it once there is a sentence
            self._sentence, self._own.has_concluded = sentence, True
            self._timeout.allow(self._own.step, _LEAVING)
            self._record.write()
            raise LostPeerError(self._sentence) from error
        except BaseException as error:
            self._fail(error)
            raise

    def close(self) -> None:
        self._own.is_done = True
        self._heartbeat.close()
        self._timeout.close()

    def _fail(self, error: BaseException) -> None:
        """For the others to read: this rank ends, and not because of them."""
        if not self._sentence:
            self._own.failure = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            self._heartbeat.beat_now()

    def _find_out(self, *, is_timeout: bool) -> str:
        """Ask who is missing, and wait until that is known, for a few seconds at most."""
        heartbeat = self._heartbeat
        self._own.has_timed_out, self._own.has_given_up = is_timeout, True
        heartbeat.beat_now()
        self._timeout.allow(self._own.step, _FOUND_AFTER + 3 * BEAT)  # this rank hangs no longer
        deadline = time.monotonic() + _FOUND_AFTER
        while heartbeat.verdict is None and time.monotonic() < deadline:
            time.sleep(0.1)
        verdict, since = heartbeat.verdict, heartbeat.verdict_at
        if verdict and not (_store_stays() and verdict.have_ended):
            # the others shall have read it; and who fails shall be the first to end
            time.sleep(max(0.0, since + 1.2 * BEAT - time.monotonic()))
        return self._worded(verdict)

    def _worded(self, found: Finding | None) -> str:
        step = self._own.step
        if found is None:
            return f"{self._who} has lost another rank in step {step}: nothing is known of the others"
        if self._rank in found.ranks:
            return f"{self._who} was given up by the others in step {step}: {found.sentence}"
        return f"{self._who} has lost another rank in step {step}: {found.sentence}"

    def _end(self) -> End:
        """The end of this rank: it has lost another one, was told of it, or takes too long for its step."""
        heartbeat, timeout = self._heartbeat, self._timeout
        if self._sentence:
            return End(self._leaving_since, self._sentence, leave_after=_LEAVING)
        quiet = math.inf if self._own.has_given_up else 0.0  # it is being found out
        overdue_since = timeout.beaten + timeout.seconds
        if (verdict := heartbeat.verdict) is not None and not self._is_alone:
            if verdict.ranks and self._rank not in verdict.ranks and not self._is_let_go:
                self._is_let_go = True
                timeout.allow(self._own.step, _LEAVING)  # it only waits: its stacks say nothing
                overdue_since = math.inf
            since = min(heartbeat.verdict_at, overdue_since)
            return End(since, self._worded(verdict), max(quiet, LEAVE_AFTER - 1))
        return End(overdue_since, self._too_slow() if timeout.is_overdue else "", max(quiet, SAY_AFTER))

    def _too_slow(self) -> str:
        return (
            f"{self._who} has got no further for {time.monotonic() - self._timeout.beaten:.0f} s in step "
            f"{self._own.step}, at {self._heartbeat.where}"
        )


def _store_stays() -> bool:
    """Return whether what this rank has said in the store can be read when it has ended: not if rank 0 keeps the
    store, nor if the launcher of one of several hosts does, which ends after its own ranks."""
    kept_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return kept_by_launcher and os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
