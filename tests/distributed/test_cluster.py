"""Which cluster has started a process, of those that plugins describe."""

import re

import pytest

from forge_core.distributed.cluster import find_cluster, note_job
from forge_core.distributed.environment import world_size_of
from forge_core.errors import ConfigError, PluginError
from forge_core.registry.catalog import Catalog
from forge_core.registry.discovery import discover

PLUGIN = """
from forge_core.api import Component, hookimpl

@hookimpl
def forge_cluster_environments():
    yield Component(name="{name}", summary="made up", factory="{name}.cluster:Made", config="{name}.cluster:Config")
"""
CLUSTER = """
import attrs
from forge_core.contracts.cluster_environment import ClusterEnvironment

@attrs.frozen(kw_only=True)
class Config:
    "Nothing to set."

class Made(ClusterEnvironment):
    title = "Made-up"

    def __init__(self, config, /):
        pass

    def detect(self, environment):
        return "MADE_UP" in environment

    def ranks(self, environment):
        own = {"LOCAL_RANK": "0", "MASTER_ADDR": "head", "MASTER_PORT": "29500"}
        return {"RANK": environment["MADE_UP"], "WORLD_SIZE": "3", **own}

    def job(self, environment):
        return "job 9"

    def end_time(self, environment):
        return 4e9
"""
TASK = {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}


@pytest.fixture
def made_up(make_distribution):
    def make(name):
        make_distribution(name, files={f"{name}/plugin.py": PLUGIN.format(name=name), f"{name}/cluster.py": CLUSTER})

    return make


def test_a_cluster_of_an_outsider_says_who_is_which_rank(made_up):
    made_up("acme")
    environment = {"MADE_UP": "2"}

    cluster = find_cluster(discover(), environment)
    note_job(cluster, environment)

    assert world_size_of(environment, cluster) == 3
    assert environment["RANK"] == "2"
    assert environment["FORGE_JOB_CLUSTER"] == "Made-up"
    assert (environment["FORGE_JOB_ID"], environment["FORGE_JOB_END"]) == ("job 9", "4000000000.0")


def test_two_clusters_at_once_are_refused_by_their_names(made_up):
    made_up("acme")
    made_up("bolt")

    with pytest.raises(
        ConfigError, match="2 clusters detect their variables: acme:acme and bolt:bolt; --disable-plugin bolt"
    ):
        find_cluster(discover(), {"MADE_UP": "2"})
    assert find_cluster(discover(["bolt"]), {"MADE_UP": "2"}).title == "Made-up"


def test_nothing_is_known_outside_of_clusters_nor_kept_from_a_job_that_started_this_one():
    environment = {"FORGE_JOB_CLUSTER": "Slurm", "FORGE_JOB_ID": "7", "FORGE_JOB_END": "4000000000.0"}

    note_job(find_cluster(discover(), environment), environment)

    assert environment == {}


def test_a_task_whose_plugin_is_not_there_does_not_train_alone():
    without = discover(["forge-plugins-slurm"])

    said = "SLURM_PROCID = 1 says .* one of several tasks, .* is in forge-plugins-slurm, which was not imported"
    with pytest.raises(ConfigError, match=said):
        find_cluster(without, TASK)
    assert find_cluster(without, {**TASK, "RANK": "0"}).title == ""
    assert find_cluster(without, {**TASK, "SLURM_NTASKS": "1"}).title == ""


def test_a_package_that_is_not_installed_is_named_with_the_command():
    with pytest.raises(ConfigError, match=re.escape("which is not installed: pip install forge-plugins-slurm")):
        find_cluster(Catalog([]), TASK)


def test_one_that_fails_while_it_is_asked_is_named(make_distribution):
    source = CLUSTER.replace('return "MADE_UP" in environment', 'raise KeyError("MADE_UP")')
    make_distribution("acme", files={"acme/plugin.py": PLUGIN.format(name="acme"), "acme/cluster.py": source})

    with pytest.raises(PluginError, match=r"'acme' of acme 1.0 fails in detect: KeyError: .* This is a bug in acme"):
        find_cluster(discover(), {})
