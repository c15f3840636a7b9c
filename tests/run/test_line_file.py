import errno
import os
from pathlib import Path

import pytest

from forge_core.run import line_file
from forge_core.run.line_file import LineFile


@pytest.fixture
def failing(monkeypatch):
    """Sets how many bytes each write may take; none is an error."""
    write, room = os.write, []

    def limited(file, text):
        if not room:
            return write(file, text)
        if room[0] == 0:
            raise OSError(room[1], os.strerror(room[1]))
        return write(file, bytes(text[: room[0]]))

    monkeypatch.setattr(line_file.os, "write", limited)

    def set_room(n=None, error=errno.ENOSPC):
        room[:] = [] if n is None else [n, error]

    return set_room


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_lines_that_find_no_room_are_kept_and_written_later(tmp_path, failing, error):
    lines = LineFile(tmp_path / "lines")
    lines.append("first")
    failing(0, error)
    for i in range(1000):
        with pytest.raises(OSError, match=os.strerror(error)):
            lines.append(f"kept {i}")
    failing()
    lines.append("last")

    assert lines.close() == 0
    assert (tmp_path / "lines").read_text().splitlines() == ["first", *[f"kept {i}" for i in range(1000)], "last"]


def test_a_line_that_was_written_in_part_is_completed(tmp_path, failing, monkeypatch):
    lines = LineFile(tmp_path / "lines")
    failing(3)
    lines.append("a line that is long")
    assert (tmp_path / "lines").read_text() == "a line that is long\n"
    failing(0)
    with pytest.raises(OSError, match="No space left"):
        lines.append("another")
    failing()

    assert lines.close() == 0
    assert (tmp_path / "lines").read_text() == "a line that is long\nanother\n"


def test_what_cannot_be_written_to_the_end_is_counted_and_bounded(tmp_path, failing, monkeypatch):
    monkeypatch.setattr(line_file, "MOST_KEPT", 100)
    lines = LineFile(tmp_path / "lines")
    failing(0)
    for _ in range(30):
        with pytest.raises(OSError, match="No space left"):
            lines.append("123456789")

    assert lines.close() == 30
    assert (tmp_path / "lines").read_text() == ""


def test_lines_beyond_the_most_that_is_kept_are_left_out_once_there_is_room(tmp_path, failing, monkeypatch):
    monkeypatch.setattr(line_file, "MOST_KEPT", 100)
    lines = LineFile(tmp_path / "lines")
    failing(0)
    for number in range(30):
        with pytest.raises(OSError, match="No space left"):
            lines.append(f"line {number:4}")
    failing()

    assert lines.close() == 20
    assert (tmp_path / "lines").read_text().splitlines() == [f"line {number:4}" for number in range(10)]


def test_the_first_line_after_there_is_room_again_is_written_after_all_that_were_kept(tmp_path, failing, monkeypatch):
    monkeypatch.setattr(line_file, "MOST_KEPT", 20)
    lines = LineFile(tmp_path / "lines")
    failing(0)
    for number in range(3):
        with pytest.raises(OSError, match="No space left"):
            lines.append(f"line {number:4}")
    failing()
    lines.append("line    3")

    assert lines.close() == 1
    assert (tmp_path / "lines").read_text().splitlines() == ["line    0", "line    1", "line    3"]


def test_lines_that_are_kept_are_written_when_all_is_made_to_last(tmp_path, failing):
    lines = LineFile(tmp_path / "lines")
    failing(0)
    with pytest.raises(OSError, match="No space left"):
        lines.append("kept")
    failing()

    lines.sync()
    assert (tmp_path / "lines").read_text() == "kept\n"


def test_text_that_is_no_utf_8_is_written_with_question_marks(tmp_path):
    lines = LineFile(tmp_path / "lines")
    lines.append(os.fsdecode(b"saved in r\xe9sum\xe9"))

    lines.close()
    assert (tmp_path / "lines").read_text() == "saved in r?sum?\n"


def test_a_file_that_cannot_be_read_to_its_end_is_not_left_open(tmp_path, monkeypatch):
    (tmp_path / "lines").write_text("torn")

    def failing_read(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(line_file.os, "pread", failing_read)
    with pytest.raises(OSError, match="Input/output error"):
        LineFile(tmp_path / "lines")

    assert not [one for one in Path("/proc/self/fd").iterdir() if one.resolve() == tmp_path / "lines"]


@pytest.mark.parametrize("torn", ["", "half a li", "x" * 10_000, "\0" * 5000])
def test_a_torn_last_line_is_cut_off(tmp_path, torn):
    path = tmp_path / "lines"
    path.write_text("one\ntwo\n" + torn)
    lines = LineFile(path)
    lines.append("three")
    lines.close()

    assert path.read_text() == "one\ntwo\nthree\n"
    path.write_text(torn)
    LineFile(path).close()
    assert path.read_text() == ""


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "lines").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(OSError, match="symbolic links"):
        LineFile(tmp_path / "lines")
    assert not (tmp_path / "elsewhere").exists()


def test_a_line_that_comes_after_the_end_is_written_nowhere(tmp_path):
    lines = LineFile(tmp_path / "lines")
    lines.close()
    another = (tmp_path / "another").open("w")

    lines.append("late")
    lines.sync()

    another.close()
    assert (tmp_path / "another").read_text() == (tmp_path / "lines").read_text() == ""
