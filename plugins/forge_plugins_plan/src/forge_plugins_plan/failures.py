"""What interrupts long jobs, and how often: published counts."""

from __future__ import annotations

from typing import Literal

import attrs

Shows = Literal["ends", "hangs", "is wrong"]
"""How a failure is seen: a process ends, with an error or as its node is gone; one is alive and does not come; or
numbers are wrong."""


@attrs.frozen
class Cause:
    """A row of a table of interruptions."""

    name: str
    count: int
    shows: Shows
    takes_node: bool
    """Whether the job goes on with another node; otherwise with the same ones."""


GPUS = 16_384
DAYS = 54
PLANNED = 47
"""Interruptions in the same time that were no failures: new firmware, another configuration, other data."""

CAUSES = (
    Cause("faulty GPU", 148, "ends", takes_node=True),
    Cause("GPU HBM3 memory", 72, "ends", takes_node=True),
    Cause("software bug", 54, "ends", takes_node=False),
    Cause("network switch or cable", 35, "hangs", takes_node=False),
    Cause("host maintenance, unplanned", 32, "ends", takes_node=True),
    Cause("GPU SRAM memory", 19, "ends", takes_node=True),
    Cause("GPU system processor", 17, "ends", takes_node=True),
    Cause("network card", 7, "hangs", takes_node=True),
    Cause("NCCL watchdog timeout", 7, "hangs", takes_node=False),
    Cause("silent data corruption", 6, "is wrong", takes_node=True),
    Cause("GPU thermal interface or sensor", 6, "ends", takes_node=True),
    Cause("SSD", 3, "ends", takes_node=True),
    Cause("power supply", 3, "hangs", takes_node=True),
    Cause("server chassis", 2, "hangs", takes_node=True),
    Cause("IO expansion board", 2, "ends", takes_node=True),
    Cause("dependency", 2, "ends", takes_node=False),
    Cause("CPU", 2, "ends", takes_node=True),
    Cause("system memory", 2, "ends", takes_node=True),
)
"""The 419 unexpected interruptions of 54 days of Llama 3 405B on 16,384 H100 (The Llama 3 Herd of Models, arXiv
2407.21783, Table 5).

The table has names and counts; ``shows`` and ``takes_node`` are ours. As hangs count the ones of the network, the ones
that NCCL's watchdog found, and nodes without power, whose connections stay open: 13 % (in ByteDance's 778,135 jobs,
hangs were 9.9 % of all incidents: arXiv 2509.16293, Table 1). A failure of a node's hardware takes the node.
"""

UNEXPECTED = sum(cause.count for cause in CAUSES)
