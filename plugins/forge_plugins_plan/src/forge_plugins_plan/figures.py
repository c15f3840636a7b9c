"""Times, rates and bandwidths that an effective training time is reckoned with, each with its source."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import attrs

from forge_core.errors import ConfigError, nearest
from forge_plugins_plan.failures import DAYS, GPUS, PLANNED, UNEXPECTED

GIVEN = "given by --assume"

_LLAMA = "published: Llama 3 (arXiv 2407.21783)"
_BYTEROBUST = "published: ByteRobust (arXiv 2509.16293)"
_RESULTS = "measured: benchmarks/RESULTS.md"
_MEMORY = f"{_RESULTS}, Checkpoints in memory, on two cores"


def _figure(default: float, unit: str, source: str) -> Any:
    return attrs.field(default=default, metadata={"unit": unit, "source": source})


@attrs.frozen(kw_only=True)
class Figures:
    """Each has a unit and a source: measured with Forge, published, set by Forge, or to be given."""

    failures_per_1000_gpus_day: float = _figure(
        UNEXPECTED / DAYS / GPUS * 1000, "", f"{_LLAMA}, Table 5: {UNEXPECTED} in {DAYS} days on {GPUS:,} GPUs"
    )
    """They grow with the number of GPUs; the causes keep their shares."""
    stops_per_day: float = _figure(PLANNED / DAYS, "", f"{_LLAMA}, 3.3.4: {PLANNED} planned ones in {DAYS} days")
    """A person stops the job, which saves and is started again; however many GPUs there are."""
    lost_file_systems_per_day: float = _figure(0.0, "", "not published; 0 unless given")
    """All checkpoints are lost with it, except those at a mirror."""
    death_seconds: float = _figure(
        3.0, "s", "set: silence after which the supervisor peers names a rank, 2 to 4 s in all"
    )
    """Until a process or node that is gone is named."""
    hang_seconds: float = _figure(2.0, "s", f"{_RESULTS}, Reliability: 1.2 s beyond run.step_timeout, 2 allowed")
    """Until a rank that is alive and does not come is named, beyond the step's time limit."""
    wrong_seconds: float = _figure(4289.0, "s", f"{_BYTEROBUST}, Table 6: mean for values that are NaN")
    """Until numbers that are wrong are noticed and the node that makes them is known."""
    start_seconds: float = _figure(40.0, "s", f"{_BYTEROBUST}, Table 7: 46 s on 2,048 GPUs, groups taken off")
    """To start processes again on nodes that are there, import, and build, without groups of ranks."""
    groups_seconds_per_1000_gpus: float = _figure(
        265 / 96, "s", "published: NCCL's 265 s on 96,000 GPUs (arXiv 2510.20171), taken as linear"
    )
    """To connect the ranks."""
    requeue_seconds: float = _figure(445.7, "s", f"{_BYTEROBUST}, Table 7: fitted to 454, 545, 635, 768 s")
    """To queue and start the whole job again with another node, of a job on up to 2,048 GPUs."""
    requeue_seconds_per_doubling: float = _figure(103.2, "s", f"{_BYTEROBUST}, Table 7: the same fit")
    """More, each time the number of GPUs doubles from there."""
    replenish_of_requeue: float = _figure(5.36 / 10.87, "", f"{_BYTEROBUST}, 8.2.1: reschedule over requeue")
    """How long a spare node that was used is missing, as a part of the time to queue a job again."""
    spares: float = _figure(0.0, "", "0 unless given: forge run has none of its own")
    """Nodes that wait with everything imported and take a lost one's place at once."""
    storage_gb_per_gpu: float = _figure(
        2000 / 24_576, "GB/s", f"{_LLAMA}, 3.3.1: 2 TB/s sustained for a cluster of 24K GPUs"
    )
    """What a GPU's share of the file system writes or reads."""
    mirror_gb_per_gpu: float = _figure(2000 / 24_576, "GB/s", "not published; taken to be that of the file system")
    """The same of the mirror."""
    host_copy_gb: float = _figure(3.75, "GB/s", f"{_RESULTS}, Checkpoints: 157 MB of a rank in 0.042 s")
    """How fast a rank copies what it saves into the host's memory, while training waits."""
    memory_write_gb: float = _figure(0.067, "GB/s", f"{_MEMORY}: 157 MB of a rank in 2.35 s")
    """How fast a rank's part comes into the memory of its node and of the next one, beside training."""
    memory_read_gb: float = _figure(0.35, "GB/s", f"{_MEMORY}: the same in 0.45 s")
    """How fast a rank compares what its node has with the manifest, and reads it."""
    memory_send_gb: float = _figure(0.33, "GB/s", f"{_MEMORY}: 0.47 s more where a node was wiped")
    """How fast a rank gets what another node has."""
    slower_while_written: float = _figure(0.0, "", f"{_RESULTS}, One H200: no longer than others")
    """The part of training that is lost while a checkpoint is written in the background."""
    replicas: float = _figure(1.0, "", "1 unless given")
    """Of ``forge replicas``: the others go on when one is lost."""
    replica_death_seconds: float = _figure(5.0, "s", "set: forge replicas --heartbeat-timeout")
    """Until the others go on without one that has died."""
    replica_hang_seconds: float = _figure(60.0, "s", "set: timeout of the callback torchft")
    """The same of one that does not come."""


def figures_with(assumed: Iterable[str]) -> Figures:
    """The figures with what ``KEY=VALUE`` say.

    Raises:
        ConfigError: a key is not one of them, or a value is no number that it can have.
    """
    values: dict[str, float] = {}
    names = [field.name for field in attrs.fields(Figures)]
    for text in assumed:
        name, has_value, value = text.partition("=")
        name = name.replace("-", "_")
        if name not in names or not has_value:
            near = nearest(name, names)
            meant = f" Did you mean {near}?" if near else ""
            raise ConfigError(f"--assume {text}: must be NAME=NUMBER, with a name of {', '.join(names)}.{meant}")
        values[name] = _number(text, name, value)
    return Figures(**values)


def sources(figures: Figures) -> Iterator[tuple[str, float, str, str]]:
    """Name, value, unit and source of each."""
    for field in attrs.fields(Figures):
        value = getattr(figures, field.name)
        source = field.metadata["source"] if value == field.default else GIVEN
        yield field.name, value, field.metadata["unit"], source


_ABOVE_ZERO = (
    "storage_gb_per_gpu",
    "mirror_gb_per_gpu",
    "host_copy_gb",
    "memory_write_gb",
    "memory_read_gb",
    "memory_send_gb",
)
_WHOLE = {"spares": 0, "replicas": 1}
"""With the least that each can be."""
_PARTS = ("slower_while_written",)


def _number(text: str, name: str, value: str) -> float:
    allowed = "a number from 0"
    if name in _ABOVE_ZERO:
        allowed = "a number above 0"
    if name in _PARTS:
        allowed += " and below 1"
    if name in _WHOLE:
        allowed = f"a whole number from {_WHOLE[name]}"
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    fits = (
        math.isfinite(number)
        and number >= 0
        and (name not in _ABOVE_ZERO or number > 0)
        and (name not in _WHOLE or (number.is_integer() and number >= _WHOLE[name]))
        and (name not in _PARTS or number < 1)
    )
    if not fits:
        raise ConfigError(f"--assume {text}: must be {allowed}")
    return number
