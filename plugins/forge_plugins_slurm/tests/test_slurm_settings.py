"""What ``forge doctor`` says about a Slurm, and the ``cluster.toml`` that it writes."""

from __future__ import annotations

import json
import os

import pytest

from forge_core.cli import main
from forge_plugins_slurm.cluster import read_cluster
from forge_plugins_slurm.slurm_settings import cluster_file, findings

CONFIG = {"PreemptType": "preempt/partition_prio", "KillWait": "30", "AuthInfo": "cred_expire=5"}


def preemption(config=None, **partition):
    found = findings({**CONFIG, **(config or {})}, [{"PartitionName": "low", "PreemptMode": "REQUEUE", **partition}])
    return next(one for one in found if one.subject == "preemption")


def test_a_preemption_with_time_to_save_is_fine():
    assert (preemption(GraceTime="300").state, preemption({"KillWait": "120"}).state) == ("fine", "fine")


@pytest.mark.parametrize(
    ("partition", "advice"),
    [
        ({"GraceTime": "30"}, "lower checkpoint.minutes"),
        ({"GraceTime": "300", "PreemptMode": "CANCEL"}, "submit it again"),
        ({"GraceTime": "300", "PreemptMode": "GANG,CANCEL"}, "submit it again"),
        ({"GraceTime": "300", "PreemptMode": "GANG,SUSPEND"}, "PreemptMode=REQUEUE"),
    ],
)
def test_a_preemption_that_costs_something_is_a_warning(partition, advice):
    found = preemption(**partition)

    assert (found.state, advice in found.advice) == ("warning", True), found


def test_where_nobody_preempts_the_time_after_the_limit_is_told():
    assert preemption({"PreemptType": "preempt/none"}).found == "none; 30 s from the time limit's signal to the kill"


def test_the_wait_after_a_requeue_is_told():
    waits = [one.found for config in (CONFIG, {}) for one in findings(config, []) if one.subject == "after a requeue"]

    assert [found.split(" (")[0] for found in waits] == ["a job waits 5 s", "a job waits 120 s"]


SINFO = "debug|1:00:00|64|1000|(null)\nh100*|2-00:00:00|192|2000000|gpu:h100:8(S:0-1)\nh100*|2-00:00:00|96|1|(null)\n"


@pytest.fixture
def sinfo(tmp_path, monkeypatch):
    """Puts a stand-in for sinfo there that says this."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def say(text):
        (tmp_path / "sinfo").write_text(f"#!/bin/sh\nprintf '%s' '{text}'\n")
        (tmp_path / "sinfo").chmod(0o755)

    return say


def test_the_facts_are_those_of_the_default_partition_and_can_be_read_back(sinfo, tmp_path):
    sinfo(SINFO)

    name, text = cluster_file()

    (tmp_path / name).write_text(text)
    cluster = read_cluster(tmp_path / name)
    assert (cluster.partition, cluster.time, cluster.gpus_per_node, cluster.cpus_per_rank) == (
        "h100", "2-00:00:00", 8, 24,
    )  # fmt: skip
    assert "# or debug" in text
    assert all(f"{library}_SOCKET_IFNAME" in text for library in ("NCCL", "GLOO"))


def test_nodes_without_gpus_and_without_a_limit(sinfo, tmp_path):
    sinfo("cpu*|infinite|16+|1000|(null)\n")

    name, text = cluster_file()

    (tmp_path / name).write_text(text)
    cluster = read_cluster(tmp_path / name)
    assert (cluster.ranks_per_node, cluster.gpus_per_node, cluster.cpus_per_rank, cluster.time) == (
        1, None, 16, "24:00:00",
    )  # fmt: skip


def test_the_command_writes_it_once_and_says_where_there_is_no_slurm(sinfo, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("forge_plugins_monitor.doctor.gloo.look", lambda _: ())
    assert main(["doctor", "--init"]) == 2
    assert "there is no sinfo on this machine" in capsys.readouterr().err

    sinfo(SINFO)
    assert main(["doctor", "--init"]) == 0
    assert 'partition = "h100"' in (tmp_path / "cluster.toml").read_text()
    assert main(["doctor", "--init"]) == 2
    assert "cluster.toml is here already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "states"),
    [
        ("scontrol: fatal: Could not establish a configuration source", []),
        ("slurm_load_ctl_conf error: Unable to contact slurm controller (connect failure)", ["warning"]),
    ],
)
def test_commands_without_a_cluster_keep_nobody_from_training(tmp_path, monkeypatch, capsys, answer, states):
    monkeypatch.setattr("forge_plugins_monitor.doctor.gloo.look", lambda _: ())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for command in ("scontrol", "sinfo"):
        (tmp_path / command).write_text(f"#!/bin/sh\necho '{answer}' >&2\nexit 1\n")
        (tmp_path / command).chmod(0o755)

    assert main(["doctor", "--json"]) == 0
    assert [one["state"] for one in json.loads(capsys.readouterr().out) if one["subject"] == "Slurm"] == states
    assert main(["doctor", "--json", "--require", "slurm"]) == 2
    assert [one["state"] for one in json.loads(capsys.readouterr().out) if one["state"] == "wrong"] == ["wrong"]
    assert main(["doctor", "--init"]) == 2
    assert answer in capsys.readouterr().err
