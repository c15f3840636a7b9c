"""The GPUs of this machine, as the driver and torch see them."""

from __future__ import annotations

import csv
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from forge_core.contracts.check import CheckContext, Finding

_ASKED = (
    "index",
    "name",
    "driver_version",
    "memory.total",
    "memory.used",
    "ecc.errors.uncorrected.volatile.total",
    "clocks_throttle_reasons.hw_slowdown",
    "temperature.gpu",
)
_BUSY_MIB = 1000


def look(_: CheckContext) -> Iterator[Finding]:
    """Nothing on a machine without GPUs: ``software`` says whether there should be some."""
    import torch

    if not torch.cuda.is_available():
        return
    yield from findings(ask())
    if torch.cuda.device_count() > 1:
        yield _peers(torch.cuda.device_count())


def ask() -> list[Mapping[str, str]]:
    """What nvidia-smi says of each GPU, by the names of its own options; nothing where it does not run."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode:
        return []
    rows = csv.reader(done.stdout.splitlines(), skipinitialspace=True)
    return [dict(zip(_ASKED, row, strict=True)) for row in rows if len(row) == len(_ASKED)]


def findings(gpus: Sequence[Mapping[str, str]]) -> Iterator[Finding]:
    """What the answers of ``ask`` mean."""
    if not gpus:
        advice = "see to it that nvidia-smi works: without it nothing is known of the GPUs' health"
        yield Finding("driver", "warning", "nvidia-smi gives no answer", advice)
        return
    yield Finding("driver", "fine", gpus[0]["driver_version"])
    for gpu in gpus:
        subject = f"GPU {gpu['index']}"
        total, used = _number(gpu["memory.total"]), _number(gpu["memory.used"])
        found = f"{gpu['name']}, {total / 1024:.0f} GiB, {used / 1024:.1f} in use, {gpu['temperature.gpu']} °C"
        if _number(gpu["ecc.errors.uncorrected.volatile.total"]) > 0:
            count = gpu["ecc.errors.uncorrected.volatile.total"]
            yield Finding(
                subject, "wrong", f"{found}, {count} uncorrected memory errors", "take it out of use until it is reset"
            )
        elif gpu["clocks_throttle_reasons.hw_slowdown"] == "Active":
            yield Finding(
                subject, "warning", f"{found}, slowed down by its hardware", "look at its cooling and power supply"
            )
        elif used > _BUSY_MIB:
            yield Finding(subject, "warning", found, "somebody else's process is on it; nvidia-smi shows which")
        else:
            yield Finding(subject, "fine", found)
    if len({gpu["name"] for gpu in gpus}) > 1:
        advice = "run on equal ones, with CUDA_VISIBLE_DEVICES: all ranks wait for the slowest"
        yield Finding("GPUs", "warning", "they are not of the same kind", advice)


def _peers(count: int) -> Finding:
    import torch

    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if not apart:
        return Finding("between GPUs", "fine", "all reach each other's memory directly")
    return Finding(
        "between GPUs",
        "warning",
        f"{len(apart)} of {len(pairs)} pairs do not reach each other's memory, such as {apart[0]}",
        "`nvidia-smi topo -m` shows the links; keep tensor parallelism among GPUs that have one",
    )


def _number(text: str) -> float:
    """nvidia-smi says ``[N/A]`` where a GPU does not know."""
    try:
        return float(text)
    except ValueError:
        return 0.0
