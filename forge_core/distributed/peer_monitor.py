"""The other ranks: who is there, who is not, and how this one ends when one of them is lost."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import attrs
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch forgets to export it
from torch.distributed.distributed_c10d import _get_default_store

from forge_core.config.describe import printable
from forge_core.config.sections import RunSection
from forge_core.contracts.callback import Callback, RunContext
from forge_core.distributed.position import position_of_error, position_of_thread
from forge_core.distributed.process_identity import Process
from forge_core.distributed.torchrun import agent_without_restarts
from forge_core.distributed.watchdog import Watchdog
from forge_core.errors import ExitCode, LostPeerError, SaveError

BEAT = 1.0
"""Seconds between signs of life."""
SILENCE = 3.0
"""Seconds without one after which a rank is said to be gone."""
_SAY_AFTER, _LEAVE_AFTER = 1.5, 6.0
"""Seconds beyond its limit after which a rank that is held up says so, and after which it leaves with exit code 5. The
watchdog, which needs nothing of the rank, comes later."""
_LEAVING = 8.0
"""Seconds that a rank which has lost another gets to close its files."""
_VERDICT = "verdict"

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


@attrs.define
class _Seen:
    """The latest sign of life of a rank, and when it came."""

    said: Mapping[str, Any]
    since: float
    is_gone: bool = False
    """Its process is on this machine, and has ended before that was read."""


class PeerMonitor(Callback):
    """Tells the other ranks and the watchdog how far this one is, and finds out who is missing when they wait in vain.

    Signs of life go through the store that the ranks have found each other with, once a second, from a thread; nobody
    reads them until there is a reason to. The training thread says where it is by ``beat``; if it does not within the
    time that the run gives it, this process ends with exit code 5. A group of one has nobody to wait for, and none of
    this happens.
    """

    def __init__(self, run: RunSection, run_directory: Path) -> None:
        self._run = run
        self._alone = dist.get_world_size() == 1
        if self._alone:
            return
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._who = f"rank {self._rank} on {socket.gethostname()}"
        self._steps = 0
        self._step = 0
        self._limit = run.first_step_timeout
        self._signed = time.monotonic()
        self._failure = ""
        self._is_done = False
        self._sentence = ""
        self._gave_up_at = ""
        self._leaving_since = 0.0
        self._verdict: tuple[str, Sequence[int]] | None = None
        self._verdict_at = 0.0
        self._to_publish: tuple[str, Sequence[int]] | None = None
        self._asks = False
        self._seen: dict[int, _Seen] = {}
        self._watching_since: float | None = None
        self._answered = time.monotonic()
        self._count = 0
        self._main = threading.get_ident()
        self._process = attrs.asdict(Process.this())
        self._ended, self._wake = threading.Event(), threading.Event()
        # a connection of its own: on the shared one it would wait for others that wait for a key
        self._store = PrefixStore("forge/peers", _get_default_store().clone())  # type: ignore[attr-defined]  # no stub
        self._store.set_timeout(timedelta(seconds=2))
        self._say_where()
        self._watchdog = Watchdog(
            self._who, run_directory / "stacks" / f"rank_{self._rank}.txt", agent_without_restarts(os.environ)
        )
        self.beat()
        self._threads = [
            threading.Thread(target=work, name=f"forge-peers-{work.__name__.strip('_')}", daemon=True)
            for work in (self._beat, self._guard)
        ]
        for thread in self._threads:
            thread.start()

    def run_start(self, run: RunContext) -> None:
        self.beat()

    def step_start(self, run: RunContext, step: int) -> None:
        if self._alone:
            return
        self._steps += 1
        self._step = step
        if self._steps == 2:
            self._limit = self._run.step_timeout
        self.beat()

    def beat(self, more: float = 0.0) -> None:
        """The training thread has got further.

        Args:
            more: seconds that it may take from here, beyond those of a step.
        """
        if self._alone:
            return
        self._allowed = self._limit + more
        self._signed = time.monotonic()
        self._watchdog.tell(self._step, self._allowed)

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
            if self._alone or not any(beat in str(error) for beat in _LOST):
                self._fail(error)
                raise
            self._gave_up_at = position_of_error(error)
            self._sentence = self._find_out(is_timeout="imed out" in str(error))
            self._leaving_since = time.monotonic()
            self._watchdog.tell(self._step, _LEAVING)
            raise LostPeerError(self._sentence) from error
        except BaseException as error:
            self._fail(error)
            raise

    def close(self) -> None:
        """The last thing that a rank does with the group."""
        if self._alone:
            return
        self._is_done = True
        self._ended.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(timeout=3)  # a store that does not answer holds it up for longer
        self._watchdog.close()

    def _fail(self, error: BaseException) -> None:
        """For the others to read: this rank ends, and not because of them."""
        if not self._alone and not self._sentence:
            self._failure = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            self._wake.set()

    def _find_out(self, *, is_timeout: bool) -> str:
        """Ask until it is clear who is missing, for a few seconds at most; tell the others."""
        self._asks = True
        self._wake.set()
        self._signed, self._allowed = time.monotonic(), SILENCE + 3 * BEAT  # this rank hangs no longer
        self._watchdog.tell(self._step, self._allowed)
        watched = 0.0 if self._watching_since is None else time.monotonic() - self._watching_since
        deadline = time.monotonic() + max(1.5, SILENCE + 1.5 * BEAT - watched)
        while not (found := self._missing()) and time.monotonic() < deadline:
            time.sleep(0.1)
        if not found and is_timeout:
            found = self._those_that_do_not_come()
        if self._verdict is None and found:
            self._to_publish = found
            self._wake.set()
            if not (_store_stays() and self._have_ended(found[1])):
                time.sleep(1.2 * BEAT)  # the others shall have read it; and who fails shall be the first to end
        return self._worded(self._verdict or found)

    def _have_ended(self, ranks: Sequence[int]) -> bool:
        return all(rank in self._seen and self._seen[rank].is_gone for rank in ranks)

    def _worded(self, found: tuple[str, Sequence[int]] | None) -> str:
        if found is None:
            sentence = f"{self._who} has lost another rank in step {self._step}: all of them still give signs of life"
            waiting = self._waiting_for_each_other()
            return f"{sentence}, and wait for each other: {waiting}" if waiting else sentence
        sentence, ranks = found
        if self._rank in ranks:
            return f"{self._who} was given up by the others in step {self._step}: {sentence}"
        return f"{self._who} has lost another rank in step {self._step}: {sentence}"

    def _missing(self) -> tuple[str, Sequence[int]] | None:
        """Who has ended or gives no sign of life, as far as is known now."""
        if self._verdict is not None:
            return self._verdict
        now = time.monotonic()
        seen = sorted(self._seen.items())
        failed = [(rank, f"has ended: {one.said['failure']}") for rank, one in seen if one.said["failure"]]
        if failed:
            return self._described(failed)
        gone = [
            (rank, f"has ended without a word: its process {one.said['process']['number']} is gone")
            for rank, one in seen
            if one.is_gone and not one.said["gave_up"] and not one.said["done"]
        ]
        if gone:
            return self._described(gone)
        silent = [
            (rank, f"has given no sign of life for {now - one.since:.0f} s, since step {one.said['step']}")
            for rank, one in seen
            if now - one.since >= SILENCE and not one.said["gave_up"] and not one.said["done"]
        ]
        if now - self._answered >= SILENCE:
            at = os.environ.get("MASTER_ADDR", "its host")
            silent = [(0, f"does not answer: nothing has come from {at} for {now - self._answered:.0f} s")]
        return self._described(silent) if silent else None

    def _those_that_do_not_come(self) -> tuple[str, Sequence[int]] | None:
        """They live, and have not given up waiting as this rank has."""
        return self._described(
            [
                (rank, f"is alive and does not come: it is in step {one.said['step']}, at {one.said['where']}")
                for rank, one in sorted(self._seen.items())
                if not one.said["gave_up"] and not one.said["done"]
            ]
        )

    def _waiting_for_each_other(self) -> str:
        """Where each rank has waited in vain; first those that are where few are."""
        seen = sorted(self._seen.items())
        places = Counter(one.said["where"] for _, one in seen)
        found = self._described(
            [
                (rank, f"is in step {one.said['step']}, at {one.said['where']}")
                for rank, one in sorted(seen, key=lambda entry: places[entry[1].said["where"]])
            ]
        )
        return found[0] if found else ""

    def _described(self, ranks: Sequence[tuple[int, str]]) -> tuple[str, Sequence[int]] | None:
        hosts = {rank: f" on {one.said['host']}" for rank, one in self._seen.items()}
        named = [f"rank {rank}{hosts.get(rank, '')} {what}" for rank, what in ranks[:4]]
        more = [f"and {len(ranks) - 4} more"] if len(ranks) > 4 else []
        return ("; ".join([*named, *more]), [rank for rank, _ in ranks]) if ranks else None

    def _beat(self) -> None:
        """In a thread of its own, as the store may not answer."""
        while True:
            try:
                self._say_where()
                self._exchange_verdict()
                if self._asks or time.monotonic() - self._signed > self._allowed / 3:
                    self._look_around()
                else:
                    self._watching_since = None
                self._answered = time.monotonic()
            except dist.DistNetworkError:  # the store's process has ended; `_missing` says so
                return
            except RuntimeError:  # it does not answer for now
                pass
            if self._ended.is_set() or self._sentence:
                return
            self._wake.wait(BEAT)
            self._wake.clear()

    def _say_where(self) -> None:
        self._count += 1
        said = {
            "count": self._count,
            "host": socket.gethostname(),
            "step": self._step,
            "where": self._where(),
            "process": self._process,
            "failure": self._failure,
            "gave_up": self._asks,
            "done": self._is_done,
        }
        self._store.set(str(self._rank), json.dumps(said))

    def _where(self) -> str:
        """Say what the training thread does, or did when it gave up waiting."""
        return self._gave_up_at or position_of_thread(self._main)

    def _exchange_verdict(self) -> None:
        """Take the verdict of the first to find out, so that all say the same."""
        mine = json.dumps(self._to_publish) if self._to_publish else ""
        known = self._store.compare_set(_VERDICT, "", mine).decode()
        if known and self._verdict is None:
            sentence, ranks = json.loads(known)
            self._verdict, self._verdict_at = (sentence, ranks), time.monotonic()

    def _look_around(self) -> None:
        keys = [str(rank) for rank in range(self._world_size)]
        if not self._store.check(keys):
            keys = [key for key in keys if self._store.check([key])]
        now = time.monotonic()
        if self._watching_since is None:
            self._watching_since = now
            self._seen.clear()
        for key, text in zip(keys, self._store.multi_get(keys), strict=True):
            said, before = json.loads(text), self._seen.get(int(key))
            if before is None or before.said["count"] != said["count"]:
                self._seen[int(key)] = _Seen(said, now)
        if gone := [key for key in keys if Process(**self._seen[int(key)].said["process"]).has_ended]:
            for key, text in zip(gone, self._store.multi_get(gone), strict=True):  # its last word
                self._seen[int(key)] = _Seen(json.loads(text), self._seen[int(key)].since, is_gone=True)

    def _guard(self) -> None:
        """End a rank that cannot: it waits for a device, or in a collective of which no error comes."""
        has_said = False
        while not self._ended.wait(0.25):
            now = time.monotonic()
            if self._sentence:
                since, say_after, leave_after, sentence = self._leaving_since, _SAY_AFTER, _LEAVING, self._sentence
            elif self._verdict is not None:
                since, say_after, leave_after = self._verdict_at, _LEAVE_AFTER - 1, _LEAVE_AFTER
                sentence = self._worded(self._verdict)
            else:
                since, say_after, leave_after = self._signed + self._allowed, _SAY_AFTER, _LEAVE_AFTER
                sentence = self._too_slow()
            if now - since > say_after and not has_said and not self._is_finding_out:
                has_said = True
                print(printable(f"error: {sentence}"), file=sys.stderr, flush=True)
            if now - since > leave_after:
                os._exit(ExitCode.LOST_PEER)

    @property
    def _is_finding_out(self) -> bool:
        return self._asks and not self._sentence

    def _too_slow(self) -> str:
        missing = self._missing()
        if missing is not None:
            return self._worded(missing)
        others = self._described(
            [
                (rank, f"is in step {one.said['step']}, at {one.said['where']}")
                for rank, one in sorted(self._seen.items())
                if rank != self._rank
            ]
        )
        return (
            f"{self._who} has got no further for {time.monotonic() - self._signed:.0f} s in step {self._step}, at "
            f"{self._where()}; {others[0] if others else 'of the others nothing is known'}"
        )


def _store_stays() -> bool:
    """Return whether what this rank has said in the store can be read when it has ended: not if rank 0 keeps the
    store, nor if the launcher of one of several hosts does, which ends after its own ranks."""
    kept_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return kept_by_launcher and os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
