"""The watch of a node: one rank of it speaks with the store for all, and one of all nodes finds out who is missing."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import attrs
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch forgets to export it

from forge_core.distributed.process_identity import Process
from forge_plugins_monitor.peers.diagnosis import Diagnosis, Finding, Need, Sign
from forge_plugins_monitor.peers.node_board import ASKED, VERDICT, NodeBoard
from forge_plugins_monitor.peers.pulses import SILENCE, Pulses

BEAT = 1.0
"""Seconds between signs of life."""
_SETTLED_AFTER = 1.5
"""Seconds that the ranks which wait for the same one get to time out."""
_PATIENCE = 2.0
"""Seconds for an answer of the store."""


class NodeWatch:
    """Publishes how the ranks of a node are, in a thread, as long as this rank is the first of them that is alive.

    The store gets three requests a beat from each node, and up to three more from the first node that is alive while a
    rank asks: it reads what all nodes have told, and publishes the verdict. The signs of single ranks are in the store
    only while a rank asks for them.

    Args:
        store: over which the ranks have found each other.
        board: has the signs of this node's ranks, and gets the verdict.
        ranks: of this node, in ascending order. The first names the node.
        is_leading: whether this rank is still to do it.
    """

    def __init__(self, store: Any, board: NodeBoard, ranks: Sequence[int], is_leading: Callable[[], bool]) -> None:
        self._base, self._board, self._ranks, self._is_leading = store, board, ranks, is_leading
        self._node = ranks[0]
        self._store: PrefixStore | None = None
        self._said: dict[int, Mapping[str, Any]] = {}
        self._pulses, self._nodes_pulses = Pulses(), Pulses()
        self._nodes: dict[int, Mapping[str, Any]] = {}
        self._answered = self._looked = time.monotonic()
        self._asked: float | None = None
        self._is_alarmed = False
        self._is_asked: bool | None = None
        """As the ranks of this node have been told."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="forge-peers-watch", daemon=True)

    def register(self) -> None:
        """Make this node known. The first rank of each node does so, before any of them begins to watch."""
        store = self._connected()
        facts = {"node": self._node, "ranks": self._ranks, "host": socket.gethostname()}
        store.append("nodes", json.dumps(facts) + "\n")  # type: ignore[attr-defined]  # torch's stubs forget it
        self._publish(store, self._signs(), Need.NONE, with_signs=True)
        for key in (VERDICT, "alarm"):
            store.compare_set(key, "", "")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(timeout=_PATIENCE)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def without_store(self) -> Finding | None:
        """What this node finds by itself, if a rank of it must know and the store does not answer: the thread may be
        waiting for it, without an end."""
        now, signs = time.monotonic(), self._signs()
        if now - self._looked >= SILENCE:  # this process has been stopped itself: no rank has had time to answer
            self._answered = now
        self._looked = now
        silent = now - self._answered
        if silent < SILENCE or _need_of_all(signs) < Need.OVERDUE:
            return None
        return Diagnosis(signs, silent).missing()

    def _watch(self) -> None:
        while self._is_leading() and not self._ended.is_set():
            signs = self._signs()
            need = _need_of_all(signs)
            with suppress(RuntimeError, OSError):  # the store does not answer for now, or has ended
                if verdict := self._exchange(signs, need):
                    self._board.write(VERDICT, attrs.asdict(verdict))
                    return
                self._answered = time.monotonic()
            self._ask(bool(need) or self._is_alarmed)
            self._ended.wait(BEAT / 4 if need or self._is_alarmed else BEAT)
        with suppress(RuntimeError, OSError):  # their last words: no process may be left on this node to tell of them
            self._publish(self._connected(), self._signs(), Need.NONE, with_signs=True)

    def _ask(self, is_asked: bool) -> None:
        """Have the ranks of this node say where they are, or no longer."""
        if is_asked is not self._is_asked:
            with suppress(OSError):
                self._board.write(ASKED, is_asked)
                self._is_asked = is_asked

    def _signs(self) -> dict[int, Sign]:
        """Of this node's ranks."""
        signs = {}
        for rank in self._ranks:
            said = self._read(rank)
            if is_gone := bool(said) and Process(**said["process"]).has_ended:
                said = self._read(rank)  # its last word
            if said:
                signs[rank] = Sign(said, self._pulses.seconds_since(rank, said["count"]), is_gone)
        return signs

    def _read(self, rank: int) -> Mapping[str, Any]:
        self._said[rank] = self._board.read(str(rank)) or self._said.get(rank, {})
        return self._said[rank]

    def _exchange(self, signs: Mapping[int, Sign], need: Need) -> Finding | None:
        """Return the finding of all nodes."""
        store = self._connected()
        self._publish(store, signs, need, with_signs=need > Need.NONE or self._is_alarmed)
        alarm, verdict = store.multi_get(["alarm", VERDICT])
        self._is_alarmed = bool(alarm)
        if verdict:
            return _decoded(verdict)
        first = self._nodes_pulses.first_alive(self._in_order(store), self._node, self._count_of)
        return self._diagnose(store) if first == self._node else None

    def _connected(self) -> PrefixStore:
        """A connection of its own: on the shared one it would wait for others that wait for a key."""
        if self._store is None:
            if "MASTER_ADDR" in os.environ:  # torch would try for as long as ranks wait for each other
                place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
                socket.create_connection(place, timeout=_PATIENCE).close()
            store = PrefixStore("forge/peers", self._base.clone())
            store.set_timeout(timedelta(seconds=_PATIENCE))
            self._store = store
        return self._store

    def _publish(self, store: Any, signs: Mapping[int, Sign], need: Need, *, with_signs: bool) -> None:
        count = time.time_ns()  # more than the last one of another rank that has done this before
        beat = {
            "count": count,
            "need": need,
            "step": max((sign.said["step"] for sign in signs.values()), default=0),
            "is_awaited": any(sign.is_awaited for sign in signs.values()),
        }
        keys, values = [f"beat/{self._node}"], [json.dumps(beat)]
        if with_signs:
            keys.insert(0, f"signs/{self._node}")
            values.insert(0, json.dumps({"count": count, "signs": {n: attrs.asdict(one) for n, one in signs.items()}}))
        store.multi_set(keys, values)

    def _in_order(self, store: PrefixStore) -> Iterator[int]:
        """All nodes; their list is read once the first of them is silent."""
        yield 0
        yield from self._known_nodes(store)

    def _known_nodes(self, store: PrefixStore) -> Mapping[int, Mapping[str, Any]]:
        if not self._nodes:
            lines = map(json.loads, store.get("nodes").decode().splitlines())
            self._nodes = {line["node"]: line for line in sorted(lines, key=lambda line: int(line["node"]))}
        return self._nodes

    def _count_of(self, node: int) -> int:
        assert self._store is not None, "this node has published"
        return int(json.loads(self._store.get(f"beat/{node}"))["count"])

    def _diagnose(self, store: PrefixStore) -> Finding | None:
        """Look at all nodes, and publish what is found if a rank must know."""
        nodes = self._known_nodes(store)
        beats = dict(zip(nodes, map(json.loads, store.multi_get([f"beat/{node}" for node in nodes])), strict=True))
        ages = {node: self._nodes_pulses.seconds_since(node, beat["count"]) for node, beat in beats.items()}
        need = max((beats[node]["need"] for node in nodes if ages[node] < SILENCE), default=Need.NONE)
        if bool(need) != self._is_alarmed:
            self._is_alarmed = bool(need)
            store.set("alarm", "1" if need else "")
        if need < Need.OVERDUE:
            self._asked = None
            return None
        now = time.monotonic()
        self._asked = self._asked or now
        found = _conclude(Diagnosis(self._all_signs(store, beats, ages)), now - self._asked)
        return found and _decoded(store.compare_set(VERDICT, "", json.dumps(attrs.asdict(found))))

    def _all_signs(
        self, store: Any, beats: Mapping[int, Mapping[str, Any]], ages: Mapping[int, float]
    ) -> dict[int, Sign]:
        """Of all ranks whose nodes have told of them since they were asked, or tell nothing any more."""
        found: dict[int, Sign] = {}
        alive = [node for node, age in ages.items() if age < SILENCE]
        for node, text in zip(alive, store.multi_get([f"signs/{node}" for node in alive]), strict=True):
            told = json.loads(text)
            if told["count"] >= beats[node]["count"]:
                found |= {int(rank): Sign(**sign) for rank, sign in told["signs"].items()}
        for node, beat in beats.items():
            if node not in alive and beat["is_awaited"]:
                said = {"host": self._nodes[node]["host"], "step": beat["step"], "where": "", "failure": ""}
                said |= {"gave_up": False, "timed_out": False, "done": False, "need": Need.NONE}
                found |= {rank: Sign(said, ages[node]) for rank in self._nodes[node]["ranks"]}
        return found


def _conclude(diagnosis: Diagnosis, seconds: float) -> Finding | None:
    """
    Args:
        seconds: for which ranks have asked.
    """
    if found := diagnosis.missing():
        return found
    signs = diagnosis.signs.values()
    is_overdue = any(sign.said["need"] == Need.OVERDUE for sign in signs)
    if seconds < _SETTLED_AFTER + (0 if is_overdue else SILENCE):  # else a silent rank may be to come
        return None
    has_timed_out = any(sign.said["timed_out"] for sign in signs)
    return (diagnosis.not_coming() if has_timed_out else None) or diagnosis.waiting()


def _need_of_all(signs: Mapping[int, Sign]) -> Need:
    return max((Need.LOST if sign.died else Need(sign.said["need"]) for sign in signs.values()), default=Need.NONE)


def _decoded(text: bytes) -> Finding | None:
    return Finding(**json.loads(text)) if text else None
