"""A process that gets no further is ended by its watchdog."""

import signal
import subprocess
import sys

import pytest

WATCHED = """
import sys, time
from pathlib import Path
from forge_plugins_monitor.peers.watchdog import Watchdog

watchdog = Watchdog("rank 3", Path(sys.argv[1]))
watchdog.tell(7, 0.2)
"""


@pytest.mark.slow
def test_it_writes_the_stacks_of_a_process_that_hangs_and_kills_it(tmp_path):
    stacks = tmp_path / "stacks" / "rank_3.txt"
    program = WATCHED + "while True: time.sleep(1)"

    done = subprocess.run([sys.executable, "-c", program, stacks], capture_output=True, text=True, timeout=90)

    assert done.returncode == -signal.SIGKILL
    assert "error: rank 3 has got no further for" in done.stderr
    assert "in step 7; it is ended now, its stacks are in" in done.stderr
    assert stacks.read_text().splitlines()[0].endswith("step 7")


def test_a_process_that_is_done_is_let_go(tmp_path):
    program = WATCHED + "watchdog.close()"

    done = subprocess.run([sys.executable, "-c", program, tmp_path / "no"], capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "no").exists()
