"""Heads of connectors, which share out the width of the encoder's features."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from forge_core.errors import ConfigError

if TYPE_CHECKING:
    from forge_core.config.sections import Job

_MOST = 4096
"""Heads that are looked at for the nearest number: any may have been typed."""


def uneven_heads(n_heads: int, job: Job) -> Iterator[tuple[str, str]]:
    """What is wrong with so many heads of a connector in this job: the key and a sentence."""
    try:
        width = job.model.config.encoder.config.dim
    except ConfigError:  # the encoder's files are not there, which its own check tells
        return
    if width % n_heads:
        nearest = max(one for one in range(1, min(n_heads, width, _MOST) + 1) if width % one == 0)
        sentence = f"{n_heads} heads cannot share out the {width} features of {job.model.config.encoder.name} evenly"
        yield "n_heads", f"{sentence}; {nearest} can"
