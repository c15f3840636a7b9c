"""The configuration of this package's mirrors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import attrs

from forge_core.api import Slot
from forge_core.config.sections import Job
from forge_core.contracts.component_ref import ComponentRef
from forge_plugins_mirror.mirror_url import mirror_problem, path_of, url_of_run

_PATTERN = {"*", "?", "["}


def _no_pattern(place: str) -> str | None:
    path = place.partition("://")[2].partition("/")[2]  # a host may be [::1]
    if not (letters := _PATTERN & {*path}):
        return None
    return (
        f"{place!r} has {min(letters)!r} in it, which fsspec takes for a pattern: no checkpoint could be removed "
        "there; choose another run.name or url"
    )


@attrs.frozen(kw_only=True)
class FsspecMirrorConfig:
    """Copies checkpoints to a file system of fsspec."""

    url: str = attrs.field(validator=attrs.validators.min_len(1))
    """A path, or a URL (``s3://bucket/runs``) whose package is installed; each run has a folder of its name there. No
    credentials: the environment has them."""

    def check(self, job: Job) -> Iterable[tuple[str, str]]:
        """Refuse a place that cannot be, or that has the checkpoints already."""
        if problem := mirror_problem(self.url):
            yield "url", problem
        elif path_of(self.url) == job.run.dir.expanduser().absolute():
            yield "url", f"{self.url!r} is run.dir, where the checkpoints are already; name another place"
        elif path_of(self.url) is None and (problem := _no_pattern(url_of_run(self.url, str(job.run.name)))):
            yield "url", problem

    def within(self, name: str) -> FsspecMirrorConfig:
        """The same place, one folder further down."""
        return attrs.evolve(self, url=url_of_run(self.url, name))


@attrs.frozen(kw_only=True)
class HostMemoryConfig:
    """Keeps checkpoints in the memory of each node, every few steps, with a copy on the next node. They survive the
    processes, and all of them the loss of a node. A run that ends well lets go of them."""

    every: int = attrs.field(default=10, validator=attrs.validators.ge(1))
    """Steps between checkpoints in memory, beside those of ``checkpoint.interval``."""
    folder: str = attrs.field(default="/dev/shm", validator=attrs.validators.min_len(1))
    """A folder in the memory of each node, with room for two checkpoints of its ranks and of those of the node before.
    ``$NAME`` is taken from the environment of each rank."""

    def check(self, job: Job) -> Iterable[tuple[str, str]]:
        """Refuse a number of steps with which nothing would be kept, and a folder of the working directory."""
        if not self.folder.startswith(("/", "$")):
            yield "folder", f"{self.folder!r} is no absolute path; name a folder in the node's memory, as /dev/shm"
        interval = job.checkpoint.interval
        if interval and self.every >= interval:
            yield (
                "every",
                f"{self.every} must be less than checkpoint.interval = {interval}, at which a run saves anyway",
            )
        elif self.every >= job.train.steps:
            yield (
                "every",
                f"{self.every} must be less than train.steps = {job.train.steps}, at which a run saves anyway",
            )
        is_alone = job.checkpoint.mirror is not None and job.checkpoint.mirror.config is self
        if is_alone and job.checkpoint.mirror_keep_last is not None:
            yield "every", "one checkpoint is kept in memory: checkpoint.mirror_keep_last has no effect; remove it"


@attrs.frozen(kw_only=True)
class SeveralMirrorsConfig:
    """Copies checkpoints to each of several mirrors. A start takes the newest whole one that any of them has."""

    mirrors: tuple[Annotated[ComponentRef, Slot("checkpoint_mirror", default="fsspec", text_key="url")], ...]
    """Arrays of tables: ``[[checkpoint.mirror.mirrors]]``, each with ``name`` and the keys of that mirror. A checkpoint
    is read from the first that has it."""

    def check(self, job: Job) -> Iterable[tuple[str, str]]:
        """Refuse less than two, and mirrors that would be in each other's way."""
        if len(self.mirrors) < 2:
            yield "mirrors", f"expected at least two mirrors, got {len(self.mirrors)}; one is checkpoint.mirror itself"
        for number, use in enumerate(self.mirrors):
            before = self.mirrors[:number]
            if isinstance(use.config, SeveralMirrorsConfig):
                yield f"mirrors[{number}]", "is several mirrors in turn; name each of them here"
            elif use in before:
                yield f"mirrors[{number}]", f"is mirrors[{before.index(use)}] once more; take one of them out"
            elif isinstance(use.config, HostMemoryConfig) and any(
                isinstance(o.config, HostMemoryConfig) for o in before
            ):
                yield f"mirrors[{number}]", "a run has one memory of its nodes; take one host_memory out"
