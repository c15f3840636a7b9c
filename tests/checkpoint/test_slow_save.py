"""A save that takes longer than ``checkpoint.timeout`` is one save, not the end of saving."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fork_server
from forge_core.checkpoint.store import CheckpointStore, whole_problem
from rank_ports import free_ports

RANKS = 3


@pytest.mark.slow
def test_one_that_is_too_slow_is_agreed_upon_and_those_after_it_are_written(tmp_path):
    """In the second save rank 0 is late, with the name alone, so that it is there in the end; in the fourth
    another one is late, and it is not."""
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports())}
    ranks = [
        fork_server.Popen(
            [sys.executable, str(Path(__file__).with_name("stalling_rank.py")), str(tmp_path), "3"],
            env={**shared, "WORLD_SIZE": str(RANKS), "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        ended = [rank.communicate(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * RANKS, ended

    first, *others = [[json.loads(line) for line in out.splitlines()] for out, _ in ended]
    assert others == [first] * (RANKS - 1)
    errors = dict(first)
    assert "(checkpoint.timeout = 3)" in errors.pop(4)
    assert errors == {1: None, 2: None, 3: None, 5: None}
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.steps() == [1, 2, 3, 5]
    assert [whole_problem(store.folder(step)) for step in store.steps()] == [None] * 4
