"""Slurm's variables: which task of a step this process is, which job's, and when that ends."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from zlib import crc32

from forge_core.contracts.cluster_environment import ClusterEnvironment
from forge_core.errors import ConfigError
from forge_plugins_slurm.config import SlurmEnvironmentConfig

JOB_END = "SLURM_JOB_END_TIME"
"""When Slurm will end the job, in seconds since 1970. Older Slurms do not set it."""
_OF_A_JOB = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", JOB_END)
_FIRST_PORT, _PORTS = 15_000, 15_000  # below the ports that systems hand out by themselves


class SlurmEnvironment(ClusterEnvironment):
    """A script that ``sbatch`` runs is no rank; what it starts with ``srun`` is."""

    title = "Slurm"

    def __init__(self, config: SlurmEnvironmentConfig, /) -> None:
        pass

    def detect(self, environment: Mapping[str, str]) -> bool:
        return any(name in environment for name in _OF_A_JOB)

    def ranks(self, environment: Mapping[str, str]) -> Mapping[str, str] | None:
        tasks = _tasks(environment)
        if tasks is None:
            return None
        _refuse_unless_of_slurm(environment, tasks)
        return None if "RANK" in environment else _from_slurm(environment, tasks)

    def is_launched(self, environment: Mapping[str, str]) -> bool:
        return "SLURM_STEP_ID" in environment

    def check_torchruns(self, environment: Mapping[str, str], hosts: str) -> None:
        """A torchrun that has been told of itself alone has nothing to do with the others."""
        tasks = _tasks(environment)
        if tasks is not None and hosts not in ("1", tasks):
            raise ConfigError(
                f"srun has started {tasks} torchruns (SLURM_STEP_NUM_TASKS), which have been told of {hosts} "
                "(--nnodes): start one on each node, with srun --ntasks-per-node=1, and give --nnodes their number"
            )

    def job(self, environment: Mapping[str, str]) -> str:
        return environment.get("SLURM_JOB_ID", "")

    def end_time(self, environment: Mapping[str, str]) -> float | None:
        end = environment.get(JOB_END, "")
        return float(end) if end.isdecimal() else None

    def explain(self, error: Exception) -> str | None:
        return (
            "Under Slurm, rank 0 is on the first host of SLURM_STEP_NODELIST. Where hosts reach each other by other "
            "names, set MASTER_ADDR and MASTER_PORT for all tasks."
        )


def _tasks(environment: Mapping[str, str]) -> str | None:
    """How many ``srun`` has started together; ``None`` if it has not started this process, or alone."""
    tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS")
    is_task = "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment
    return tasks if is_task and tasks != "1" else None


def _refuse_unless_of_slurm(environment: Mapping[str, str], tasks: str) -> None:
    """Tasks are ranks, unless each is a torchrun, which starts ranks of its own."""
    if "TORCHELASTIC_RUN_ID" in environment:
        return
    own = {"RANK": environment["SLURM_PROCID"], "WORLD_SIZE": tasks}
    if any(environment.get(name, value) != value for name, value in own.items()):
        said = " and ".join(f"{name}={environment[name]}" for name in own if name in environment)
        raise ConfigError(
            f"{said} in the environment, but for Slurm this is task SLURM_PROCID={own['RANK']} of {tasks} "
            f"(SLURM_STEP_NUM_TASKS): unset RANK and WORLD_SIZE, which a shell may have kept, and Slurm's are taken"
        )


def _from_slurm(environment: Mapping[str, str], tasks: str) -> dict[str, str]:
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
    if not nodes and "MASTER_ADDR" not in environment:
        raise ConfigError("SLURM_STEP_NODELIST is not set, so that rank 0 cannot be found; set MASTER_ADDR")
    # "4(x2)": four on each of two nodes; where nodes have different numbers, there is no one number to tell
    on_each = re.fullmatch(r"(\d+)(\(x\d+\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return {
        **({"LOCAL_WORLD_SIZE": on_each[1]} if on_each else {}),
        "RANK": str(_number(environment, "SLURM_PROCID")),
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(nodes),
        "MASTER_PORT": str(_FIRST_PORT + crc32(" ".join(_own_step(environment)).encode()) % _PORTS),
    }


def _own_step(environment: Mapping[str, str]) -> Iterator[str]:
    """Numbers that all tasks of a step share, and no other step on these hosts has: the numbers of jobs are those of
    one cluster, and what is left of a job's last start may still listen."""
    yield str(_number(environment, "SLURM_JOB_ID"))
    yield str(_number(environment, "SLURM_STEP_ID"))
    for name in ("SLURM_CLUSTER_NAME", "SLURM_RESTART_COUNT", "SLURM_STEP_LAUNCHER_PORT"):
        yield environment.get(name, "")


def first_host(nodes: str) -> str:
    """The first host of a list as Slurm writes it: ``gpu[07-12,20],login`` is ``gpu07``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0] if first else nodes)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdecimal():
        raise ConfigError(f"the environment variable {name} must be a number, got {text!r}")
    return int(text)
