import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time

import attrs
import pytest

import forge_core.run.lease
from forge_core.errors import ConfigError, LeaseLostError
from forge_core.run.lease import FILE_NAME, Lease, refuse_if_held, refuse_unless_shared


def _quiet(_):
    raise AssertionError("nothing to report")


@pytest.fixture
def foreign(tmp_path):
    """Writes the lease of an attempt on another host."""
    beats = iter(range(1000))

    def write():
        sign = {"attempt": "b" * 32, "host": "node7", "machine": "elsewhere", "process": 9, "started": "1", "job": "42"}
        (tmp_path / FILE_NAME).write_text(json.dumps({**sign, "beat": next(beats)}))

    return write


def test_nothing_is_left_of_one_that_was_given_back(tmp_path):
    Lease(tmp_path, _quiet).give_back()

    assert list(tmp_path.iterdir()) == []
    Lease(tmp_path, _quiet).give_back()


def test_a_second_process_is_refused_and_told_who_is_training(tmp_path):
    lease = Lease(tmp_path, _quiet)
    code = "import sys, pathlib; from forge_core.run.lease import Lease; Lease(pathlib.Path(sys.argv[1]), print)"

    second = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=60)

    assert f"process {os.getpid()} on" in second.stderr
    assert second.returncode != 0
    lease.refuse_if_lost()
    lease.give_back()


def test_one_that_a_killed_process_left_is_taken_over_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(forge_core.run.lease, "_changes", _quiet)
    take = "from forge_core.run.lease import Lease; Lease(pathlib.Path(sys.argv[1]), print)"
    code = f"import os, sys, pathlib; {take}; os._exit(9)"
    subprocess.run([sys.executable, "-c", code, tmp_path], timeout=60)
    said = []

    lease = Lease(tmp_path, said.append)

    assert "taking over from process" in said[0]
    lease.refuse_if_lost()
    lease.give_back()


def test_one_on_another_host_that_gives_signs_of_life_is_respected(tmp_path, foreign):
    foreign()
    done = threading.Event()

    def beat():
        while not done.wait(0.2):
            foreign()

    beating = threading.Thread(target=beat)
    beating.start()
    with pytest.raises(ConfigError, match=r"process 9 on node7, job 42"):
        refuse_if_held(tmp_path)
    done.set()
    beating.join()


def test_one_on_another_host_that_is_silent_is_taken_over(tmp_path, foreign, monkeypatch):
    monkeypatch.setattr(forge_core.run.lease, "SILENCE", 0.6)
    foreign()

    ended = refuse_if_held(tmp_path)
    lease = Lease(tmp_path, lambda line: None, ended)

    lease.refuse_if_lost()
    lease.give_back()


def test_a_longer_one_is_written_over_whole(tmp_path, foreign, monkeypatch):
    monkeypatch.setattr(forge_core.run.lease, "_refuse_if_alive", lambda path, found: None)
    foreign()
    longer = (tmp_path / FILE_NAME).read_text().replace("node7", "node7" * 100)
    (tmp_path / FILE_NAME).write_text(longer)

    lease = Lease(tmp_path, lambda line: None)

    assert json.loads((tmp_path / FILE_NAME).read_text())["process"] == os.getpid()
    lease.give_back()


def test_one_that_has_been_found_silent_is_not_watched_again_and_a_new_holder_is(tmp_path, foreign, monkeypatch):
    monkeypatch.setattr(forge_core.run.lease, "SILENCE", 0.6)
    foreign()
    ended = refuse_if_held(tmp_path)
    with monkeypatch.context() as context:
        context.setattr(forge_core.run.lease, "_changes", _quiet)
        Lease(tmp_path, lambda line: None, ended).give_back()

    other = Lease(tmp_path, _quiet)
    with pytest.raises(ConfigError, match=f"another process is training in {tmp_path}: process {os.getpid()} on"):
        Lease(tmp_path, _quiet, ended)
    other.give_back()


def test_of_two_that_take_it_over_at_once_the_last_one_has_it(tmp_path, foreign, monkeypatch):
    monkeypatch.setattr(forge_core.run.lease, "_refuse_if_alive", lambda path, found: None)
    foreign()
    monkeypatch.setattr(forge_core.run.lease.time, "sleep", lambda seconds: foreign())

    with pytest.raises(LeaseLostError, match=r"another attempt \(process 9 on node7, job 42\) has taken over"):
        Lease(tmp_path, lambda line: None)


def test_one_that_was_taken_over_meanwhile_may_not_commit(tmp_path, foreign):
    lease = Lease(tmp_path, _quiet)

    foreign()

    with pytest.raises(LeaseLostError, match="node7"):
        lease.refuse_if_lost()
    lease.give_back()
    assert (tmp_path / FILE_NAME).exists(), "it is the other's now"


def test_one_that_another_attempt_has_taken_over_and_given_back_is_lost_all_the_same(tmp_path):
    """A process that was stopped for hours: the run has long been finished by another one."""
    lease = Lease(tmp_path, _quiet)

    (tmp_path / FILE_NAME).unlink()

    with pytest.raises(
        LeaseLostError,
        match=f"^{tmp_path}/lease.json is gone: removed, or another attempt has had the run and ended, as",
    ):
        lease.refuse_if_lost()
    time.sleep(2.5)
    assert not (tmp_path / FILE_NAME).exists(), "its heartbeat must not take the run back"
    lease.give_back()


