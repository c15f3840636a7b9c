"""Which rank of which group this process is, as torchrun or Slurm says, and why a group cannot come together."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping, MutableMapping
from zlib import crc32

from forge_core.errors import ConfigError, ForgeError, LostPeerError

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_LAST_PORT = 65_535
_FIRST_PORT, _PORTS = 15_000, 15_000  # below the ports that systems hand out by themselves


def world_size_of(environment: MutableMapping[str, str]) -> int | None:
    """The number of ranks if a launcher has started this process as one of them, otherwise ``None``.

    Under Slurm (``srun``), torchrun's variables are set from Slurm's, the place of rank 0 and the rank on its node left
    alone where they are there already: everything after this, torch included, finds one environment. A script that
    ``sbatch`` runs is no rank; what it starts with ``srun`` is.

    Raises:
        ConfigError: a variable is missing, is no number, or says something else than Slurm does.
    """
    tasks = slurm_tasks(environment)
    if tasks is not None:
        _refuse_unless_of_slurm(environment, tasks)
    if "RANK" not in environment:
        if tasks is None:
            _refuse_size_without_rank(environment)
            return None
        for name, value in _from_slurm(environment, tasks).items():
            environment.setdefault(name, value)
    environment.setdefault("LOCAL_RANK", "0")
    missing = [name for name in _TORCHRUN if not environment.get(name)]
    if missing:
        raise ConfigError(
            f"RANK is set, and {', '.join(missing)} is not: start with torchrun, srun or --nproc, or set all of "
            f"{', '.join(_TORCHRUN)}"
        )
    rank, world_size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    _number(environment, "LOCAL_RANK")
    if (port := _number(environment, "MASTER_PORT")) > _LAST_PORT:
        raise ConfigError(f"MASTER_PORT={port} is no port; the last one is {_LAST_PORT}")
    if rank >= world_size:
        raise ConfigError(f"RANK={rank} is not below WORLD_SIZE={world_size}")
    return world_size


def _refuse_size_without_rank(environment: Mapping[str, str]) -> None:
    """A process that is meant to be one of several would train alone, each of them into the same directory."""
    size = environment.get("WORLD_SIZE", "1")
    if size != "1":
        raise ConfigError(
            f"WORLD_SIZE={size} is set, and RANK is not: start with torchrun, srun or --nproc, or unset WORLD_SIZE to "
            "train in one process"
        )


def slurm_tasks(environment: Mapping[str, str]) -> str | None:
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
    if not nodes:
        raise ConfigError("SLURM_STEP_NODELIST is not set, so that rank 0 cannot be found; set MASTER_ADDR")
    # "4(x2)": four on each of two nodes; where nodes have different numbers, there is no one number to tell
    on_each = re.fullmatch(r"(\d+)(\(x\d+\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return {
        **({"LOCAL_WORLD_SIZE": on_each[1]} if on_each else {}),
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": first_host(nodes),
        "MASTER_PORT": str(_FIRST_PORT + crc32(" ".join(_own_step(environment)).encode()) % _PORTS),
    }


def _own_step(environment: Mapping[str, str]) -> Iterator[str]:
    """What is the same for all tasks of a step, and for no other step on these hosts: the numbers of jobs are those of
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


def refuse_unknown_host() -> None:
    """Say at once what joining would find out after its timeout.

    Raises:
        ConfigError: the name of rank 0's host means nothing here.
    """
    host = os.environ["MASTER_ADDR"]
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise ConfigError(f"{_who()} cannot find the host of rank 0: MASTER_ADDR={host}: {error.strerror}") from error


def refuse_unknown_interfaces() -> None:
    """Say at once what gloo and NCCL would find out later, in other words.

    Raises:
        ConfigError: ``GLOO_SOCKET_IFNAME`` or ``NCCL_SOCKET_IFNAME`` names no interface of this host.
    """
    problem = interface_problem(os.environ)
    if problem:
        raise ConfigError(problem)


def interface_problem(environment: Mapping[str, str]) -> str | None:
    """What is wrong with the interfaces that the environment asks for."""
    there = [name for _, name in socket.if_nameindex()]
    gloo, nccl = environment.get("GLOO_SOCKET_IFNAME", ""), environment.get("NCCL_SOCKET_IFNAME", "")
    wrong = None
    if gloo and not set(gloo.split(",")) <= set(there):
        wrong = f"GLOO_SOCKET_IFNAME={gloo}"
    elif nccl.startswith("=") and not set(nccl[1:].split(",")) & set(there):
        wrong = f"NCCL_SOCKET_IFNAME={nccl}"
    elif nccl and nccl[0] not in "=^" and not any(name.startswith(tuple(nccl.split(","))) for name in there):
        wrong = f"NCCL_SOCKET_IFNAME={nccl}"  # beginnings of names; after "^" come those that it shall not take
    if wrong is None:
        return None
    return f"{wrong} names what is no interface of {socket.gethostname()}, which has {', '.join(there)}"


def why_not_joined(error: Exception) -> ForgeError:
    """The sentence for what ``init_process_group`` raised: which host and port, and what is wrong there."""
    host, port, rank = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], os.environ["RANK"]
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
        return LostPeerError(  # another job's ranks may, for now: starting again may help
            f"{_who()} cannot listen on {host}:{port}, because another program does; set another MASTER_PORT"
        )
    if rank == "0":
        return LostPeerError(f"{_who()} listens on {host}:{port}, and not all ranks have come: {said}")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except ConnectionRefusedError:
        why = "the host answers, and nothing listens on the port: rank 0 has not started, or has ended"
    except TimeoutError:
        why = "no answer: the address is wrong, the host is down, or a firewall is between"
    except OSError as unreachable:
        why = unreachable.strerror or str(unreachable)
    else:
        why = f"it answers, and not all ranks have come: {said}"
    return LostPeerError(f"{_who()} could not join rank 0 at {host}:{port}: {why}")


def _who() -> str:
    return f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}, on {socket.gethostname()},"
