"""One rank of a launch that is told to stop, run after run: starting processes costs more than a tiny run.

Arguments: the configuration, and a JSON file with the runs, each of ``port``, ``overrides``, and, if a rank signals
itself, ``rank`` and the ``moment``. Prints, for each run, how it has ended and at which step.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from unittest.mock import patch

from forge_core.checkpoint.saver import Saver
from forge_core.data.loader import BatchLoader
from forge_core.job import load_job
from forge_core.registry.discovery import discover
from forge_core.run.process import hard_exit
from forge_core.run.run import run_job
from forge_core.train.model_evaluator import ModelEvaluator
from forge_core.train.trainer import Trainer

STEP = 4
"""At which the moment comes."""


def signal_self(after: float = 0.0) -> None:
    """Now, or while whatever comes next has the main thread."""
    if after:
        threading.Timer(after, signal_self).start()
    else:
        os.kill(os.getpid(), signal.SIGUSR1)


def in_a_step(original):
    def train_step(self, microbatches):
        if self.step == STEP:
            signal_self()
        return original(self, microbatches)

    return train_step


def in_a_first_step(original):
    def train_step(self, microbatches):
        if self.step == 1:
            signal_self(after=1.0)
        return original(self, microbatches)

    return train_step


def in_an_evaluation(original):
    def run(self, source, **options):
        signal_self()
        return original(self, source, **options)

    return run


def in_the_writing(original):
    def write_and_commit(self, snapshot, tensors):
        if snapshot.step == STEP:
            signal_self()
            time.sleep(0.3)
        original(self, snapshot, tensors)

    return write_and_commit


def in_waiting_for_data(original):
    calls = iter(range(1, 1_000_000_000))

    def get_next(self):
        if next(calls) == STEP:
            signal_self(after=0.1)
            time.sleep(0.5)
        return original(self)

    return get_next


MOMENTS = {
    "step": (Trainer, "_train_step", in_a_step),
    "compiling": (Trainer, "_train_step", in_a_first_step),
    "evaluation": (ModelEvaluator, "losses", in_an_evaluation),
    "writing": (Saver, "_write_and_commit", in_the_writing),
    "data": (BatchLoader, "__next__", in_waiting_for_data),
}


def main() -> None:
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # one may come when the run has stopped for that of another rank
    reached = []
    train = Trainer.train

    def remembering(self, **options):
        stopped = train(self, **options)
        reached.append((self.step, stopped))
        return stopped

    Trainer.train = remembering
    catalog = discover()
    for plan in json.loads(Path(sys.argv[2]).read_text()):
        os.environ["MASTER_PORT"] = str(plan["port"])
        job = load_job(Path(sys.argv[1]), plan["overrides"], catalog=catalog, world_size=int(os.environ["WORLD_SIZE"]))
        if str(plan.get("rank")) == os.environ["RANK"]:
            cls, method, wrapped = MOMENTS[plan["moment"]]
            with patch.object(cls, method, wrapped(getattr(cls, method))):
                code = run_job(job, catalog)
        else:
            code = run_job(job, catalog)
        print(json.dumps([int(code), *reached[-1]]), flush=True)
    hard_exit()


main()
