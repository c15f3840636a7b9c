"""A command on one process, on the ranks that a launcher has started, or on processes that it starts itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import attrs

from forge_core.distributed.environment import end_with_launcher, find_cluster, world_size_of
from forge_core.errors import ConfigError


@attrs.frozen
class CommandRanks:
    """How many processes do a command."""

    nproc: str
    """What ``--nproc`` says."""
    launched: int | None
    """Ranks of a launcher, of which this process is one."""

    @classmethod
    def of(cls, obj: Any, nproc: str) -> CommandRanks:
        """
        Args:
            obj: the ``Invocation``.

        Raises:
            ConfigError: ``nproc`` is given to a rank.
        """
        cluster = find_cluster(obj.catalog(), os.environ)
        launched = world_size_of(os.environ, cluster)
        if launched is not None:
            end_with_launcher(os.environ, cluster)
            if nproc != "1":
                raise ConfigError(
                    f"--nproc {nproc}: this process is one of {launched} ranks already; leave --nproc out"
                )
        return cls(nproc, launched)

    def number(self) -> int:
        """
        Raises:
            ConfigError: ``nproc`` is no number of processes that this machine could start.
        """
        from forge_core.launch import processes_asked_for  # imports torch

        return self.launched or processes_asked_for(self.nproc)

    def start(self, obj: Any, arguments: Sequence[str]) -> bool:
        """Do the command by processes of its own, if several are asked for; returns whether that is done.

        Args:
            arguments: the words behind ``forge``.
        """
        if self.launched is not None or self.number() == 1:
            return False
        from forge_core.launch import launch_command

        words = [*arguments, *(["--debug"] if obj.debug else [])]
        disabled = {"FORGE_DISABLE_PLUGINS": ",".join([*obj.disabled, os.environ.get("FORGE_DISABLE_PLUGINS", "")])}
        if code := launch_command(words, self.number(), disabled, obj.until_the_end):
            sys.exit(int(code))
        return True
