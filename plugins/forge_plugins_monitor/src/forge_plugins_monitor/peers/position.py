"""Where in the code a thread is, in words for a person: file, line, and the callback that has been called there."""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+) .*\n((?:  .*\n)*)", re.MULTILINE)
_LINE = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_CALLS_CALLBACKS = ("events.py", "call")  # `Events.call` of the core, which stands above `train`


def position_of_thread(thread: int) -> str:
    """Where it is now, outside of torch if it has been called from elsewhere; empty if it has ended.

    The interpreter writes it down. To hold frames of a thread that goes on is not safe: torch's compiler frees those
    that it runs, and whoever asks a frame for the next one then reads freed memory (CPython 3.11, torch 2.13). So a
    thread is asked for its frames in a callback alone, if that has called nothing compiled.
    """
    lines = _written_lines(thread)
    outside = [line for line in lines if not _is_torch(line[0])]
    position = "".join(f"{Path(file).name}:{line}" for file, line, _ in (outside or lines)[:1])
    is_compiled = any(f"{os.sep}_dynamo{os.sep}" in file for file, *_ in lines)
    if not is_compiled and any((Path(file).name, function) == _CALLS_CALLBACKS for file, _, function in lines):
        return position + _callback_of(_frames_from(sys._current_frames().get(thread)))
    return position


def position_of_error(error: BaseException) -> str:
    """Where it was raised, outside of torch."""
    steps = [*traceback.walk_tb(error.__traceback__)][::-1]
    found = (step for step in steps if not _is_torch(step[0].f_code.co_filename))
    position = next((f"{Path(frame.f_code.co_filename).name}:{line}" for frame, line in found), "")
    return position + _callback_of(frame for frame, _ in steps)


def _written_lines(thread: int) -> list[tuple[str, str, str]]:
    """File, line and function of its hundred innermost frames, innermost first."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        written = file.read().decode(errors="replace")
    stacks = {int(number, 16): lines for number, lines in _THREAD.findall(written)}
    return _LINE.findall(stacks.get(thread, ""))


def _is_torch(file: str) -> bool:
    return f"{os.sep}torch{os.sep}" in file


def _callback_of(frames: Iterable[FrameType]) -> str:
    """
    Args:
        frames: innermost first.
    """
    for frame in frames:
        if frame.f_code.co_qualname == "Events.call":
            return f", in {frame.f_locals.get('name')}, {frame.f_locals.get('event')}"
    return ""


def _frames_from(frame: FrameType | None) -> Iterable[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
