"""Checkpoints that are written in the background, while two ranks train."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fork_server
from forge_core.checkpoint.store import CheckpointStore, whole_problem
from rank_ports import free_ports

RANK = Path(__file__).with_name("saving_rank.py")


@pytest.fixture
def start(tmp_path):
    processes = []

    def start(group):
        shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports()), "WORLD_SIZE": "2"}
        for rank in range(2):
            processes.append(
                fork_server.Popen(
                    [sys.executable, str(RANK), str(tmp_path), group],
                    env={**shared, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        return processes

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_twenty_in_a_row_neither_stop_training_nor_hold_two_steps_values(start, tmp_path):
    """A group of their own lets collectives of saving and training overtake each other; a copy keeps what is trained
    on out of the files."""
    for process in start("own"):
        _, said = process.communicate(timeout=240)
        assert process.returncode == 0, said

    steps, steps_while_writing = map(int, (tmp_path / "steps").read_text().split())
    assert steps_while_writing > 20, f"{steps} steps"  # else nothing was tested
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.steps() == list(range(1, 21))
    for step in store.steps():
        assert whole_problem(store.folder(step)) is None
        read = {f"model.{name}": torch.zeros(1000, 300) for name in ("first", "second")}
        store.at(step, print).load(read)
        assert {value for tensor in read.values() for value in tensor.unique().tolist()} == {float(step)}


@pytest.mark.nightly
def test_on_the_group_of_training_they_would_wait_for_each_other_or_be_mixed_up(start):
    """That the test above can fail."""
    processes = start("default")

    try:
        ended = [process.wait(timeout=60) for process in processes]
    except subprocess.TimeoutExpired:
        return
    assert any(ended)
