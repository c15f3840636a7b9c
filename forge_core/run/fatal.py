"""Ends at which no Python runs any more: a signal of the system, such as SIGBUS."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from forge_core.run.directory import ENDS, event_line
from forge_core.run.line_file import LineFile

SIGNAL_WORDS = {
    "Bus error": "SIGBUS: a file that was being read has become shorter, or a disk has failed",
    "Segmentation fault": "SIGSEGV: an error in compiled code",
    "Aborted": "SIGABRT: compiled code has given up",
}
"""By what ``faulthandler`` calls them."""


def signal_words(number: int) -> str:
    """``"SIGBUS: a file that …"``; of most signals the name alone."""
    name = signal.Signals(number).name
    return next((words for words in SIGNAL_WORDS.values() if words.startswith(f"{name}:")), name)


@contextmanager
def fatal_errors_kept(run_directory: Path, rank: int) -> Iterator[None]:
    """If such a signal ends this process, the stacks of all threads are left in the run's directory."""
    path = run_directory / "stacks" / f"fatal_rank_{rank}.txt"
    was_enabled = faulthandler.is_enabled()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
    except OSError:  # whoever needs the disk for more than this says so
        yield
        return
    faulthandler.enable(file)
    try:
        yield
    finally:
        faulthandler.disable()
        if was_enabled and sys.__stderr__ is not None:
            faulthandler.enable(sys.__stderr__)  # sys.stderr may be no file, as in a notebook
        os.close(file)
        path.unlink(missing_ok=True)
        with suppress(OSError):  # something else is in it
            path.parent.rmdir()


def note_end(run_directory: Path, error: str, exit_code: int) -> None:
    """The event ``failed`` of a start that could not write it itself."""
    path = run_directory / "events.jsonl"
    with suppress(OSError, ValueError, LookupError, TypeError):  # nothing had begun, or the disk is what has failed
        last = json.loads(path.read_bytes().split(b"\n")[-2])  # what follows is a line that was being written, or none
        if last["event"] not in ENDS:
            with closing(LineFile(path)) as file:
                file.append(event_line("failed", step=last["step"], error=error, exit_code=exit_code))
