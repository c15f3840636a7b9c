"""One rank of ``test_host_memory``: ``forge run``, killed as by ``kill -9`` once a checkpoint is in memory.

``KILLED_AT`` is a step, and the step of the checkpoint in memory that is waited for: ``17:15``; -1 for none. With
``free:0``, so many bytes are free.
"""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from forge_core.cli import main
from forge_core.train.trainer import Trainer
from forge_plugins_mirror.host_memory.mirror import HostMemory

wants, train_step = HostMemory.wants, Trainer._train_step
killed_at, _, awaited = os.environ["KILLED_AT"].partition(":")


def step(self, microbatches):
    if str(self.step) == killed_at:
        file = self.run.context.run_dir / "memory.json"
        name = f"step_{int(awaited):08d}" if int(awaited) >= 0 else json.loads(file.read_text())["newest"]
        deadline = time.monotonic() + 60
        while json.loads(file.read_text())["newest"] != name and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
    return train_step(self, microbatches)


def waits(self, step):
    """None is left out because the one before takes longer than so many of these steps."""
    self._keeper.wait()
    return wants(self, step)


HostMemory.wants = waits  # type: ignore[method-assign]
Trainer._train_step = step  # type: ignore[method-assign]
if killed_at == "free":

    def usage(path):
        """Rank 0 of a node looks at the folder a second after rank 1 does."""
        time.sleep(1 - int(os.environ["RANK"]) % 2)
        Path(path).stat()
        return SimpleNamespace(free=int(awaited))

    shutil.disk_usage = usage  # type: ignore[assignment]
sys.exit(main(sys.argv[1:]))
