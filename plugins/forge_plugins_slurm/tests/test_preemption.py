"""A real Slurm takes the nodes away, and the run comes back with the weights that it would have had."""

from __future__ import annotations

import json
import os
import re
import signal
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, load

from forge_plugins_slurm.cluster import read_cluster

STEPS = 60
"""By night, when more happens to a run."""
FEW = 24
LAUNCHERS = ["srun", "torchrun"]


@pytest.fixture(scope="session")
def reference(tmp_path_factory, make_slurm_job):
    """Metrics and tensors of the run that nobody interrupts."""
    return uninterrupted(make_slurm_job(tmp_path_factory.mktemp("reference")), STEPS)


def uninterrupted(job, steps: int):
    done = job.forge("run", job.config, "--nproc", "2", f"train.steps={steps}")
    assert done.returncode == 0, done.stdout + done.stderr
    return training(job.path("tiny")), tensors(job.path("tiny"), steps)


def training(run: Path) -> list[tuple]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [tuple(line[key] for key in ("step", "loss", "grad_norm", "lr", "tokens")) for line in lines]


def tensors(run: Path, step: int) -> dict[str, torch.Tensor]:
    """With torch's own reader: what is compared is what lies on the disk."""
    reader = FileSystemReader(run / f"checkpoints/step_{step:08d}")
    entries = reader.read_metadata().state_dict_metadata
    found = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in entries.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(found, storage_reader=reader, no_dist=True)
    return found


