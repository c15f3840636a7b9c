"""Heartbeat: signs of life of all ranks, through the store that they have found each other with."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import attrs
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch forgets to export it
from torch.distributed.distributed_c10d import _get_default_store

from forge_core.distributed.diagnosis import Diagnosis, Finding, Sign
from forge_core.distributed.position import position_of_thread
from forge_core.distributed.process_identity import Process

BEAT = 1.0
"""Seconds between signs of life."""
_VERDICT = "verdict"


@attrs.define
class Condition:
    """This rank, as the others read it."""

    step: int = 0
    failure: str = ""
    """Why it ends, if that is not because of another rank."""
    has_given_up: bool = False
    """It does not wait any longer, and finds out who is missing."""
    gave_up_at: str = ""
    has_concluded: bool = False
    """It has found out, and ends."""
    is_done: bool = False


class Heartbeat:
    """Says once a second, from a thread, how this rank is; reads how the others are only if there is a reason to.

    Args:
        own: read at each beat.
        is_late: whether this rank has taken so long for its step that the others are looked at.
    """

    def __init__(self, own: Condition, is_late: Callable[[], bool]) -> None:
        self.own = own
        self.verdict: Finding | None = None
        """The finding of the rank that was the first to find out, for all to say the same."""
        self.verdict_at = 0.0
        self._is_late = is_late
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()  # the group is gone before this ends
        self._to_publish: Finding | None = None
        self._signs: dict[int, Sign] = {}
        self._watching_since: float | None = None
        self._answered = time.monotonic()
        self._count = 0
        self._main, self._process = threading.get_ident(), attrs.asdict(Process.this())
        self._ended, self._wake = threading.Event(), threading.Event()
        # a connection of its own: on the shared one it would wait for others that wait for a key
        self._store = PrefixStore("forge/peers", _get_default_store().clone())  # type: ignore[attr-defined]  # no stub
        self._store.set_timeout(timedelta(seconds=2))
        self._say()
        self._thread = threading.Thread(target=self._beat, name="forge-peers-beat", daemon=True)
        self._thread.start()

    def diagnosis(self) -> Diagnosis:
        return Diagnosis(dict(self._signs), self._answered)

    @property
    def seconds_watched(self) -> float:
        """How long the others have been looked at."""
        return 0.0 if self._watching_since is None else time.monotonic() - self._watching_since

    def publish(self, finding: Finding) -> None:
        """Make it the verdict of all, unless there is one."""
        self._to_publish = finding
        self._wake.set()

    def beat_now(self) -> None:
        self._wake.set()

    @property
    def where(self) -> str:
        """Say what the training thread does, or did when it gave up waiting."""
        return self.own.gave_up_at or position_of_thread(self._main)

    def close(self) -> None:
        self._ended.set()
        self._wake.set()
        self._thread.join(timeout=3)  # a store that does not answer holds it up for longer

    def _beat(self) -> None:
        """In a thread of its own, as the store may not answer."""
        while True:
            is_last = self._ended.is_set()  # asked before the last word, which says why
            try:
                self._say()
                self._exchange_verdict()
                if self.own.has_given_up or self._is_late():
                    self._look_around()
                else:
                    self._watching_since = None
                self._answered = time.monotonic()
            except dist.DistNetworkError:  # the store's process has ended; the diagnosis says so
                return
            except RuntimeError:  # it does not answer for now
                pass
            if is_last or self.own.has_concluded:
                return
            self._wake.wait(BEAT)
            self._wake.clear()

    def _say(self) -> None:
        self._count += 1
        said = {
            "count": self._count,
            "host": socket.gethostname(),
            "step": self.own.step,
            "where": self.where,
            "process": self._process,
            "failure": self.own.failure,
            "gave_up": self.own.has_given_up,
            "done": self.own.is_done,
        }
        self._store.set(str(self._rank), json.dumps(said))

    def _exchange_verdict(self) -> None:
        mine = json.dumps(self._to_publish) if self._to_publish else ""
        known = self._store.compare_set(_VERDICT, "", mine).decode()
        if known and self.verdict is None:
            sentence, ranks = json.loads(known)
            self.verdict_at, self.verdict = time.monotonic(), (sentence, ranks)

    def _look_around(self) -> None:
        keys = [str(rank) for rank in range(self._world_size)]
        if not self._store.check(keys):
            keys = [key for key in keys if self._store.check([key])]
        now = time.monotonic()
        if self._watching_since is None:
            self._watching_since = now
            self._signs.clear()
        for key, text in zip(keys, self._store.multi_get(keys), strict=True):
            said, before = json.loads(text), self._signs.get(int(key))
            if before is None or before.said["count"] != said["count"]:
                self._signs[int(key)] = Sign(said, now)
        if gone := [key for key in keys if Process(**self._signs[int(key)].said["process"]).has_ended]:
            for key, text in zip(gone, self._store.multi_get(gone), strict=True):  # its last word
                self._signs[int(key)] = Sign(json.loads(text), self._signs[int(key)].since, is_gone=True)
