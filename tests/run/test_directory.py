"""The files of a run, in a folder that others may have had their hands in."""

import os
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest

from forge_core.errors import ConfigError
from forge_core.run.directory import BETWEEN_STARTS, RunDirectory
from forge_core.run.lease import Lease, refuse_if_held
from forge_core.run.line_file import LineFile


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "run").mkdir()
    return RunDirectory(SimpleNamespace(run=SimpleNamespace(dir=tmp_path, name="run")), writes=True)


def test_lines_of_the_metrics_that_are_none_are_put_aside_and_said_and_the_others_stay(directory, capsys):
    file = directory.path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1}\n{"st\xff\xfep": 2}\n[3]\n\n{"step": 2}\n{"step": 3}\n' + b"[" * 100_000 + b"\n")

    directory.forget_after(2)
    directory.write_metrics({"step": 3, "loss": 1.5})
    directory.close()

    assert file.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3, "loss": 1.5}\n'
    aside = file.with_name("metrics.jsonl.aside").read_text().splitlines()
    assert aside[:2] == [r'{"st\xff\xfep": 2}', "[3]"]
    assert f"3 of the lines of {file} are no metrics" in capsys.readouterr().err


def test_a_long_history_is_gone_through_one_line_at_a_time(directory):
    file = directory.path / "metrics.jsonl"
    whole = b"".join(b'{"step": %d, "loss": 1.25, "note": "%s"}\n' % (step, b"." * 1000) for step in range(4000))
    file.write_bytes(whole + b'{"step": 4000}')

    tracemalloc.start()
    directory.forget_after(4000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    directory.close()

    assert file.read_bytes() == whole + b'{"step": 4000}\n'
    assert peak < len(whole) / 4


def test_a_log_has_what_was_said_before_it_was_opened_and_a_line_between_starts(directory, monkeypatch):
    monkeypatch.setattr("forge_core.run.directory.dump_job", lambda job: "")
    directory.path.joinpath("metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    for said, step in (("first", 2), ("second", 1)):
        directory.write_log(said)
        directory.open(None, {}, step)
        directory.close()
        directory = RunDirectory(
            SimpleNamespace(run=SimpleNamespace(dir=directory.path.parent, name="run")), writes=True
        )

    first, between, second = (directory.path / "log.txt").read_text().splitlines()
    assert (first[21:], between, second[21:]) == ("first", BETWEEN_STARTS, "second")
    assert (directory.path / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_values_that_are_no_numbers_are_null_and_a_file_that_is_written_anew_is_not_left_open(directory):
    directory.forget_after(0)
    directory.write_metrics({"step": 1, "loss": float("nan"), "ratio": float("inf")})
    directory.forget_after(1)

    handles = [str(one.readlink()) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
    assert [one for one in handles if one.startswith(str(directory.path))] == [str(directory.path / "metrics.jsonl")]
    directory.close()
    assert (directory.path / "metrics.jsonl").read_text() == '{"step": 1, "loss": null, "ratio": null}\n'


def test_a_disk_that_fails_is_complained_about_once_each_time(directory, monkeypatch, capsys):
    directory.forget_after(0)
    works = os.write

    def fails(*_):
        raise OSError(5, "Input/output error")

    for write in (fails, fails, works, fails):
        monkeypatch.setattr("forge_core.run.line_file.os.write", write)
        directory.write_metrics({"step": 1})
        directory.write_metrics({"step": 2})
    directory.close()

    said = capsys.readouterr().err
    assert said.count("lines are kept in memory until it works again") == 2
    assert f"lines are missing in {directory.path}, which could not be written: 2 of metrics.jsonl" in said


def test_events_that_a_disk_has_damaged_do_not_hide_the_others(directory):
    (directory.path / "events.jsonl").write_bytes(
        b'{"event": "saved", "seconds": 1}\n{"ev\xffnt\n[1]\n'
        b'{"event": "saved", "seconds": "x"}\n{"event": "stopping"}\n' + b"[" * 100_000 + b'\n{"event": "failed"}\n'
    )

    assert [event["event"] for event in directory.events()] == ["saved", "failed"]


def test_a_directory_of_another_user_is_refused(directory, monkeypatch):
    directory.refuse_if_unwritable()
    monkeypatch.setattr(os, "geteuid", lambda: directory.path.stat().st_uid + 1)
    RunDirectory(
        SimpleNamespace(run=SimpleNamespace(dir=directory.path.parent, name="own")), writes=True
    ).refuse_if_unwritable()

    with pytest.raises(ConfigError, match=r"run\.dir: .*run belongs to another user \(number \d+\), who could put"):
        directory.refuse_if_unwritable()


def test_links_that_somebody_has_planted_are_not_written_through(directory, tmp_path):
    treasure = tmp_path / "treasure"
    treasure.write_text("mine\n")
    for name in ("metrics.jsonl", "metrics.jsonl.aside", "lease.json"):
        (directory.path / name).symlink_to(treasure)

    with pytest.raises(OSError, match="symbolic links"):
        LineFile(directory.path / "metrics.jsonl.aside")
    with pytest.raises(ConfigError, match=r"lease\.json is a link, which is not followed; remove it"):
        Lease(directory.path, print)
    with pytest.raises(ConfigError, match=r"lease\.json cannot be read, .*: it is a link, not a file of its own"):
        refuse_if_held(directory.path)

    assert treasure.read_text() == "mine\n"
