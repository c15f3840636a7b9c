"""Bringing checkpoints back from a mirror, for a start on a machine that has lost them or never had them."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

import attrs

from forge_core.checkpoint.manifest import DamagedError, NewerFormatError, as_size
from forge_core.checkpoint.mirror import Mirror
from forge_core.distributed.collective_errors import slowly_from_first_rank
from forge_core.errors import ConfigError, MirrorError


@attrs.frozen
class Fetching:
    """All ranks call the same methods; the first one fetches, and the others wait however long it takes."""

    mirror: Mirror
    needs_mirror: bool
    """Whether a mirror that cannot be reached prevents a start from a checkpoint that is here."""
    sign: Callable[[], None]
    """Called once a second while they wait."""

    def steps(self, here: list[int], report: Callable[[str], None]) -> list[int]:
        """Of the checkpoints at the mirror.

        Args:
            here: steps of those that need not be fetched.

        Raises:
            MirrorError: it cannot be reached, and nothing is known of a run that may be there.
        """

        def listed() -> list[int]:
            try:
                return [*self.mirror.checkpoints()]
            except MirrorError as error:
                if self.needs_mirror or not here:
                    raise
                report(f"{error}; going by the checkpoints that are here")
                return []

        return slowly_from_first_rank(listed, self.sign)

    def fetch(self, step: int, to: Callable[[str], Path], commit: Callable[[Path], None]) -> str | None:
        """Fetch a checkpoint that ``steps`` has named, and commit it. Returns what is wrong with it, or ``None``.

        Args:
            to: where it is to be written, given what makes the folder this process's own.

        Raises:
            ConfigError: there is no room for it, or a later version of Forge has written it.
            MirrorError: the mirror fails.
        """

        def fetched() -> str | None:
            found = self.mirror.found(step)
            if isinstance(found, NewerFormatError):
                raise ConfigError(
                    f"step {step} at {self.mirror.url} was written by a later version of Forge: {found}; upgrade it"
                )
            if isinstance(found, DamagedError):
                return str(found)
            folder = to(uuid.uuid4().hex[:12])
            try:
                folder.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"cannot write to {folder.parent}: {error.strerror}") from error
            free = shutil.disk_usage(folder.parent).free
            if free < found.n_bytes:
                raise ConfigError(
                    f"{folder.parent} has {as_size(free)} free, and the checkpoint at {self.mirror.url} needs "
                    f"{as_size(found.n_bytes)}; make room"
                )
            try:
                problem = self.mirror.fetch(step, folder)
                if problem is None:
                    commit(folder)
            except OSError as error:
                raise ConfigError(f"cannot write to {folder.parent}: {error.strerror}") from error
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            return problem

        return slowly_from_first_rank(fetched, self.sign)

    def last_job(self) -> str | None:
        """The ``job.toml`` of the run's last start, as far as the mirror knows."""

        def read() -> str | None:
            try:
                return self.mirror.job_toml()
            except MirrorError:
                return None  # `steps` says so, and decides

        return slowly_from_first_rank(read, self.sign)
