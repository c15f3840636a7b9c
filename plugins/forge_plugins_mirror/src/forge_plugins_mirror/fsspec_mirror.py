"""The mirror of a run's checkpoints on a file system of fsspec: copied to from rank 0, without anybody waiting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from forge_core.checkpoint.manifest import DamagedError, Manifest
from forge_core.checkpoint.store import CheckpointStore
from forge_core.contracts.checkpoint_mirror import CheckpointMirror, MirrorContext, MirrorStart
from forge_core.errors import ConfigError
from forge_plugins_mirror.config import FsspecMirrorConfig
from forge_plugins_mirror.downloader import fetch
from forge_plugins_mirror.mirror import open_mirror
from forge_plugins_mirror.mirror_url import mirror_problem, url_of_run
from forge_plugins_mirror.mirroring import Mirroring
from forge_plugins_mirror.uploader import Uploader


class FsspecMirror(CheckpointMirror):
    """Reads in the thread that asks, and writes in one of its own."""

    def __init__(self, config: FsspecMirrorConfig, /, *, context: MirrorContext) -> None:
        if problem := mirror_problem(config.url):  # `forge checkpoint` is given URLs that are in no job
            raise ConfigError(problem)
        self._url = url_of_run(config.url, context.run_name) if context.run_name else config.url
        self._context = context
        self._mirror = open_mirror(self._url)
        self._mirroring: Mirroring | None = None
        self.place = self._mirror.url

    def available(self) -> Mapping[int, Manifest | DamagedError]:
        return self._context.run_on_rank0(self._mirror.checkpoints)

    def last_job(self) -> str | None:
        return self._context.run_on_rank0(self._mirror.job_toml)

    def fetch(self, step: int, folder: Path) -> str | None:
        return self._context.run_on_rank0(lambda: fetch(self._mirror, step, folder))

    def problem(self, step: int, *, reads: bool) -> str | None:
        return self._mirror.problem(step) if reads else self._mirror.visible_problem(step)

    def begin(self, start: MirrorStart) -> None:
        copier = None
        if self._context.rank == 0:
            copier = Uploader(
                CheckpointStore(self._context.folder),
                open_mirror(self._url),
                self._context.section,
                attempt=start.attempt,
                job_toml=start.job_toml,
                start=start.step,
                may_commit=start.refuse_if_lost,
            )
        self._mirroring = Mirroring(copier, self._context, start)
        self._context.run_on_rank0(lambda: copier.start() if copier else None)

    def saved(self, path: Path) -> None:
        self._begun.saved()

    def look(self) -> None:
        self._begun.look()

    def may_remove(self, steps: Sequence[int], sizes: Mapping[int, int]) -> list[int]:
        return self._begun.removable(steps, sizes, self._context.folder)

    def rolled_back(self, to: int) -> None:
        self._begun.put_aside(to)

    def finish(self, seconds: float) -> None:
        self._begun.wait(seconds)

    def try_again(self) -> bool:
        self._begun.try_again()
        return True

    def close(self) -> None:
        self._begun.close()

    @property
    def _begun(self) -> Mirroring:
        assert self._mirroring is not None, "begin has been called"
        return self._mirroring
