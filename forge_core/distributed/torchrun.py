"""The options of torchrun, as a rank of it can see them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from forge_core.contracts.cluster_environment import NO_CLUSTER, ClusterEnvironment
from forge_core.errors import ConfigError

_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def agent_without_restarts(environment: Mapping[str, str]) -> int:
    """The process number of the torchrun that has started this rank and will start no other after it; 0 if there is
    none, or if it may."""
    if environment.get("TORCHELASTIC_MAX_RESTARTS") != "0":
        return 0
    parent = os.getppid()
    return parent if _is_torchrun(_command_of(parent)) else 0


def refuse_split_brain(
    environment: Mapping[str, str], command: Sequence[str] | None = None, cluster: ClusterEnvironment = NO_CLUSTER
) -> None:
    """Look at torchrun's options for hosts that come and go, and at how often the cluster has started it.

    Args:
        command: torchrun's; by default that of the process which has started this one, if it can be seen.

    Raises:
        ConfigError: with these, two groups may train at once, or a host that comes back ends the run; or there are more
            or fewer torchruns than it has been told.
    """
    command = _command_of(os.getppid()) if command is None else command
    if "TORCHELASTIC_RUN_ID" not in environment or not _is_torchrun(command):
        return
    nodes = _option("nnodes", command, environment)
    least, _, most = nodes.partition(":")
    if not most or least == most:
        cluster.check_torchruns(environment, environment.get("GROUP_WORLD_SIZE", "1"))
        return
    beats = dict(pair.split("=", 1) for pair in _option("rdzv-conf", command, environment).split(",") if "=" in pair)
    attempts = beats.get("keep_alive_max_attempt", "3")
    if attempts.isdecimal() and int(attempts) < 3:
        raise ConfigError(
            f"--rdzv-conf keep_alive_max_attempt={attempts}: with --nnodes {nodes} it must be at least 3. A host whose "
            "sign of life comes late is given up before that, and both it and the others train on by themselves."
        )
    if environment.get(_OWN_STORE) != "1":
        raise ConfigError(
            f"--nnodes {nodes}: set {_OWN_STORE}=1 for torchrun. Without it, a host that comes back ends the run on "
            "all hosts a minute later (torch 2.13)."
        )


def _is_torchrun(command: Sequence[str]) -> bool:
    return any(
        Path(word).name == "torchrun" or word in ("torch.distributed.run", "torch.distributed.launch")
        for word in command
    )


def _option(name: str, command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Find an option as torchrun does: with ``-`` or ``_``, after ``=``, as the next word, or in the environment."""
    for spelled in {f"--{name}", f"--{name.replace('-', '_')}"}:
        for word, following in zip(command, [*command[1:], ""], strict=True):
            if word == spelled:
                return following
            if word.startswith(spelled + "="):
                return word.partition("=")[2]
    return environment.get(f"PET_{name.replace('-', '_').upper()}", "")


def _command_of(process: int) -> list[str]:
    """Empty if it is not to be seen."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
