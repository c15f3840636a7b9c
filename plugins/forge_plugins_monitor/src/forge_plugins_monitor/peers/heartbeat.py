"""Heartbeat: how this rank is, for the others of its node, and what has been found out about all of them."""

from __future__ import annotations

import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import attrs
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from forge_core.distributed.collective_errors import run_on_all_ranks, run_on_rank0
from forge_core.distributed.process_identity import Process
from forge_plugins_monitor.peers.diagnosis import Finding, Need
from forge_plugins_monitor.peers.node_board import ASKED, VERDICT, NodeBoard
from forge_plugins_monitor.peers.node_watch import BEAT, NodeWatch
from forge_plugins_monitor.peers.position import position_of_thread
from forge_plugins_monitor.peers.pulses import Pulses
from forge_plugins_monitor.peers.step_timeout import StepTimeout


@attrs.define
class Condition:
    """This rank, as the others read it."""

    step: int = 0
    failure: str = ""
    """Why it ends, if that is not because of another rank."""
    has_given_up: bool = False
    """It does not wait any longer, and wants to know who is missing."""
    has_timed_out: bool = False
    """It has given up because its time was over."""
    gave_up_at: str = ""
    has_concluded: bool = False
    """It knows, and ends."""
    is_done: bool = False


class Heartbeat:
    """Says once a second, from a thread, how this rank is. The first rank alive of a node watches over it, too.

    Args:
        own: read at each beat.
        timeout: of this rank, which says whether it wants to know how the others are.
        calling: names the callback in which the training thread is, and its event.
    """

    _watch: NodeWatch | None = None

    def __init__(self, own: Condition, timeout: StepTimeout, calling: Callable[[], str] = lambda: "") -> None:
        self.own, self._calling = own, calling
        self.verdict: Finding | None = None
        """The finding for all ranks: the first one stands."""
        self.verdict_at = 0.0
        self._timeout = timeout
        self._rank = dist.get_rank()
        self._count = 0
        self._main, self._process = threading.get_ident(), attrs.asdict(Process.this())
        self._ended, self._wake = threading.Event(), threading.Event()
        self._pulses = Pulses()
        self._is_first = False
        self._store = _get_default_store()  # the group is gone before this ends
        name = run_on_rank0(lambda: uuid.uuid4().hex)
        self._heard: dict[int, Mapping[str, Any]] = {}
        self._board = run_on_all_ranks(lambda: NodeBoard(name))
        run_on_all_ranks(self._say)  # then all have, and their nodes are known
        self._ranks = self._board.ranks()
        run_on_all_ranks(self._register)
        self._is_first = self._watch is not None
        if self._watch:
            self._watch.start()
        self._thread = threading.Thread(target=self._beat, name="forge-peers-beat", daemon=True)
        self._thread.start()

    def _register(self) -> None:
        if self._rank == self._ranks[0]:
            self._watch = self._new_watch()
            self._watch.register()

    def beat_now(self) -> None:
        self._wake.set()

    @property
    def where(self) -> str:
        """Say what the training thread does, or did when it gave up waiting."""
        if self.own.gave_up_at:
            return self.own.gave_up_at
        position, calling = position_of_thread(self._main) or "an unknown place", self._calling()
        return f"{position}, in {calling}" if calling else position

    def close(self) -> None:
        self._ended.set()
        self._wake.set()
        self._thread.join(timeout=3)
        if self._watch:
            self._watch.stop()
        if all(self._count_of(rank) is None for rank in self._ranks):
            self._board.remove()

    def _beat(self) -> None:
        while True:
            is_last = self._ended.is_set()  # asked before the last word, which says why
            with suppress(OSError):  # the folder is gone: all have ended, or somebody has removed it
                self._say()
                self._take_verdict()
                if not is_last:
                    self._lead_if_first()
            if is_last or self.own.has_concluded:
                self._is_first = False
                return
            self._wake.wait(BEAT / 4 if self._need() else BEAT)
            self._wake.clear()

    def _say(self) -> None:
        self._count, need = self._count + 1, self._need()
        said = {
            "count": self._count,
            "host": socket.gethostname(),
            "step": self.own.step,
            "where": self.where if need or self._board.read(ASKED) else "",  # to look at a thread has its risk
            "process": self._process,
            "failure": self.own.failure,
            "need": need,
            "gave_up": self.own.has_given_up,
            "timed_out": self.own.has_timed_out,
            "done": self.own.is_done,
        }
        self._board.write(str(self._rank), said)

    def _need(self) -> Need:
        if self.own.has_given_up:
            return Need.OVERDUE if self.own.has_timed_out else Need.LOST
        if self._timeout.is_overdue:
            return Need.OVERDUE
        return Need.LATE if self._timeout.is_late else Need.NONE

    def _take_verdict(self) -> None:
        if self.verdict is None and (known := self._board.read(VERDICT)):
            self.verdict_at, self.verdict = time.monotonic(), Finding(**known)

    def _lead_if_first(self) -> None:
        self._is_first = self._pulses.first_alive(self._ranks, self._rank, self._count_of) == self._rank
        if not self._is_first or self.verdict is not None:
            return
        if self._watch is None or not self._watch.is_alive:
            self._watch = self._new_watch()
            self._watch.start()
        if verdict := self._watch.without_store():
            self._board.write(VERDICT, attrs.asdict(verdict))

    def _new_watch(self) -> NodeWatch:
        return NodeWatch(self._store, self._board, self._ranks, lambda: self._is_first)

    def _count_of(self, rank: int) -> int | None:
        """Return the count of a rank's last sign of life; ``None`` if it was its last word, or none will follow."""
        said = self._heard[rank] = self._board.read(str(rank)) or self._heard.get(rank, {})
        if not said:
            return 0  # it cannot be read at this moment
        return None if said["done"] or Process(**said["process"]).has_ended else said["count"]
