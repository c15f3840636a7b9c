"""Many real ranks on one machine: processes that are forked once everything has been imported.

    python forked_world.py FOLDER PORT RANKS RANKS_A_NODE train TOML [SETTING …]
    python forked_world.py FOLDER PORT RANKS RANKS_A_NODE wait SECONDS

``train`` runs a job, and counts what each rank asks of others and of files. ``wait`` is the control plane alone: a
supervisor and an all-reduce for a step, in which ranks can be killed. Ranks of a node share a temporary folder.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from forge_core.cli import main
from forge_core.config.sections import RunSection
from forge_core.distributed.consensus import Consensus
from forge_core.distributed.mesh import join_process_group
from forge_core.distributed.timeouts import set_timeouts
from forge_core.errors import LostPeerError
from forge_core.run import run as _run  # noqa: F401 - what a rank imports, before it is forked
from forge_plugins_monitor.config import PeersConfig
from forge_plugins_monitor.peers.node_watch import NodeWatch
from forge_plugins_monitor.peers.peer_monitor import PeerMonitor

CONTROL = ("all_gather_object", "broadcast_object_list", "gather_object", "isend", "recv", "new_group")


class Counts:
    """What this rank does, until it is written to a file."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = folder / f"counts_{rank}.json"
        self._names: Counter[str] = Counter()
        self._steps: list[Counter[str]] = []
        self._sockets = 0
        self._of_a_beat = self._before_beat = 0

    def begin(self) -> None:
        sys.addaudithook(self._note_file)
        for name in CONTROL:
            self._count_calls(distributed_c10d, name)
        votes, publish, connected = Consensus.votes, NodeWatch._publish, NodeWatch._connected
        counts = self

        def counted_votes(consensus):
            counts._steps.append(counts._names.copy())
            counts._sockets = max(counts._sockets, open_sockets())
            return votes(consensus)

        def counted_publish(watch, *arguments, **keywords):
            counts._of_a_beat = max(counts._of_a_beat, counts._names["store"] - counts._before_beat)
            counts._before_beat = counts._names["store"]
            return publish(watch, *arguments, **keywords)

        Consensus.votes, NodeWatch._publish = counted_votes, counted_publish
        NodeWatch._connected = lambda watch: CountedStore(connected(watch), counts._names)

    def write(self) -> None:
        of_a_step = self._steps[-1] - self._steps[-2] if len(self._steps) > 1 else Counter()
        found = {
            "sockets": self._sockets,
            "control messages of a step": sum(of_a_step[name] for name in CONTROL),
            "store requests of a beat": self._of_a_beat,
            **self._names,
        }
        self._file.write_text(json.dumps(found))

    def _count_calls(self, module, name: str) -> None:
        call = getattr(module, name)

        def counted(*arguments, **keywords):
            self._names[name] += 1
            return call(*arguments, **keywords)

        setattr(module, name, counted)
        setattr(dist, name, counted)

    def _note_file(self, event: str, arguments: tuple) -> None:
        if event == "open" and isinstance(arguments[0], str) and "/checkpoints/" in arguments[0]:
            way = "written" if any(letter in str(arguments[1]) for letter in "wax+") else "read"
            self._names[f"{way} {kind_of(arguments[0])}"] += 1
        elif event in ("os.rename", "os.mkdir", "os.listdir", "os.scandir") and "checkpoints" in str(arguments[0]):
            self._names[event] += 1


class CountedStore:
    def __init__(self, store, names: Counter[str]) -> None:
        self._store, self._counts = store, names

    def __getattr__(self, name: str):
        self._counts["store"] += 1
        return getattr(self._store, name)


def kind_of(path: str) -> str:
    return "tensors" if path.endswith(".distcp") else Path(path).name


def open_sockets() -> int:
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing's own
            found += str(entry.readlink()).startswith("socket:")
    return found


def train(folder: Path, rank: int, *arguments: str) -> int:
    counts = Counts(folder, rank)
    counts.begin()
    code = main(["run", *arguments])
    counts.write()
    return int(code)


def wait(folder: Path, rank: int, seconds: str) -> int:
    join_process_group(torch.device("cpu"), 240.0)
    limits = RunSection(name="wait", first_step_timeout=240.0, step_timeout=float(seconds))
    peers = PeerMonitor(PeersConfig(), run=limits, run_directory=folder / "run")
    set_timeouts(float(seconds))
    try:
        with peers.naming_lost_ranks():
            for step in itertools.count(1):
                peers.step_start(None, step)  # type: ignore[arg-type]  # it does not look at it
                dist.all_reduce(torch.zeros(1))
                if rank == 0:
                    (folder / "step").write_text(str(step))
    except LostPeerError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
    return 5


def go(folder: Path, port: str, rank: int, ranks: int, of_a_node: int) -> int:
    temporary = folder / f"node_{rank // of_a_node}"
    temporary.mkdir(exist_ok=True)
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "TMPDIR": str(temporary)}
    tempfile.tempdir = None  # found out again, from the environment
    os.environ.update(place, RANK=str(rank), LOCAL_RANK=str(rank % of_a_node), WORLD_SIZE=str(ranks))
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    return {"train": train, "wait": wait}[sys.argv[5]](folder, rank, *sys.argv[6:])


if __name__ == "__main__":
    where, n, n_of_a_node = Path(sys.argv[1]), int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    forked = []
    for number in range(n):
        if (process := os.fork()) == 0:
            code = 1
            try:
                code = go(where, sys.argv[2], number, n, n_of_a_node)
            except SystemExit as ended:  # a run that is stopped
                code = int(ended.code or 0)
            finally:
                sys.excepthook(*sys.exc_info()) if sys.exc_info()[0] else None
                os._exit(code)
        forked.append(process)
    (where / "processes.json").write_text(json.dumps(forked))
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in forked))