class Story:
    """One run on a cluster, and what becomes of it."""

    def __init__(self, cluster, job, name: str, *arguments: str, time: str = "30", steps: int = STEPS) -> None:
        self.cluster, self.job, self.name, self._steps = cluster, job, name, steps
        self.id = job.submit(cluster, name, f"train.steps={steps}", *arguments, time=time)

    @property
    def state(self) -> str:
        return self.cluster.show(self.id).get("JobState", "?")

    def reaches(self, step: int, seconds: float = 150) -> None:
        self.waits_for(lambda: self.job.steps(self.name) >= step or self.is_over(), f"step {step}", seconds)
        assert not self.is_over(), f"it is over before step {step}\n{self.job.log(self.name)}"

    def is_over(self) -> bool:
        return self.state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")

    def ends(self, seconds: float = 240) -> str:
        self.waits_for(self.is_over, "the end", seconds)
        return self.state

    def nodes(self) -> list[str]:
        """Those it runs on."""
        return self.cluster.call("scontrol", "show", "hostnames", self.cluster.show(self.id)["NodeList"]).split()

    def restarts(self) -> int:
        return int(self.cluster.show(self.id)["Restarts"])

    def equals(self, reference) -> None:
        metrics, weights = reference
        run = self.job.path(self.name)
        assert training(run) == metrics
        found = tensors(run, self._steps)
        assert found.keys() == weights.keys()
        assert [key for key in found if not torch.equal(found[key], weights[key])] == []

    def lost_nothing(self) -> None:
        """Whatever a signal has stopped goes on from that very step."""
        log = self.job.log(self.name)
        stopped = [int(line.split()[3].rstrip(",")) for line in log.splitlines() if line.startswith("stopped at step")]
        assert stopped, log
        for step in stopped:
            assert f"resumed from step_{step:08d}" in log, log

    def outlives_node(self, node: int) -> None:
        """After step 15, all processes of a node are killed; the run ends all the same."""
        try:
            self.reaches(15)
            for process in self.cluster.processes_of_node(node):
                os.kill(process, signal.SIGKILL)

            assert self.ends(600) == "COMPLETED", self.job.log(self.name) + self.cluster.logs()
        finally:
            self.cluster.start_node(node)

    def waits_for(self, happened, what: str, seconds: float) -> None:
        try:
            self.cluster.wait(happened, what, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n-- output.log\n{self.job.log(self.name)}") from None


def test_a_preempted_run_comes_back_and_ends_as_if_nothing_had_happened(slurm_cluster, slurm_job):
    """Within its grace time it saves and leaves, which Slurm alone would count as completed."""
    reference = uninterrupted(slurm_job, FEW)
    slow = "callbacks=[{name='pace', seconds=0.3}]"  # so that it is not over before it is preempted
    story = Story(slurm_cluster(grace=30), slurm_job, "preempted", slow, steps=FEW)

    story.reaches(5)
    story.cluster.preempt()

    assert story.ends() == "COMPLETED", slurm_job.log("preempted")
    assert story.restarts() == 1
    story.lost_nothing()
    story.equals(reference)
    (row,) = json.loads(slurm_job.forge("runs", "runs/preempted", "--json", cluster=story.cluster).stdout)
    assert (row["state"], row["step"], row["checkpoint"]) == ("finished", FEW, FEW)
    assert row["columns"]["job"]["job_id"] == story.id


def test_a_real_slurm_answers_doctor(slurm_cluster, slurm_job):
    """In this file, where such a cluster runs."""
    cluster = slurm_cluster(grace=30)

    done = slurm_job.forge("doctor", "--json", "--init", cluster=cluster)

    assert done.returncode == 0, done.stdout + done.stderr
    found = {(one["subject"], one["found"].partition(":")[0]): one for one in json.loads(done.stdout)}
    (version,) = [said for subject, said in found if subject == "Slurm"]
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*, cluster test", version)
    assert found["preemption", "low"]["found"] == "low: REQUEUE, 30 s of grace, then 5 s until the kill"
    written = read_cluster(slurm_job.folder / "cluster.toml")
    assert (written.partition, written.time, written.ranks_per_node) == ("low", "1:00:00", 1)


# -- the other shapes: minutes each


PACE = "callbacks=[{name='pace', seconds=0.15}]"


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(
    ("grace", "user_signal"), [(0, False), (30, False), (30, True)], ids=["no-grace", "grace", "grace-and-user-signal"]
)
def test_every_way_of_preempting_ends_in_the_same_weights(
    slurm_cluster, slurm_job, reference, grace, user_signal, launcher
):
    cluster = slurm_cluster(grace=grace, user_signal=user_signal, killwait=30)
    story = Story(cluster, slurm_job, "preempted", PACE, "--launcher", launcher)

    story.reaches(5)
    cluster.preempt()

    assert story.ends(600) == "COMPLETED", slurm_job.log("preempted")
    assert story.restarts() == 1
    story.lost_nothing()
    story.equals(reference)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_run_longer_than_the_time_limit_goes_on_in_the_next_start(slurm_cluster, slurm_job, reference, launcher):
    (slurm_job.folder / "cluster.toml").write_text(f'signal_lead = 25\nlauncher = "{launcher}"\n')
    story = Story(slurm_cluster(), slurm_job, "long", "callbacks=[{name='pace', seconds=2.0}]", time="2")

    assert story.ends(800) == "COMPLETED", slurm_job.log("long")

    assert story.restarts() >= 1
    story.lost_nothing()
    story.equals(reference)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_ten_preemptions_in_a_row(slurm_cluster, slurm_job, reference):
    story = Story(slurm_cluster(grace=30), slurm_job, "often", "callbacks=[{name='pace', seconds=1.0}]")

    for times in range(1, 11):
        story.reaches(slurm_job.steps("often") + 2, seconds=240)  # of this start, not of those before
        story.cluster.preempt()
        story.waits_for(lambda count=times: story.restarts() == count, f"restart {times}", 120)

    assert story.ends(400) == "COMPLETED", slurm_job.log("often")
    assert story.restarts() == 10
    story.lost_nothing()
    story.equals(reference)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("cause", "launcher"), [("killed", "srun"), ("killed", "torchrun"), ("segfault", "srun"), ("memory", "srun")]
)
def test_a_rank_that_dies_is_a_crash_that_is_started_again(slurm_cluster, slurm_job, reference, cause, launcher):
    """The first death follows a new checkpoint, the second does not."""
    (slurm_job.folder / "cluster.toml").write_text(f'max_failures = 1\nlauncher = "{launcher}"\n')
    dying = f"callbacks=[{{name='pace', die_at=15, dies=2, cause='{cause}'}}]"
    story = Story(slurm_cluster(), slurm_job, "dying", dying, "checkpoint.interval=10")

    assert story.ends(600) == "COMPLETED", slurm_job.log("dying")

    assert story.restarts() == 2
    log = slurm_job.log("dying")
    assert log.count("after a new checkpoint; back into the queue") == 1, log
    assert log.count("crash 1 of at most 1 in a row without a new checkpoint; back into the queue") == 1, log
    story.equals(reference)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_crashes_without_progress_are_given_up(slurm_cluster, slurm_job):
    (slurm_job.folder / "cluster.toml").write_text("max_failures = 1\n")
    dying = "callbacks=[{name='pace', die_at=3, dies=99}]"
    story = Story(slurm_cluster(), slurm_job, "hopeless", dying)

    assert story.ends(400) == "FAILED"

    assert story.restarts() == 1
    assert "crash 2 in a row without a new checkpoint: given up" in slurm_job.log("hopeless")


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_wrong_configuration_is_not_started_again(slurm_cluster, slurm_job):
    """What only the nodes can see: here, that the data is not there."""
    story = Story(slurm_cluster(), slurm_job, "wrong", "data.path=nowhere")

    assert story.ends() == "FAILED"

    shown = slurm_job.log("wrong")
    assert (story.restarts(), story.cluster.show(story.id)["ExitCode"]) == (0, "2:0"), shown
    assert "starting again would not help" in shown


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["cancelled", "stopped by a callback"])
def test_a_run_that_somebody_ends_is_saved_and_stays_ended(slurm_cluster, slurm_job, how):
    """Slurm would requeue a cancelled job that asks for it while it saves."""
    stop_at = 0 if how == "cancelled" else 8
    story = Story(slurm_cluster(killwait=30), slurm_job, "ended", f"callbacks=[{{name='pace', stop_at={stop_at}}}]")

    if how == "cancelled":
        story.reaches(5)
        story.cluster.call("scancel", story.id)

    assert story.ends() == ("CANCELLED" if how == "cancelled" else "FAILED"), slurm_job.log("ended")
    story.waits_for(lambda: not story.cluster.processes(containing="forge_core run"), "no process left", 60)
    assert story.restarts() == 0
    log = slurm_job.log("ended")
    assert "saved step_" in log, log
    assert "not requeued" in log, log


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_batch_script_requeues_where_the_ranks_see_no_scontrol(slurm_cluster, slurm_job, reference):
    """As inside of a container."""
    (slurm_job.folder / "cluster.toml").write_text('container = ["env", "PATH=/nowhere"]\n')
    story = Story(slurm_cluster(grace=30), slurm_job, "contained", PACE)

    story.reaches(5)
    story.cluster.preempt()

    assert story.ends(400) == "COMPLETED", slurm_job.log("contained")
    assert story.restarts() == 1
    assert "the batch script will try" in slurm_job.log("contained")
    story.equals(reference)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("node", [0, 1], ids=["of the batch script", "of another rank"])
