"""The configuration of this distribution's components."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import attrs
from attrs.validators import ge, gt, le, optional

from forge_core.errors import ConfigError

if TYPE_CHECKING:
    from forge_core.config.sections import Job

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
"""Environment variable, as torchft has it: the URL of the lighthouse."""
HOST = "FORGE_REPLICA_HOST"
"""Environment variable: the name or address under which other replicas reach this machine; by default its name."""
NAME = "FORGE_REPLICA"
"""Environment variable: what this replica is called. Replicas are numbered in the order of their names."""
EXPECTED = "FORGE_REPLICAS_EXPECTED"
"""Environment variable: with how many replicas to begin, set by ``forge replicas`` for the ones that start together."""


def _is_address(_: object, attribute: attrs.Attribute[Any], url: str) -> None:
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname and parts.port) and parts.path in ("", "/")
    except ValueError:  # a port that is none
        is_one = False
    if not is_one:
        raise ValueError(f"must be written as http://host:port, got {url!r}")


@attrs.frozen(kw_only=True)
class TorchftConfig:
    """How a replica finds the others and how long it waits for them."""

    lighthouse: str | None = attrs.field(default=None, validator=optional(_is_address))
    """Where replicas report, such as ``"http://node0:29510"``; by default what the environment variable
    ``TORCHFT_LIGHTHOUSE`` says, which ``forge replicas`` sets."""
    min_replicas: int = attrs.field(default=1, validator=ge(1))
    """Below so many, the others wait instead of training on."""
    timeout: float = attrs.field(default=60.0, validator=[gt(0), le(10**9)])
    """Seconds that a replica waits for another one within a step, for its state, and for replicas started with it
    to come. One whose process has died is noticed at once."""
    join_timeout: float = attrs.field(default=1800.0, validator=[gt(0), le(10**9)])
    """Seconds that it waits for a step to begin: for ``min_replicas``, which end it with exit code 5 if they do not
    come, as does a network over which nothing can be added up for so long; and for others that evaluate or save,
    without which it then goes on."""

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """What this job would have to do that replicas cannot do together."""
        if job.anomalies.give_up_after > 0:
            sentence = (
                "replicas cannot go back to a checkpoint together, which not all of them have: set "
                "anomalies.give_up_after = 0, with which the run ends (exit code 4) where it would go back"
            )
            yield "", sentence
        if streamed := next(_streamed(job), None):
            sentence = (
                f"replicas cannot share the streams of {streamed}: one that comes back, or takes over the samples of "
                "another, has no state from which to read them; use data that can be read at any place, such as "
                f"{_INDEXED.get(streamed, 'token_files')}"
            )
            yield "", sentence
        if any(phase.data for phase in job.phases):
            sentence = (
                "replicas cannot begin phases of the data with a step: how many samples are read by then depends on "
                "how many replicas train; leave data out of [[phases]]"
            )
            yield "", sentence

    @property
    def lighthouse_url(self) -> str | None:
        """
        Raises:
            ConfigError: the environment variable is no address.
        """
        return self.lighthouse or reporting_to(self, os.environ.get(LIGHTHOUSE) or None, LIGHTHOUSE).lighthouse


def reporting_to(config: TorchftConfig, url: str | None, source: str) -> TorchftConfig:
    """The same with another lighthouse.

    Args:
        source: who names it.

    Raises:
        ConfigError: it is no address.
    """
    try:
        return attrs.evolve(config, lighthouse=url)
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from error


_INDEXED = {"huggingface_streaming": "huggingface", "image_text_streaming": "image_text"}
"""What reads the same data, by what reads it as streams."""


def _streamed(job: Job) -> Iterator[str]:
    """Names of sources that are read as streams, as far as their keys say; those of a mixture one by one. The rest is
    refused when the data are open."""
    sources = [one.source for one in getattr(job.data.config, "sources", ())]
    for use in (job.data, *sources):
        if getattr(use.config, "has_own_order", False) and getattr(use.config, "streams", 0):
            yield use.name
