"""Where in the code a thread is, in words for a person: file and line; and of an error, the callback that raised it."""

from __future__ import annotations

import faulthandler
import os
import re
import tempfile
import traceback
from pathlib import Path

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+) .*\n((?:  .*\n)*)", re.MULTILINE)
_LINE = re.compile(r'^  File "(.*)", line (\d+) in ', re.MULTILINE)


def position_of_thread(thread: int) -> str:
    """Where it is now, outside of torch if it has been called from elsewhere; empty if that cannot be told.

    The interpreter writes it down. To hold frames of a thread that goes on is not safe: torch's compiler frees those
    that it runs, and whoever asks a frame for the next one then reads freed memory (CPython 3.11, torch 2.13). The
    interpreter in turn looks at all threads, and reads what is not there yet if compiled code makes one at that very
    moment (CPython 3.11, ``cframe``): look where somebody must know, and not now and then.
    """
    lines = _written_lines(thread)
    outside = [line for line in lines if not _is_torch(line[0])]
    return "".join(f"{Path(file).name}:{line}" for file, line in (outside or lines)[:1])


def position_of_error(error: BaseException) -> str:
    """Where it was raised, outside of torch."""
    position = callback = ""
    for frame, line in [*traceback.walk_tb(error.__traceback__)][::-1]:
        if not position and not _is_torch(frame.f_code.co_filename):
            position = f"{Path(frame.f_code.co_filename).name}:{line}"
        if frame.f_code.co_qualname == "Events.call":  # of `train`, which stands above this
            callback = f", in {frame.f_locals.get('name')}, {frame.f_locals.get('event')}"
            break
    return position + callback


def _written_lines(thread: int) -> list[tuple[str, str]]:
    """File and line of its hundred innermost frames, innermost first; of a hundred threads, the newest."""
    try:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            written = file.read().decode(errors="replace")
    except OSError:  # a sign of life goes out where a disk is full, too
        return []
    stacks = {int(number, 16): lines for number, lines in _THREAD.findall(written)}
    return _LINE.findall(stacks.get(thread, ""))


def _is_torch(file: str) -> bool:
    return f"{os.sep}torch{os.sep}" in file
