"""The settings of a Slurm that decide what becomes of a run: for ``forge doctor``, and for ``cluster.toml``."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence

import attrs

from forge_core.config.sections import DEFAULT_LEAD
from forge_core.contracts.check import CheckContext, Finding
from forge_core.errors import ConfigError, ForgeError
from forge_plugins_slurm.cluster import FILE

_CRED_EXPIRE = 120
"""Slurm's default, in seconds."""

_NO_CLUSTER = "Could not establish a configuration source"
"""Slurm's words where there is neither a slurm.conf nor a server that has one."""
_UNANSWERED = "one can train on this machine; for `forge submit`, try again later or ask the cluster's administrators"


def look(_: CheckContext) -> Iterator[Finding]:
    """Version, preemption, what a run has to save in, and how long it waits after a requeue. Nothing on a machine
    without Slurm, or with its commands and no cluster."""
    try:
        config = _words(_answer("scontrol", "show", "config"))
        partitions = [_words(line) for line in _answer("scontrol", "show", "partition", "-o").splitlines()]
    except FileNotFoundError:
        return
    except ForgeError as error:
        if _NO_CLUSTER not in str(error):
            yield Finding("Slurm", "warning", str(error), _UNANSWERED)
        return
    yield Finding("Slurm", "fine", f"{config.get('SLURM_VERSION', '?')}, cluster {config.get('ClusterName', '?')}")
    yield from findings(config, partitions)


def findings(config: Mapping[str, str], partitions: Sequence[Mapping[str, str]]) -> Iterator[Finding]:
    """What the settings mean for a run that is preempted, or comes to its time limit."""
    preempting = config.get("PreemptType", "preempt/none") != "preempt/none"
    kill_wait = _seconds(config.get("KillWait", "30"))
    for partition in partitions:
        name, mode = partition.get("PartitionName", "?"), partition.get("PreemptMode", "OFF")
        if not preempting or mode == "OFF":
            continue
        grace = _seconds(partition.get("GraceTime", "0"))
        found = f"{name}: {mode}, {grace} s of grace, then {kill_wait} s until the kill"
        if "CANCEL" in mode:  # Slurm writes GANG before it, where that is set
            advice = "a preempted job is cancelled, and Slurm may not take it back: submit it again, or elsewhere"
        elif "SUSPEND" in mode:
            advice = "a run that stands still longer than run.step_timeout ends; ask for PreemptMode=REQUEUE"
        elif grace + kill_wait < DEFAULT_LEAD:
            advice = "if saving takes longer, what was done since the last checkpoint is lost; lower checkpoint.minutes"
        else:
            yield Finding("preemption", "fine", found)
            continue
        yield Finding("preemption", "warning", found, advice)
    if not preempting:
        yield Finding("preemption", "fine", f"none; {kill_wait} s from the time limit's signal to the kill")
    stated = re.search(r"cred_expire=(\d+)", config.get("AuthInfo", ""))
    wait = int(stated[1]) if stated else _CRED_EXPIRE
    yield Finding("after a requeue", "fine", f"a job waits {wait} s (AuthInfo=cred_expire)")
    if config.get("JobRequeue") == "0":
        yield Finding("JobRequeue", "fine", "0, which the --requeue of `forge submit` overrides")


def cluster_file() -> tuple[str, str]:
    """``cluster.toml`` with what Slurm says about its default partition, for ``forge doctor --init``.

    Raises:
        ConfigError: there is no Slurm here, or it does not answer.
    """
    try:
        lines = _answer("sinfo", "--noheader", "--exact", "-o", "%P|%l|%c|%m|%G").splitlines()
    except FileNotFoundError:
        raise ConfigError("--init: there is no sinfo on this machine; run it where jobs are submitted") from None
    except ForgeError as error:
        raise ConfigError(f"--init: {error}") from None
    nodes = [_Nodes.read(line) for line in lines]
    chosen = next((one for one in nodes if one.is_default), nodes[0] if nodes else None)
    if chosen is None:
        raise ConfigError("--init: sinfo lists no partition")
    return FILE, _text(chosen, sorted({one.partition for one in nodes} - {chosen.partition}))


@attrs.frozen
class _Nodes:
    """A line of ``sinfo``: the nodes of a partition that are alike."""

    partition: str
    is_default: bool
    time: str
    cpus: int
    gpus: int

    @classmethod
    def read(cls, line: str) -> _Nodes:
        partition, time, cpus, _, gres = line.split("|")
        gpus = sum(int(count) for count in re.findall(r"\bgpu(?::[\w.-]+)?:(\d+)", gres))
        return cls(partition.rstrip("*"), partition.endswith("*"), time, int(cpus.rstrip("+")), gpus)


def _text(nodes: _Nodes, others: Sequence[str]) -> str:
    ranks = nodes.gpus or 1
    limit = nodes.time if re.fullmatch(r"[\d:-]+", nodes.time) else "24:00:00"
    more = f"  # or {', '.join(others)}" if others else ""
    lines = [
        "# Written by `forge doctor --init` from what Slurm says. What each key means is in docs/slurm.md.",
        f'partition = "{nodes.partition}"{more}',
        '# account = "…"',
        f'time = "{limit}"',
        f"gpus_per_node = {nodes.gpus}" if nodes.gpus else "ranks_per_node = 1",
        f"cpus_per_rank = {max(1, nodes.cpus // ranks)}  # of {nodes.cpus} a node",
        "signal_lead = 120  # seconds; must hold a step and a checkpoint",
        "# modules = []",
        '# environment = { NCCL_SOCKET_IFNAME = "…", GLOO_SOCKET_IFNAME = "…" }',
    ]
    return "\n".join(lines) + "\n"


def _answer(*command: str) -> str:
    """Raises FileNotFoundError where there is no such command, ForgeError where it does not answer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        raise ForgeError(f"{command[0]} does not answer within 60 s") from None
    if done.returncode:
        raise ForgeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _words(text: str) -> dict[str, str]:
    """``Name = value`` on lines, or ``Name=value`` on one."""
    return dict(re.findall(r"(\w+)\s*=\s*(\S*)", text))


def _seconds(text: str) -> int:
    """``30``, or ``30 sec`` with the words cut off; ``UNLIMITED`` is as good as an hour."""
    found = re.match(r"\d+", text)
    return int(found[0]) if found else 3600
