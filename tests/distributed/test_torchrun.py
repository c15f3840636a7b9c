"""What torchrun's options mean for hosts that come and go."""

from functools import partial

import pytest

from forge_core.distributed import torchrun
from forge_core.distributed.torchrun import agent_without_restarts
from forge_core.errors import ConfigError
from forge_plugins_slurm.cluster_environment import SlurmEnvironment
from forge_plugins_slurm.config import SlurmEnvironmentConfig

refuse_split_brain = partial(torchrun.refuse_split_brain, cluster=SlurmEnvironment(SlurmEnvironmentConfig()))

RANK = {"TORCHELASTIC_RUN_ID": "r"}
OWN_STORE = {**RANK, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
TASK = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "16"}
TORCHRUN = ["python", "-m", "torch.distributed.run"]


@pytest.mark.parametrize(
    ("environment", "command", "said"),
    [
        (RANK, [*TORCHRUN, "--nnodes=1:2"], "--nnodes 1:2: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"),
        (RANK, ["/bin/python", "/bin/torchrun", "--nnodes", "1:2"], "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"),
        ({**RANK, "PET_NNODES": "2:4"}, TORCHRUN, "--nnodes 2:4"),
        (
            OWN_STORE,
            [*TORCHRUN, "--nnodes=1:2", "--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=2"],
            "keep_alive_max_attempt=2: with --nnodes 1:2 it must be at least 3",
        ),
        (OWN_STORE, [*TORCHRUN, "--nnodes=1:2", "--rdzv_conf", "keep_alive_max_attempt=1"], "at least 3"),
        (
            {**OWN_STORE, "PET_RDZV_CONF": "keep_alive_max_attempt=2", "PET_NNODES": "1:2"},
            TORCHRUN,
            "at least 3",
        ),
        (
            {**RANK, **TASK, "GROUP_WORLD_SIZE": "2"},
            [*TORCHRUN, "--nnodes=2"],
            r"srun has started 16 torchruns \(SLURM_STEP_NUM_TASKS\), which have been told of 2",
        ),
    ],
)
def test_what_leads_to_two_groups_or_to_none_is_refused(environment, command, said):
    with pytest.raises(ConfigError, match=said):
        refuse_split_brain(environment, command)


@pytest.mark.parametrize(
    ("environment", "command"),
    [
        (RANK, TORCHRUN),
        (RANK, [*TORCHRUN, "--nnodes=2", "--rdzv-conf=keep_alive_max_attempt=2"]),
        (RANK, [*TORCHRUN, "--nnodes=2:2"]),
        (OWN_STORE, [*TORCHRUN, "--nnodes=1:2", "--rdzv-conf=keep_alive_max_attempt=5"]),
        ({}, [*TORCHRUN, "--nnodes=1:2"]),
        (RANK, ["python", "own_launcher.py", "--nnodes=1:2"]),
        ({**RANK, **TASK, "GROUP_WORLD_SIZE": "16"}, [*TORCHRUN, "--nnodes=16"]),
        ({**RANK, **TASK, "GROUP_WORLD_SIZE": "1"}, [*TORCHRUN, "--standalone"]),
        ({**OWN_STORE, **TASK, "GROUP_WORLD_SIZE": "15"}, [*TORCHRUN, "--nnodes=8:16"]),
    ],
)
def test_everything_else_is_taken(environment, command):
    refuse_split_brain(environment, command)


def test_a_launcher_that_is_no_torchrun_is_not_for_a_watchdog_to_end():
    assert agent_without_restarts({"TORCHELASTIC_MAX_RESTARTS": "0"}) == 0
