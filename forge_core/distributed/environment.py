"""Which rank of which group this process is, as its launcher says, and why a group cannot come together."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Mapping, MutableMapping

from forge_core.contracts.cluster_environment import NO_CLUSTER, ClusterEnvironment
from forge_core.distributed.cluster import find_cluster
from forge_core.distributed.parent_death import end_with_launcher
from forge_core.errors import ConfigError, ForgeError, NotJoinedError

__all__ = ["end_with_launcher", "find_cluster", "interface_problem", "launched_ranks", "refuse_unknown_host"]
__all__ += ["allow_sockets", "why_not_joined", "world_size_of"]

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_LAST_PORT = 65_535
_SOCKETS_OF_RANK_0 = 3
"""Connections to each other rank: of the store, of the plan of a save, and room for one more. Other ranks connect to
log N ranks (``docs/scale.md``)."""
_OTHER_FILES = 512


def world_size_of(environment: MutableMapping[str, str], cluster: ClusterEnvironment = NO_CLUSTER) -> int | None:
    """The number of ranks if a launcher has started this process as one of them, otherwise ``None``.

    On a cluster, torchrun's variables are set from the cluster's, the place of rank 0 and the rank on its node left
    alone where they are there already: everything after this, torch included, finds one environment.

    Raises:
        ConfigError: a variable is missing, is no number, or says something else than the cluster does.
    """
    told = cluster.ranks(environment)
    if "RANK" not in environment:
        if told is None:
            _refuse_size_without_rank(environment)
            return None
        for name, value in told.items():
            environment.setdefault(name, value)
    environment.setdefault("LOCAL_RANK", "0")
    missing = [name for name in _TORCHRUN if not environment.get(name)]
    if missing:
        raise ConfigError(
            f"RANK is set, and {', '.join(missing)} is not: start with torchrun, a cluster's launcher or --nproc, or "
            f"set all of {', '.join(_TORCHRUN)}"
        )
    rank, world_size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    _number(environment, "LOCAL_RANK")
    if (port := _number(environment, "MASTER_PORT")) > _LAST_PORT:
        raise ConfigError(f"MASTER_PORT={port} is no port; the last one is {_LAST_PORT}")
    if rank >= world_size:
        raise ConfigError(f"RANK={rank} is not below WORLD_SIZE={world_size}")
    return world_size


def launched_ranks(environment: MutableMapping[str, str], cluster: ClusterEnvironment, nproc: str) -> int | None:
    """The same of a command with ``--nproc``. A rank lives no longer than its launcher.

    Raises:
        ConfigError: also if ``--nproc`` asks for another number.
        LostPeerError: the launcher has died already.
    """
    ranks = world_size_of(environment, cluster)
    if ranks is not None:
        end_with_launcher(environment, cluster)
        if nproc not in ("1", "auto", str(ranks)):
            raise ConfigError(
                f"--nproc {nproc}: torchrun or a cluster has started this process as one of {ranks} ranks already; "
                "leave --nproc out, or start a single process"
            )
    return ranks


def _refuse_size_without_rank(environment: Mapping[str, str]) -> None:
    """A process that is meant to be one of several would train alone, each of them into the same directory."""
    size = environment.get("WORLD_SIZE", "1")
    if size != "1":
        raise ConfigError(
            f"WORLD_SIZE={size} is set, and RANK is not: start with torchrun, a cluster's launcher or --nproc, or "
            "unset WORLD_SIZE to train in one process"
        )


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


def allow_sockets(rank: int, ranks: int) -> None:
    """Raise this process' limit of open files until its connections to other ranks fit.

    Raises:
        ConfigError: they do not fit into what this user may have.
    """
    needed = _OTHER_FILES + (_SOCKETS_OF_RANK_0 * ranks if rank == 0 else 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"rank {rank} of {ranks} needs some {needed} open files, and {hard} are allowed here; raise the limit of "
            f"the shell or service that starts it (ulimit -Hn {needed})"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def interface_problem(environment: Mapping[str, str]) -> str | None:
    """Find a problem with the interfaces that the environment asks for."""
    there = [name for _, name in socket.if_nameindex()]
    gloo, nccl = environment.get("GLOO_SOCKET_IFNAME", ""), environment.get("NCCL_SOCKET_IFNAME", "")
    wrong = None
    if gloo and not set(gloo.split(",")) <= set(there):
        wrong = f"GLOO_SOCKET_IFNAME={gloo}"
    elif nccl.startswith("=") and not set(nccl[1:].split(",")) & set(there):
        wrong = f"NCCL_SOCKET_IFNAME={nccl}"
    elif nccl and nccl[0] not in "=^" and not any(name.startswith(tuple(nccl.split(","))) for name in there):
        wrong = f"NCCL_SOCKET_IFNAME={nccl}"  # beginnings of names; after "^" come interfaces that it shall not take
    if wrong is None:
        return None
    return f"{wrong} names what is no interface of {socket.gethostname()}, which has {', '.join(there)}"


def why_not_joined(error: Exception) -> ForgeError:
    """The sentence for what ``init_process_group`` raised: which host and port, and what is wrong there."""
    host, port, rank = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], os.environ["RANK"]
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
        return NotJoinedError(  # another job's ranks may, for now: starting again may help
            f"{_who()} cannot listen on {host}:{port}, because another program does; set another MASTER_PORT"
        )
    if rank == "0":
        return NotJoinedError(f"{_who()} listens on {host}:{port}, and not all ranks have come: {said}")
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
    return NotJoinedError(f"{_who()} could not join rank 0 at {host}:{port}: {why}")


def _who() -> str:
    return f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}, on {socket.gethostname()},"