def test_a_run_goes_on_elsewhere_when_a_node_dies(slurm_cluster, slurm_job, reference, node):
    cluster = slurm_cluster(nodes=3, slurmd_timeout=10)
    story = Story(cluster, slurm_job, "moved", PACE, "checkpoint.interval=10")
    story.outlives_node(node)
    assert story.restarts() >= 1
    assert "resumed from step_" in slurm_job.log("moved")
    story.equals(reference)


def starts(log: str) -> list[str]:
    """The nodes of each start."""
    return re.findall(r"start 1 on (\S+), newest checkpoint", log)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_spare_node_takes_the_place_of_one_that_dies(slurm_cluster, slurm_job, reference):
    cluster = slurm_cluster(nodes=3, slurmd_timeout=10)
    story = Story(cluster, slurm_job, "spared", PACE, "checkpoint.interval=10", "--spare-nodes", "1")
    story.outlives_node(1)
    log = slurm_job.log("spared")
    assert (story.restarts(), starts(log)) == (0, ["n0,n1", "n0,n2"]), log
    assert "exit code 5, after a new checkpoint, on n1; start again" in log
    story.equals(reference)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_job_with_spare_nodes_goes_back_into_the_queue_when_the_node_of_its_script_dies(
    slurm_cluster, slurm_job, reference
):
    cluster = slurm_cluster(nodes=4, slurmd_timeout=10)
    story = Story(cluster, slurm_job, "headless", PACE, "checkpoint.interval=10", "--spare-nodes", "1")
    story.outlives_node(0)
    log = slurm_job.log("headless")
    assert story.restarts() == 1
    assert re.findall(r"start \d on (\S+),", log) == ["n0,n1", "n1,n2"], log
    story.equals(reference)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_node_on_which_a_rank_has_crashed_is_the_last_to_be_taken(slurm_cluster, slurm_job, reference):
    """Rank 1 dies twice, on another node each time; then there is no node that is without blame."""
    dying = "callbacks=[{name='pace', die_at=15, dies=2}]"
    cluster = slurm_cluster(nodes=3, slurmd_timeout=10)
    story = Story(cluster, slurm_job, "dying", dying, "checkpoint.interval=10", "--spare-nodes", "1")

    assert story.ends(600) == "COMPLETED", slurm_job.log("dying") + cluster.logs()

    log = slurm_job.log("dying")
    assert (story.restarts(), starts(log)) == (0, ["n0,n1", "n0,n2", "n0,n1"]), log
    assert "exit code 5, crash 1 of at most 3 in a row without a new checkpoint, on n2; start again" in log
    story.equals(reference)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_run_goes_on_when_a_node_is_set_down(slurm_cluster, slurm_job, reference):
    """What runs on that node is not told; the rest of the job is. The node comes back by itself (ReturnToService=2)."""
    cluster = slurm_cluster(nodes=3, slurmd_timeout=10)
    story = Story(cluster, slurm_job, "moved", PACE, "checkpoint.interval=10")
    story.reaches(15)
    cluster.call("scontrol", "update", f"nodename={story.nodes()[-1]}", "state=down", "reason=test")

    assert story.ends(600) == "COMPLETED", slurm_job.log("moved") + cluster.logs()
    assert story.restarts() >= 1
    assert "resumed from step_" in slurm_job.log("moved")
    story.equals(reference)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_run_outlives_the_controller(slurm_cluster, slurm_job, reference):
    cluster = slurm_cluster(nodes=2, slurmd_timeout=61)
    story = Story(cluster, slurm_job, "headless", "callbacks=[{name='pace', seconds=0.5}]", "checkpoint.interval=10")

    story.reaches(12)
    os.kill(cluster.pid("slurmctld"), signal.SIGKILL)
    cluster.start_controller()
    while story.ends(600) == "?":  # what Slurm shows while it reads its state
        pass

    assert story.state == "COMPLETED", slurm_job.log("headless") + cluster.logs()
    story.equals(reference)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_every_task_of_a_sweep_comes_back(slurm_cluster, slurm_job):
    cluster = slurm_cluster(grace=30)
    done = slurm_job.forge(
        "submit", slurm_job.config, "--nodes", "1", "--time", "30", "--partition", "low", "--sweep",
        "optimizer.lr=1e-2,3e-3", "run.name=swept", "callbacks=[{name='pace', seconds=0.3}]", cluster=cluster,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    names = ["swept-lr-1e-2", "swept-lr-3e-3"]

    cluster.wait(lambda: all(slurm_job.steps(name) >= 5 for name in names), "five steps of each")
    cluster.preempt()
    jobs = [json.loads((slurm_job.path(name) / "slurm/jobs.jsonl").read_text())["job_id"] for name in names]
    cluster.wait(lambda: all(cluster.show(job).get("JobState") == "COMPLETED" for job in jobs), "both done", 400)

    assert jobs[0].endswith("_0")
    assert jobs[1].endswith("_1")
    assert all(int(cluster.show(job)["Restarts"]) == 1 for job in jobs)
    rates = [training(slurm_job.path(name))[STEPS - 1][3] for name in names]
    assert rates[0] == pytest.approx(rates[1] / 0.3)
    table = slurm_job.forge("runs", cluster=cluster).stdout
    assert all(f"{name} " in table and "finished" in table for name in names), table