def test_one_that_cannot_be_read_is_refused_with_a_sentence(tmp_path):
    (tmp_path / FILE_NAME).mkdir()

    with pytest.raises(ConfigError, match=r"lease\.json cannot be read"):
        refuse_if_held(tmp_path)


def test_one_that_cannot_be_read_again_while_it_is_watched_is_refused_with_a_sentence(tmp_path, foreign, monkeypatch):
    """NFS, where another host has replaced the file."""
    foreign()
    read, calls = forge_core.run.lease._read, iter(range(10))

    def stale(path):
        if next(calls):
            raise OSError(errno.ESTALE, "Stale file handle")
        return read(path)

    monkeypatch.setattr(forge_core.run.lease, "_read", stale)

    with pytest.raises(ConfigError, match=r"lease\.json cannot be read, .*: Stale file handle"):
        refuse_if_held(tmp_path)


def test_the_heartbeat_does_not_write_over_another_ones(tmp_path, foreign):
    lease = Lease(tmp_path, _quiet)
    foreign()
    before = (tmp_path / FILE_NAME).read_text()

    time.sleep(2.5)

    assert (tmp_path / FILE_NAME).read_text() == before
    lease.give_back()


def test_a_heartbeat_that_is_being_written_does_not_outlive_the_lease(tmp_path, monkeypatch):
    monkeypatch.setattr(forge_core.run.lease, "BEAT", 0.05)
    write, is_writing = forge_core.run.lease._write, threading.Event()

    def slow(path, text):
        is_writing.set()
        time.sleep(0.3)
        write(path, text)

    monkeypatch.setattr(forge_core.run.lease, "_write", slow)
    lease = Lease(tmp_path, _quiet)
    assert is_writing.wait(10)

    lease.give_back()
    time.sleep(0.5)
    assert list(tmp_path.iterdir()) == []


def test_the_heart_beats_again_after_a_disk_has_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(forge_core.run.lease, "BEAT", 0.05)
    write, tries, has_beaten = forge_core.run.lease._write, iter(range(100)), threading.Event()

    def failing(path, text):
        if next(tries) < 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        write(path, text)
        has_beaten.set()

    monkeypatch.setattr(forge_core.run.lease, "_write", failing)
    lease = Lease(tmp_path, _quiet)

    assert has_beaten.wait(10)
    lease.give_back()


def test_one_that_is_lost_does_not_come_back(tmp_path, foreign):
    lease = Lease(tmp_path, _quiet)
    own = (tmp_path / FILE_NAME).read_text()
    foreign()
    with pytest.raises(LeaseLostError, match="node7"):
        lease.refuse_if_lost()
    (tmp_path / FILE_NAME).write_text(own)

    with pytest.raises(LeaseLostError, match="another attempt"):
        lease.refuse_if_lost()
    lease.give_back()


def test_one_that_is_given_back_while_it_is_watched_is_free(tmp_path, foreign):
    foreign()
    ends = threading.Timer(0.4, (tmp_path / FILE_NAME).unlink)
    ends.start()

    refuse_if_held(tmp_path)
    ends.join()


def test_one_that_is_read_half_is_read_again(tmp_path, foreign, monkeypatch):
    foreign()
    read, times = forge_core.run.lease.read_regular_file, iter(range(100))

    def half(path, *limits, **how):
        text = read(path, *limits, **how)
        return text[: len(text) // 2] if next(times) < 3 else text

    monkeypatch.setattr(forge_core.run.lease, "read_regular_file", half)

    assert forge_core.run.lease._read(tmp_path / FILE_NAME)[0].host == "node7"


def test_a_process_number_that_is_used_again_is_another_process(tmp_path):
    lease = Lease(tmp_path, _quiet)
    holder = lease._own
    lease.give_back()

    assert holder.identity.is_running
    assert not attrs.evolve(holder, started="1").identity.is_running


def test_a_rank_that_does_not_see_the_directory_of_the_first_one_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("forge_core.run.lease.SHOWS_AFTER", 0.3)
    lease = Lease(tmp_path / "shared", _quiet)

    refuse_unless_shared(tmp_path / "shared", lease.attempt)
    for elsewhere in (tmp_path / "own", tmp_path / "shared"):
        with pytest.raises(ConfigError, match=r"run\.dir: .* does not see .* a file system that all nodes share"):
            refuse_unless_shared(elsewhere, lease.attempt if elsewhere.name == "own" else "of an earlier start")
    lease.give_back()


def test_a_rank_that_sees_it_late_waits(tmp_path):
    """As over NFS."""
    lease = Lease(tmp_path / "far", _quiet)
    late = threading.Timer(0.5, lambda: shutil.copytree(tmp_path / "far", tmp_path / "near"))
    late.start()

    refuse_unless_shared(tmp_path / "near", lease.attempt)
    late.join()
    lease.give_back()
