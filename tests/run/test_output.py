"""What nobody reads is dropped; the process goes on."""

import os
import subprocess
import sys

PRINTS = """
import os, sys
from forge_core.run.output import LossyOutput

LossyOutput().__enter__()
for i in range(2000):
    print("line", i, "x" * 100, flush=i % 2 == 0)
print("more", file=sys.stderr, flush=True)
if "full" not in os.readlink("/proc/self/fd/1"):
    os.write(1, b"from beside")
opened = os.open(os.devnull, os.O_RDONLY)
result = os.fdopen(int(sys.argv[1]), "w")
result.write(f"went on, {opened > 2}")
"""


def run(shell):
    """What it says at its end, by a way of its own; and on the error stream."""
    reading, writing = os.pipe()
    done = subprocess.run(
        ["bash", "-c", shell, "bash", sys.executable, "-c", PRINTS, str(writing)],
        pass_fds=[writing],
        capture_output=True,
        text=True,
        timeout=100,
    )
    os.close(writing)
    with os.fdopen(reading) as said:
        return done.returncode, said.read(), done.stderr


def test_a_pipe_that_is_read_no_more():
    assert run('"$@" | head -n 2; exit ${PIPESTATUS[0]}') == (0, "went on, True", "more\n")


def test_error_stream_of_a_pipe_that_is_read_no_more():
    assert run('"$@" 2>&1 | head -n 2; exit ${PIPESTATUS[0]}') == (0, "went on, True", "")


def test_streams_that_were_closed_at_the_start():
    assert run('exec "$@" >&- 2>&- <&-') == (0, "went on, True", "")


def test_a_disk_that_is_full_behind_a_stream():
    assert run('exec "$@" >/dev/full') == (0, "went on, True", "more\n")
