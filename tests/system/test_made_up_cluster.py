"""A run under a cluster that a distribution of its own describes."""

from __future__ import annotations

import subprocess

import fork_server
from forge_core.errors import ExitCode
from rank_ports import free_ports

PLUGIN = """
    from forge_core.api import Component, hookimpl

    FORGE_API = "1.0"

    @hookimpl
    def forge_cluster_environments():
        yield Component(name="made_up", summary="made up", factory="acme_hpc.cluster:Made", config="acme_hpc.cluster:C")
"""
CLUSTER = """
    import attrs
    from forge_core.contracts.cluster_environment import ClusterEnvironment

    @attrs.frozen
    class C:
        "Nothing to set."

    class Made(ClusterEnvironment):
        title = "Made-up"

        def __init__(self, config, /):
            pass

        def detect(self, environment):
            return "MADE_UP" in environment

        def ranks(self, environment):
            rank, port = environment["MADE_UP"].split(":")
            return {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}

        def explain(self, error):
            return "look at hpc-queue for the other task"
"""


def start(tiny, site, rank, port, *settings):
    environment = {**tiny.environment(), "PYTHONPATH": str(site), "MADE_UP": f"{rank}:{port}"}
    command = tiny.command("train.batch_size=2", *settings)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return fork_server.Popen(command, env=environment, **pipes)


def test_its_tasks_are_the_ranks_of_one_run_and_a_missing_one_is_explained(tiny, make_distribution):
    site = make_distribution("acme-hpc", files={"acme_hpc/plugin.py": PLUGIN, "acme_hpc/cluster.py": CLUSTER})
    port, other = free_ports(), free_ports()

    ranks = [start(tiny, site, rank, port) for rank in range(2)]
    alone = start(tiny, site, 1, other, "run.name=alone", "run.first_step_timeout=2")

    said = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert [line["step"] for line in tiny.metrics() if "loss" in line] == [*range(1, 11)]
    _, errors = alone.communicate(timeout=120)
    assert alone.returncode == ExitCode.LOST_PEER
    assert "look at hpc-queue for the other task" in errors
