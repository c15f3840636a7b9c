"""Runs that cannot go on, and what they have saved by then."""

import json
import os
import sys

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

import fork_server
from forge_core.checkpoint.store import open_checkpoint
from forge_core.cli import main
from forge_core.train.trainer import Trainer

TOML = """
[run]
name = "sick"
dir = "{folder}/runs"
[model]
name = "transformer"
dim = 32
n_layers = 1
n_heads = 4
max_seq_len = 64
[data]
name = "numbered"
marked = [{marked}]
[train]
steps = 12
seq_len = 16
batch_size = 4
precision = "fp32"
[optimizer]
name = "adamw"
lr = 1e-3
[checkpoint]
interval = 2
[anomalies]
roll_back_after = 2
give_up_after = 1
[[callbacks]]
name = "poison"
nan = true
{poison}
"""
MARKED = 'what = "loss"\nmarked = true'


class Sick:
    def __init__(self, folder):
        self._folder = folder
        self.config = folder / "sick.toml"

    def describe(self, poison, marked="0, 0"):
        self.config.write_text(TOML.format(folder=self._folder, poison=poison, marked=marked))

    def run(self, *settings):
        return main(["run", str(self.config), *settings])

    @property
    def steps_saved(self):
        return sorted(int(path.name[5:]) for path in (self._folder / "runs/sick/checkpoints").glob("step_*"))

    def saved(self, step):
        return open_checkpoint(self._folder / f"runs/sick/checkpoints/step_{step:08d}")

    def events(self):
        lines = (self._folder / "runs/sick/events.jsonl").read_text().splitlines()
        return [(event["event"], event["step"]) for event in map(json.loads, lines)]


@pytest.fixture
def sick(tmp_path, monkeypatch, saboteur_site):
    monkeypatch.syspath_prepend(saboteur_site[0])
    return Sick(tmp_path)


def test_after_so_many_rollbacks_the_run_ends_with_4_and_the_checkpoint_from_before_is_the_newest(sick, capfd):
    sick.describe(MARKED, marked="18, 400")  # in step 5, after a rollback step 5 again, and so on

    assert sick.run() == 4

    assert sick.steps_saved == [2, 4]
    error = capfd.readouterr().err
    assert "the 2 steps from 5 on" in error
    assert "gone back to step_00000004 1 times, which is anomalies.give_up_after" in error
    assert "samples 24 to 31" in error
    happened = [event for event in sick.events() if event[0] in ("skipped", "rolled_back", "failed")]
    rows = [("skipped", 5), ("skipped", 6)]
    assert happened == [*rows, ("rolled_back", 6), *rows, ("failed", 6)]


def test_two_ranks_give_up_together(sick, saboteur_site):
    sick.describe(MARKED, marked="18, 400")

    done = fork_server.run(
        [sys.executable, "-m", "forge_core", "run", str(sick.config), "--nproc", "2", "train.batch_size=2"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(saboteur_site)},
        capture_output=True,
        text=True,
        timeout=400,
    )

    assert done.returncode == 4, done.stdout + done.stderr
    assert sick.steps_saved == [2, 4]
    assert done.stderr.count("the 2 steps from 5 on") == 1, "one rank says it for all"


def test_a_rollback_that_gets_a_checkpoint_further_does_not_count(sick):
    sick.describe(MARKED, marked="18, 24")

    assert sick.run() == 0
    assert sick.steps_saved == [2, 4, 6, 8, 10, 12]
    state = sick.saved(12).state()
    assert (state["rolling_back"], state["left_out"]) == ({"attempts": 1, "to_step": 4}, [[16, 24]])

    sick.describe('what = "loss"\nsteps = [13, 14]')
    sick.run("train.steps=20", 'data={name="numbered", marked=[18, 24]}')

    assert ("rolled_back", 14) in sick.events()


def test_without_a_checkpoint_from_before_the_run_ends_with_4(sick, capfd):
    sick.describe('what = "gradient"\nsteps = [1, 2, 3]')

    assert sick.run() == 4

    assert "there is no checkpoint from before step 1" in capfd.readouterr().err
    assert sick.steps_saved == []


def test_to_give_up_at_the_first_step_can_be_asked_for(sick):
    sick.describe('what = "gradient"\nsteps = [4]')

    assert sick.run("anomalies.roll_back_after=1", "anomalies.give_up_after=0") == 4

    assert sick.steps_saved == [2]
    assert ("rolled_back", 4) not in sick.events()


def test_a_save_that_is_due_in_a_row_is_made_after_the_next_good_step(sick):
    sick.describe('what = "loss"\nsteps = [4, 12]')

    assert sick.run() == 0

    assert sick.steps_saved == [2, 5, 6, 8, 10, 12], "after the last one there is no good step"


def test_parameters_that_are_not_finite_are_never_saved(sick, capfd):
    sick.describe('what = "parameter"\nsteps = [4]')

    assert sick.run() == 4

    assert "step 4: its update has made parameters that are not finite" in capfd.readouterr().out
    assert sick.steps_saved == [2]
    assert sick.events().count(("rolled_back", 4)) == 1


def test_where_no_step_is_logged_the_host_learns_of_a_row_within_some_steps(sick, monkeypatch):
    monkeypatch.setattr("forge_core.train.step_guard._SYNC_AFTER", 3)
    sick.describe('what = "loss"\nsteps = [2, 3]')
    one_save = ["checkpoint.interval=100", "checkpoint.powers_of_two_from=1", "checkpoint.powers_of_two_until=1"]

    assert sick.run(*one_save, "metrics.interval=100") == 4

    assert ("rolled_back", 4) in sick.events(), "what the save of step 1 waited for is not counted"


def test_an_update_that_the_host_leaves_out_stays_out_if_a_callback_asks_for_nothing(sick):
    sick.describe('what = "gradient"\nsteps = [3]\n[[callbacks]]\nname = "leave_out"\nsteps = []')

    assert sick.run("train.steps=4", 'optimizer={name="plain_adamw", lr=1e-3}') == 0

    assert sick.steps_saved == [2, 4]


def test_the_host_does_not_wait_for_the_device_in_steps_that_are_not_logged_also_if_they_are_left_out(
    sick, monkeypatch
):
    waited, train_step = [], Trainer._train_step

    class Waits(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.overloadpacket.__name__ in ("_local_scalar_dense", "is_nonzero", "equal", "nonzero"):
                self.count += 1
            return function(*args, **(kwargs or {}))

    def counted(trainer, microbatches):
        with Waits() as waits:
            waits.count = 0
            counts = train_step(trainer, microbatches)
        waited.append(waits.count)
        return counts

    monkeypatch.setattr(Trainer, "_train_step", counted)
    sick.describe('what = "gradient"\nsteps = [6]')

    rarely = ["checkpoint.interval=0", "metrics.interval=100"]

    assert sick.run(*rarely) == 0
    assert waited[2:] == [0] * 10, "what plugins do is looked into in the first two"
    assert ("skipped", 6) in sick.events()

    waited.clear()
    assert sick.run(*rarely, "run.name=other", 'optimizer={name="plain_adamw", lr=1e-3}') == 0
    assert waited[5] == 1, "this one has to be told not to make its step; in others it reads more by itself"
    assert min(waited) == 1
