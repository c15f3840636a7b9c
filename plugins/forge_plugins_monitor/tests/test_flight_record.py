"""The last collectives of a rank, written before it leaves."""

import json
import threading

import pytest
import torch
import torch.distributed as dist

from forge_plugins_monitor.peers.flight_record import FlightRecord
from forge_testing.several_ranks import on_ranks


class OnTwoRanks:
    def record(self):
        from pathlib import Path
        from tempfile import TemporaryDirectory

        for _ in range(3):
            dist.all_reduce(torch.ones(5))
        with TemporaryDirectory() as folder:
            FlightRecord(Path(folder), dist.get_rank(), of_nccl=False).write(wait=60)
            entries = json.loads((Path(folder) / f"rank_{dist.get_rank()}.json").read_text())["entries"]
        return [(one["profiling_name"], one["input_sizes"]) for one in entries[-3:]]


def test_a_record_has_the_last_collectives_with_their_shapes():
    assert on_ranks(OnTwoRanks, "record", 2) == [[("gloo:all_reduce", [[5]])] * 3] * 2


@pytest.fixture
def dump(monkeypatch):
    """Gives a function that takes the place of torch's for NCCL."""

    def replace(function):
        monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace", function, raising=False)

    return replace


def test_on_a_gpu_it_is_that_of_nccl_written_once(tmp_path, dump):
    records = iter([b"first", b"second"])
    dump(lambda: next(records))
    record = FlightRecord(tmp_path / "collectives", 3, of_nccl=True)

    record.write()
    record.write()

    assert (tmp_path / "collectives" / "rank_3").read_bytes() == b"first"


def test_a_device_that_does_not_answer_holds_nobody_up(tmp_path, dump):
    answers = threading.Event()
    dump(lambda: answers.wait(60) and b"record")

    FlightRecord(tmp_path, 0, of_nccl=True).write(wait=0.05)

    assert [*tmp_path.iterdir()] == []
    answers.set()
    for thread in threading.enumerate():
        if thread.name == "forge-flight-record":
            thread.join()


def test_what_cannot_be_written_is_let_go(tmp_path, dump):
    dump(lambda: b"record")
    (tmp_path / "file").write_text("")

    FlightRecord(tmp_path / "file", 0, of_nccl=True).write()

    assert (tmp_path / "file").read_text() == ""
