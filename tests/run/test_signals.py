import fcntl
import os
import signal
import termios
import threading
import time
from contextlib import ExitStack

import pytest

from forge_core import launch
from forge_core.contracts.callback import Requests
from forge_core.errors import ExitCode
from forge_core.run.signals import stop_on_signals


def test_a_signal_in_the_middle_of_a_line_is_told_after_that_line():
    """The disk is slow, and the signal comes while the file is locked by the thread that is interrupted."""
    reader, writer = os.pipe()
    lines = os.fdopen(writer, "w", buffering=1)
    read = []

    def signal_and_then_read():
        while not fcntl.ioctl(reader, termios.FIONREAD, bytes(4)).strip(b"\0"):  # the line has begun
            time.sleep(0.01)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        while part := os.read(reader, 1 << 16):
            read.append(part)

    disk = threading.Thread(target=signal_and_then_read)
    said = threading.Event()

    def say(line):
        lines.write(line + "\n")
        said.set()

    requests = Requests()
    with stop_on_signals(requests, say):
        disk.start()
        lines.write("x" * (1 << 20) + "\n")
        assert said.wait(30)
    lines.close()
    disk.join()
    os.close(reader)

    assert requests.stop == "SIGTERM"
    first, second = b"".join(read).decode().splitlines()
    assert first == "x" * (1 << 20)
    assert second == "SIGTERM: will save and stop after this step"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ranks_that_are_told_with_their_launcher_before_they_listen_are_stopped_and_not_lost(
    tmp_path, capsys, monkeypatch, number
):
    """As by a scheduler that tells all processes of a job: they may have ended before the launcher can pass it on."""
    tell_all = f"import os; [os.kill(process, {int(number)}) for process in (os.getppid(), os.getpid())]"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which the launcher would set for its ranks
    monkeypatch.setattr(launch, "RANK_PROGRAM", ("-S", "-c", tell_all))

    with ExitStack() as until_the_end:
        code = launch.launch(
            launch.Ranks(2, "", [], {}), max_restarts=0, checkpoints=tmp_path, until_the_end=until_the_end
        )

    assert code == ExitCode.STOPPED
    assert f"{number.name}: stopped, and not started again; there is no checkpoint yet" in capsys.readouterr().out
