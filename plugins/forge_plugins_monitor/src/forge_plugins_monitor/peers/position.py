"""Where in the code a thread is, in words for a person: file, line, and the callback that has been called there."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType


def position_of_thread(thread: int) -> str:
    """Where it is now, outside of torch; empty if it has ended."""
    return _place_of(_frames_from(sys._current_frames().get(thread)))


def position_of_error(error: BaseException) -> str:
    """Where it was raised, outside of torch."""
    return _place_of(reversed([*traceback.walk_tb(error.__traceback__)]))


def _place_of(frames: Iterable[tuple[FrameType, int]]) -> str:
    """
    Args:
        frames: with the lines where they are, innermost first.
    """
    position = callback = ""
    for frame, line in frames:
        if not position and f"{os.sep}torch{os.sep}" not in frame.f_code.co_filename:
            position = f"{Path(frame.f_code.co_filename).name}:{line}"
        if frame.f_code.co_qualname == "Events.call":  # of `train`, which stands above this
            callback = f", in {frame.f_locals.get('name')}, {frame.f_locals.get('event')}"
            break
    return position + callback


def _frames_from(frame: FrameType | None) -> Iterator[tuple[FrameType, int]]:
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back
