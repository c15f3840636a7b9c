"""The signs of life of a rank, alone on its node."""

import faulthandler
import json
import os

import pytest
import torch
import torch.distributed as dist

from forge_core.distributed.mesh import join_process_group
from forge_core.distributed.process_identity import Process
from forge_core.errors import ConfigError
from forge_plugins_monitor.peers.heartbeat import Condition, Heartbeat
from forge_plugins_monitor.peers.node_board import NodeBoard


class InTime:
    is_late = is_overdue = False


class Late(InTime):
    is_late = True


@pytest.fixture
def board_in(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def group(board_in):
    join_process_group(torch.device("cpu"), 60.0)
    yield
    dist.destroy_process_group()


def test_a_rank_that_fails_in_the_middle_of_a_beat_still_says_why(group, monkeypatch):
    condition, said = Condition(), []
    take, write = Heartbeat._take_verdict, NodeBoard.write

    def fail_meanwhile(heartbeat):
        condition.failure = "KeyError: 'a bug'"
        heartbeat._ended.set()  # as ``close`` does, before the beat has come to its end
        heartbeat._wake.set()
        take(heartbeat)

    def note(board, name, entry):
        said.append((name, dict(entry or {})))
        write(board, name, entry)

    monkeypatch.setattr(Heartbeat, "_take_verdict", fail_meanwhile)
    monkeypatch.setattr(NodeBoard, "write", note)
    heartbeat = Heartbeat(condition, InTime())
    heartbeat.close()

    assert [entry["failure"] for name, entry in said if name == "0"][-1] == "KeyError: 'a bug'"


def test_a_rank_looks_where_it_is_once_it_is_late_and_not_before(group, monkeypatch):
    """CPython 3.11 may end the process that asks, if compiled code makes a thread at that moment."""
    asked = []
    dump = faulthandler.dump_traceback
    monkeypatch.setattr(faulthandler, "dump_traceback", lambda *args, **how: asked.append(1) or dump(*args, **how))
    said = {}
    for timeout in (InTime(), Late()):
        heartbeat = Heartbeat(Condition(), timeout)
        said[timeout.is_late] = heartbeat._board.read("0")["where"], len(asked)
        heartbeat.own.is_done = True
        heartbeat.close()

    assert said[False] == ("", 0)
    where, times = said[True]
    assert ".py:" in where
    assert times > 0


def test_a_rank_in_time_says_where_it_is_as_long_as_another_one_asks(group):
    heartbeat = Heartbeat(Condition(), InTime())
    heartbeat.close()  # without its threads
    watch, said = heartbeat._new_watch(), []

    for is_asked in (True, False):
        watch._ask(is_asked)
        heartbeat._say()
        said.append(heartbeat._board.read("0")["where"])

    heartbeat._board.remove()
    assert ".py:" in said[0]
    assert said[1] == ""


def test_the_last_word_of_a_node_is_in_the_store_too(group):
    condition = Condition()
    heartbeat = Heartbeat(condition, InTime())

    condition.failure, condition.is_done = "KeyError: 'a bug'", True
    heartbeat.close()

    told = {key: json.loads(heartbeat._watch._store.get(key)) for key in ("beat/0", "signs/0")}
    assert told["signs/0"]["signs"]["0"]["said"]["failure"] == "KeyError: 'a bug'"
    assert told["beat/0"]["is_awaited"] is False, "a node that has ended is not said to be lost"


def test_the_board_is_removed_once_all_ranks_of_the_node_are_done(group, board_in):
    condition = Condition()
    heartbeat = Heartbeat(condition, InTime())
    assert len(list(board_in.iterdir())) == 1

    condition.is_done = True
    heartbeat.close()

    assert list(board_in.iterdir()) == []


def test_a_board_of_ranks_that_were_killed_is_removed_by_the_next(board_in):
    left = NodeBoard("left")
    left.write("0", {"process": {**vars_of(Process.this()), "started": "0"}})  # the number is used again
    used = NodeBoard("used")
    used.write("0", {"process": vars_of(Process.this())})

    NodeBoard("strange").write("0", {"another": "version"})

    NodeBoard("new")

    assert sorted(path.name.rpartition("-")[2] for path in board_in.iterdir()) == ["new", "strange", "used"]


def test_who_is_lost_can_be_written_on_a_disk_that_has_become_full(board_in):
    board = NodeBoard("x")

    assert next(board_in.iterdir()).joinpath("verdict").stat().st_size == 4096
    assert board.read("verdict") is None


def test_a_rank_whose_record_cannot_be_read_at_this_moment_is_taken_for_alive(group, board_in):
    heartbeat = Heartbeat(Condition(is_done=True), InTime())
    next(board_in.iterdir()).joinpath("7").write_text("{")
    heartbeat._ranks = [0, 7]
    heartbeat.close()

    assert len(list(board_in.iterdir())) == 1


def test_a_shorter_record_leaves_nothing_of_a_longer_one(board_in):
    board = NodeBoard("x")
    board.write("verdict", "a" * 10_000)
    board.write("verdict", "b")

    assert board.read("verdict") == "b"
    assert board.read("nothing") is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_temporary_folder_that_cannot_be_written_is_named(board_in):
    board_in.chmod(0o500)
    with pytest.raises(ConfigError, match=f"{board_in}, where the ranks of a node .* set TMPDIR"):
        NodeBoard("x")


def test_a_temporary_folder_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    with pytest.raises(ConfigError, match=r"/nowhere, where the ranks of a node .* set TMPDIR"):
        NodeBoard("x")


def vars_of(process):
    return json.loads(json.dumps({name: getattr(process, name) for name in ("machine", "number", "started")}))
