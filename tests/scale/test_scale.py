"""What grows with the number of ranks, and how fast: counted on real ranks, and compared with the table of the page.

Nothing is timed. Ranks that are lost among many are named by all others.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import fork_server
from rank_ports import free_ports

WORLD = Path(__file__).with_name("forked_world.py")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "scale.md"
SIZES = (4, 8, 16)
MORE_SIZES = (16, 32, 64)
OF_A_NODE = 2
TOML = """
[run]
name = "toy"
dir = "{folder}/runs"

[model]
name = "transformer"
dim = 16
n_layers = 1
n_heads = 2
n_kv_heads = 2
max_seq_len = 16

[data]
name = "text_files"
path = "{folder}/text"
pattern = "*.txt"
workers = 0

[train]
steps = 4
seq_len = 16
batch_size = 1
precision = "fp32"

[optimizer]
name = "adamw"
lr = 1e-3

[checkpoint]
interval = 2
background = false
"""
LIMITS = ("run.step_timeout=20", "checkpoint.timeout=30")
"""A rank may be frozen while it saves."""
GROWTH: Mapping[str, Callable[[float], float]] = {
    "0": lambda n: 0,
    "1": lambda n: 1,
    "log N": math.log2,
    "N": lambda n: n,
}
"""By the name in the table."""
RESUMING = " on resuming"
"""Ends the names of what is counted when a run goes on, which is done by night."""
pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="/proc is looked at")]


def rows() -> list[tuple[str, str, str]]:
    """Of the table that is counted: what, on which rank, growth."""
    return re.findall(r"^\| ([^|]+) \| (rank 0|first of a node|others) \| ([^|]+) \|", PAGE.read_text(), re.M)


@pytest.fixture(scope="module", params=[SIZES, pytest.param(MORE_SIZES, marks=pytest.mark.nightly)], ids=str)
def counts(request, tmp_path_factory) -> Mapping[int, Mapping[str, Mapping[str, int]]]:
    """By number of ranks and kind of rank: of a run from its beginning, and ``… on resuming`` of its continuation."""
    resumes = any(RESUMING in item.name for item in request.session.items if item.path == request.path)
    return {n: counted(tmp_path_factory.mktemp(f"of_{n}"), n, resumes=resumes) for n in request.param}


def counted(folder: Path, n: int, *, resumes: bool) -> Mapping[str, Mapping[str, int]]:
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("".join(f"line {i}: {i * 7919 % 9973}\n" for i in range(2000)))
    (folder / "toy.toml").write_text(TOML.format(folder=folder))
    found: dict[str, dict[str, int]] = {"rank 0": {}, "first of a node": {}, "others": {}}
    for suffix, steps in (("", 4), (RESUMING, 8))[: 1 + resumes]:
        command = [folder, free_ports(), n, OF_A_NODE, "train", folder / "toy.toml", f"train.steps={steps}"]
        done = fork_server.run([sys.executable, WORLD, *map(str, command)], env=environment(), timeout=500)
        assert done.returncode == 0, (folder / "0.err").read_text()
        of_rank = [json.loads((folder / f"counts_{rank}.json").read_text()) for rank in range(n)]
        others = [one for rank, one in enumerate(of_rank) if rank % OF_A_NODE]
        names = {name for one in others for name in one}
        median = {name: statistics.median_low(one.get(name, 0) for one in others) for name in names}
        for kind, numbers in (("rank 0", of_rank[0]), ("first of a node", of_rank[OF_A_NODE]), ("others", median)):
            found[kind] |= {f"{name}{suffix}": number for name, number in numbers.items()}
    return found


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    "what",
    [pytest.param(row, id=" ".join(row), marks=pytest.mark.nightly if RESUMING in row[0] else ()) for row in rows()],
)
def test_it_grows_no_faster_than_the_page_says(counts, what):
    name, kind, growth = what
    numbers = {n: of_kind[kind].get(name, 0) for n, of_kind in counts.items()}

    assert grows_like(growth, numbers), f"{name}, {kind}: {numbers}"
    assert growth == "0" or max(numbers.values()) > 0, f"{name} is never counted: is its name right?"


def grows_like(growth: str, numbers: Mapping[int, int]) -> bool:
    """Return whether the increase from the second size to the third, per unit of what it grows with, is no more than
    that from the first to the second: a faster growth bends up. A busy machine may need one exchange more, which takes
    two messages of one rank, or log N."""
    if growth in ("0", "1"):
        return max(numbers.values()) <= (0 if growth == "0" else min(numbers.values()))
    small, middle, large = sorted(numbers)
    size = GROWTH[growth]
    more = 2 if growth == "N" else size(large)
    early = (numbers[middle] - numbers[small]) / (size(middle) - size(small))
    late = (numbers[large] - numbers[middle] - more) / (size(large) - size(middle))
    return late <= 1.1 * early


@pytest.mark.parametrize(
    ("growth", "numbers", "holds"),
    [
        ("log N", (18, 22, 26), True),
        ("log N", (75, 100, 130), True),
        ("log N", (8, 16, 32), False),
        ("N", (30, 48, 82), True),
        ("N", (64, 256, 1024), False),
        ("1", (3, 3, 3), True),
        ("1", (3, 3, 4), False),
        ("0", (0, 0, 1), False),
    ],
)
def test_a_faster_growth_is_noticed(growth, numbers, holds):
    assert grows_like(growth, dict(zip(SIZES, numbers, strict=True))) is holds


LOST = [
    ("killed", [13], signal.SIGKILL, r"rank 13 on \S+ has ended without a word"),
    ("frozen", [13], signal.SIGSTOP, r"rank 13 on \S+ has given no sign of life for \d+ s, since step \d+\n"),
    (
        "node frozen",
        range(8, 16),
        signal.SIGSTOP,
        r"rank 8 on \S+ has given no .*; rank 11 on \S+ has given .*; and 4 more\n",
    ),
]
"""By name, the ranks, the signal that they are sent, and what the others say. By day, a few ranks of a run are lost in
``tests/system/test_lost_peers.py``."""


@pytest.mark.parametrize(
    ("lost", "how", "sentence", "n"),
    [
        pytest.param(*case, n, id=f"{name}-{n}", marks=() if (name, n) == ("node frozen", 16) else pytest.mark.nightly)
        for n in (16, 128)
        for name, *case in LOST
    ],
)
def test_who_is_lost_among_many_ranks_is_named_by_all_others(tmp_path, lost, how, sentence, n):
    command = [sys.executable, WORLD, tmp_path, free_ports(), n, 8, "wait", 20 if n > 32 else 8]
    world = fork_server.Popen([*map(str, command)], env=environment(), start_new_session=True)
    try:
        deadline = time.monotonic() + 300
        while not (tmp_path / "step").exists() or int((tmp_path / "step").read_text() or 0) < 3:
            assert world.poll() is None, (tmp_path / "0.err").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        processes = json.loads((tmp_path / "processes.json").read_text())
        for rank in lost:
            os.kill(processes[rank], how)
        world.wait(timeout=300)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(world.pid, signal.SIGKILL)
        world.wait()

    others = {rank: (tmp_path / f"{rank}.err").read_text() for rank in range(n) if rank not in lost}
    named = re.compile("has lost another rank in step.*" + sentence)
    assert {rank: said for rank, said in others.items() if not named.search(said)} == {}


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_run_that_loses_ranks_and_goes_on_with_fewer_has_one_unbroken_record(tmp_path):
    """64 ranks, of which one is killed, then one frozen; then stopped; then 16, and 3."""
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("".join(f"line {i}: {i * 7919 % 9973}\n" for i in range(20_000)))
    toml = TOML.format(folder=tmp_path).replace("batch_size = 1", "batch_size = 1\nglobal_batch_size = 192")
    toml = toml.replace("steps = 4", "steps = 16").replace("interval = 2", "interval = 1\nkeep_last = 2")
    (tmp_path / "toy.toml").write_text(toml + "\n[metrics]\ninterval = 1\n")
    metrics = tmp_path / "runs" / "toy" / "metrics.jsonl"

    def steps():
        return [json.loads(line)["step"] for line in metrics.read_text().splitlines()] if metrics.exists() else []

    def go(n, interrupt=None):
        """Start so many ranks; after three more steps, do something to their processes. Returns the exit code."""
        before = len(steps())
        command = [sys.executable, WORLD, tmp_path, free_ports(), n, OF_A_NODE, "train", tmp_path / "toy.toml", *LIMITS]
        world = fork_server.Popen([*map(str, command)], env=environment(), start_new_session=True)
        deadline = time.monotonic() + 400
        while interrupt and len(steps()) < before + 3:
            assert world.poll() is None, (tmp_path / "0.err").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        if interrupt:
            interrupt(json.loads((tmp_path / "processes.json").read_text()))
        return world.wait(timeout=400)

    assert go(64, lambda processes: os.kill(processes[13], signal.SIGKILL)) == 5
    assert go(64, lambda processes: os.kill(processes[40], signal.SIGSTOP)) == 5
    assert go(64, lambda processes: os.kill(processes[7], signal.SIGINT)) == 3
    assert go(16, lambda processes: os.kill(processes[0], signal.SIGINT)) == 3
    assert go(3) == 0

    assert steps() == [*range(1, 17)]
    (tmp_path / "whole").mkdir()
    alone = [sys.executable, "-m", "forge_core", "run", str(tmp_path / "toy.toml"), f"run.dir={tmp_path}/whole"]
    subprocess.run(alone, env=environment(), check=True)
    losses, expected = (
        [json.loads(line)["loss"] for line in file.read_text().splitlines()]
        for file in (metrics, tmp_path / "whole" / "toy" / "metrics.jsonl")
    )
    assert losses == pytest.approx(expected, rel=1e-5)
