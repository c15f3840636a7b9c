"""torchrun's variables are taken as they are, and Slurm's become them."""

import socket
import sys
from functools import partial

import pytest

import fork_server
from forge_core.distributed import environment as core
from forge_core.errors import ConfigError, ExitCode
from forge_plugins_slurm.cluster_environment import SlurmEnvironment, first_host
from forge_plugins_slurm.config import SlurmEnvironmentConfig

world_size_of = partial(core.world_size_of, cluster=SlurmEnvironment(SlurmEnvironmentConfig()))

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "16",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
}
GROUP = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node", "node"),
        ("a,b", "a"),
        ("gpu[07-12,20],login", "gpu07"),
        ("gpu[3,5-7]", "gpu3"),
        ("rack[1-2]node[3-4].site", "rack1node3.site"),
    ],
)
def test_the_first_host_of_a_list(nodes, host):
    assert first_host(nodes) == host


def test_no_launcher_is_one_process():
    assert world_size_of({}) is None


def test_slurm_is_translated():
    environment = dict(SLURM)

    assert world_size_of(environment) == 8
    assert environment["RANK"] == "5"
    assert environment["LOCAL_RANK"] == "1"
    assert environment["MASTER_ADDR"] == "gpu07"
    assert 15_000 <= int(environment["MASTER_PORT"]) < 30_000


@pytest.mark.parametrize(("said", "ranks"), [("4(x2)", "4"), ("8", "8"), ("4,3", None), ("4(x2),2", None)])
def test_ranks_of_a_node_are_told_where_all_nodes_have_as_many(said, ranks):
    environment = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": said}

    world_size_of(environment)

    assert environment.get("LOCAL_WORLD_SIZE") == ranks


def test_every_rank_of_a_step_finds_the_same_port_and_the_next_step_another():
    ports = set()
    for rank, step in ((0, 0), (7, 0), (0, 1)):
        environment = {**SLURM, "SLURM_PROCID": str(rank), "SLURM_STEP_ID": str(step)}
        world_size_of(environment)
        ports.add(environment["MASTER_PORT"])

    assert len(ports) == 2


def test_what_is_set_by_hand_and_what_torchrun_says_win_over_slurm():
    by_hand = {**SLURM, "MASTER_ADDR": "other", "MASTER_PORT": "1234"}
    torchrun = {**GROUP, "TORCHELASTIC_RUN_ID": "none", "GROUP_WORLD_SIZE": "8"}

    assert world_size_of(by_hand) == 8
    assert (by_hand["MASTER_ADDR"], by_hand["MASTER_PORT"]) == ("other", "1234")
    assert world_size_of({**SLURM, **torchrun}) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("SLURM_CLUSTER_NAME", "other"), ("SLURM_RESTART_COUNT", "1"), ("SLURM_STEP_LAUNCHER_PORT", "40001")],
)
def test_steps_with_equal_numbers_of_other_clusters_and_starts_find_other_ports(name, value):
    ours, theirs = {**SLURM, "SLURM_STEP_LAUNCHER_PORT": "40000"}, {**SLURM, "SLURM_STEP_LAUNCHER_PORT": "40000"}
    theirs[name] = value

    world_size_of(ours)
    world_size_of(theirs)

    assert ours["MASTER_PORT"] != theirs["MASTER_PORT"]


def test_ranks_that_a_script_has_made_of_slurms_tasks_are_taken():
    assert world_size_of({**SLURM, **GROUP, "RANK": "5", "WORLD_SIZE": "8"}) == 8
    alone = {**SLURM, "SLURM_STEP_NUM_TASKS": "1", **GROUP}  # a shell in a step of its own, say
    assert world_size_of(alone) == 2


@pytest.mark.parametrize("missing", ["SLURM_STEP_ID", "SLURM_PROCID"])
def test_a_batch_script_of_slurm_is_no_rank(missing):
    assert world_size_of({name: value for name, value in SLURM.items() if name != missing}) is None


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"RANK": "0"}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK=2 is not below WORLD_SIZE=2"),
        ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK must be a number, got 'x'"),
        ({**SLURM, "SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST is not set"),
        ({**SLURM, **GROUP}, "RANK=1 and WORLD_SIZE=2 .* SLURM_PROCID=5 of 8 "),
        ({**SLURM, "SLURM_PROCID": "x"}, "SLURM_PROCID must be a number, got 'x'"),
        ({**SLURM, "WORLD_SIZE": "4"}, "^WORLD_SIZE=4 .* SLURM_PROCID=5 of 8 "),
        ({**SLURM, **GROUP, "WORLD_SIZE": "8"}, "RANK=1 and WORLD_SIZE=8 .* SLURM_PROCID=5 of 8 "),
    ],
)
def test_an_environment_that_cannot_be(environment, sentence):
    with pytest.raises(ConfigError, match=sentence):
        world_size_of(dict(environment))


def test_the_address_of_rank_0_may_be_given_in_place_of_the_hosts():
    environment = {**SLURM, "SLURM_STEP_NODELIST": "", "MASTER_ADDR": "head"}

    assert world_size_of(environment) == 8
    assert (environment["RANK"], environment["MASTER_ADDR"]) == ("5", "head")


def limited(soft, hard, then):
    """What a process says that may have so many open files."""
    code = f"import resource as r; r.setrlimit(r.RLIMIT_NOFILE, ({soft}, {hard})); {then}"
    return fork_server.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_the_limit_of_open_files_is_raised_where_ranks_need_more():
    ask = "from forge_core.distributed.environment import allow_sockets; "
    ask += "[allow_sockets(*n) or print(r.getrlimit(r.RLIMIT_NOFILE)) for n in ((5, 1000), (0, 8), (0, 100))]"

    assert limited(512, 1000, ask).stdout == "(512, 1000)\n(536, 1000)\n(812, 1000)\n"


def test_ranks_that_need_more_open_files_than_are_allowed_are_refused_before_they_connect():
    join = (
        "import os, torch; os.environ.update(RANK='0', WORLD_SIZE='1000', MASTER_ADDR='localhost', MASTER_PORT='1'); "
    )
    join += "from forge_core.distributed.mesh import join_process_group; join_process_group(torch.device('cpu'), 5.0)"

    said = limited(512, 1024, join).stderr

    sentence = "rank 0 of 1000 needs some 3512 open files, and 1024 are allowed here; raise the limit of the shell"
    assert sentence in said


def test_a_port_that_answers_without_a_word_ends_a_rank_that_would_join():
    with socket.create_server(("localhost", 0)) as silent:
        group = dict(zip(GROUP, ("1", "2", "1", "localhost", str(silent.getsockname()[1])), strict=True))
        join = (
            f"import os, torch; os.environ.update({group!r}); from forge_core.distributed import mesh; "
            "mesh._GRACE = 0.5; mesh.join_process_group(torch.device('cpu'), 0.5)"
        )

        ended = fork_server.run([sys.executable, "-c", join], capture_output=True, text=True, timeout=120)

    assert ended.returncode == ExitCode.LOST_PEER
    assert ended.stderr.startswith("error: rank 1 of 2, on ")
    assert "and not all ranks have come: no word in 2 s; another program listens, or rank 0 is stopped" in ended.stderr
