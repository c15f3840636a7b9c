"""What only several processes can find out about each other: unequal jobs, a rank that never comes."""

import os
import re
import subprocess
import sys

import pytest

import fork_server
from rank_ports import free_ports


@pytest.fixture
def start_ranks(tiny):
    """Start each rank with overrides and environment of its own; all that are left are killed at the end."""
    started = []

    def start(overrides, environment=None, folders=None):
        port = free_ports()
        for rank, own in enumerate(overrides):
            group = {"RANK": str(rank), "WORLD_SIZE": str(len(overrides)), "LOCAL_RANK": str(rank)}
            place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
            started.append(
                fork_server.Popen(
                    tiny.command(*own),
                    env={**tiny.environment(), **group, **place, **(environment or {})},
                    cwd=folders[rank] if folders else None,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        return started

    yield start
    for rank in started:
        rank.kill()
        rank.communicate()


def test_ranks_with_unequal_jobs_are_all_refused_with_the_keys_that_differ(tiny, start_ranks):
    ranks = start_ranks([["optimizer.lr=1e-3"], ["optimizer.lr=2e-3", "train.seed=7", "run.dir=elsewhere"]])

    said = [rank.communicate(timeout=180) for rank in ranks]

    assert [rank.returncode for rank in ranks] == [2, 2], said
    assert "optimizer.lr: 0.001 on rank 0; 0.002 on rank 1" in said[0][1]
    assert "train.seed: 42 on rank 0; 7 on rank 1" in said[0][1]
    assert "run.dir" not in said[0][1]
    assert not tiny.path().exists()


def test_ranks_with_unequal_supervisors_do_not_wait_for_each_other(tiny, start_ranks):
    ranks = start_ranks([[], ['plugins.disable=["forge-plugins-monitor"]']])

    said = [rank.communicate(timeout=180) for rank in ranks]

    assert [rank.returncode for rank in ranks] == [2, 2], said
    assert re.search("run.supervisor: .*forge-plugins-monitor.* on rank 0; none on rank 1", said[0][1]), said


def test_a_run_that_nobody_watches_over_says_so(tiny, start_ranks):
    ranks = start_ranks(
        [['plugins.disable=["forge-plugins-monitor"]', "train.steps=1", "scheduler.warmup_steps=0"]] * 2
    )

    said = [rank.communicate(timeout=180) for rank in ranks]

    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert "no supervisor is installed: a rank that is lost is not named" in said[0][0]


def test_every_rank_refuses_a_job_that_is_not_for_so_many(tiny, start_ranks):
    wrong = ["parallel.dp_shard=4", "parallel.passes.compile.whole_model=true"]

    ranks = start_ranks([wrong, wrong])
    said = [rank.communicate(timeout=120)[1] for rank in ranks]

    assert [rank.returncode for rank in ranks] == [2, 2], said
    for one in said:
        assert "the degrees ask for 4 ranks (dp_shard 4), and there are 2" in one
        assert "compile.whole_model: true cannot be combined with 'fsdp'" in one
    assert not tiny.path().exists()


def test_a_rank_that_finds_nobody_says_which_host_and_port_and_why(tiny):
    port = free_ports()
    group = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": str(port)}

    alone = run_rank(tiny, {**group, "MASTER_ADDR": "localhost"}, "run.first_step_timeout=2")
    lost = run_rank(tiny, {**group, "MASTER_ADDR": "no-such-host.invalid"})

    assert alone.returncode == 5, alone.stderr
    assert f"could not join rank 0 at localhost:{port}: the host answers, and nothing listens" in alone.stderr
    assert lost.returncode == 2, lost.stderr
    assert "cannot find the host of rank 0: MASTER_ADDR=no-such-host.invalid" in lost.stderr


def test_a_rank_of_a_group_starts_no_group_of_its_own(tiny):
    group = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}

    refused = run_rank(tiny, group, "--nproc", "4")

    assert refused.returncode == 2, refused.stderr
    assert "--nproc 4: torchrun or a cluster has started this process as one of 2 ranks already" in refused.stderr
    assert not tiny.path().exists()


def run_rank(tiny, environment, *overrides):
    return fork_server.run(
        tiny.command(*overrides), env={**tiny.environment(), **environment}, capture_output=True, text=True, timeout=180
    )


def test_slurm_says_who_is_which_rank(tiny):
    single = tiny.completed("run.name=single", "train.steps=3")
    step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}
    where = {"SLURM_STEP_NODELIST": "localhost", "SLURM_LOCALID": "0"}
    ranks = [
        fork_server.Popen(
            tiny.command("run.name=slurm", "train.steps=3", "train.batch_size=2"),
            env={**tiny.environment(), **step, **where, "SLURM_PROCID": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=180)[1] for rank in ranks]

    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert losses(tiny.metrics("slurm")) == pytest.approx(losses(single), rel=1e-5)


def losses(lines):
    return [line["loss"] for line in lines]


@pytest.mark.nightly
def test_two_hosts_under_torchrun_have_the_loss_curve_of_one_process(tiny, two_hosts):
    single = tiny.completed("run.name=single")
    torchrun = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=10.207.0.1", "--master-port=29517"]
    hosts = [
        subprocess.Popen(
            [
                *["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", *torchrun],
                *[f"--node-rank={i}", f"--local-addr={address}", "-m", "forge_core"],
                *["run", str(tiny.config), "run.name=hosts", "train.batch_size=2"],
            ],
            env={**tiny.environment(), "GLOO_SOCKET_IFNAME": cable},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i, (name, address, cable) in enumerate(two_hosts)
    ]
    try:
        said = [host.communicate(timeout=120) for host in hosts]
    finally:
        for host in hosts:
            host.kill()

    assert [host.returncode for host in hosts] == [0, 0], said
    lines = tiny.metrics("hosts")
    assert losses(lines) == pytest.approx(losses(single), rel=1e-5)
    assert [line["grad_norm"] for line in lines] == pytest.approx([line["grad_norm"] for line in single], rel=1e-5)


def test_ranks_that_see_different_files_end_alike_and_name_the_path(tiny, start_ranks, tmp_path):
    """Paths that mean something else on another host: here, to processes in other working directories. Had they waited
    for each other in vain, they would leave with 5."""
    tiny.completed("run.name=base", "train.steps=3")
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for folder in (here, elsewhere):
        folder.mkdir()
    (here / "base").symlink_to(tiny.path("base"))
    once = ["run.name=warm", "run.first_step_timeout=90"]
    for wrong, folders, said_of_it in (
        ("checkpoint.load.path=base", [here, elsewhere], "(is missing|cannot be read).* \\(as rank 1 sees it\\)"),
        ("checkpoint.resume=base", [elsewhere, here], "checkpoint.resume = 'base': expected .* nothing of that name"),
    ):
        ranks = start_ranks([[*once, wrong]] * 2, folders=folders)[-2:]
        said = [rank.communicate(timeout=180)[1] for rank in ranks]

        assert [rank.returncode for rank in ranks] == [2, 2], said
        assert re.search(said_of_it, said[0]), said
    assert not tiny.path("warm").exists()
