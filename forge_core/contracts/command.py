"""Commands: sub-commands of ``forge``.

A ``Command`` names an object of type ``click.Command`` (also a ``click.Group``) by import path. Its module is imported
when the command is called and not before, so it may import torch; ``forge --help`` shows the summary from the
description. Raise ``forge_core.errors.ConfigError`` for what the user can mend: it is printed as a sentence, and the
exit code is 2.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import click

    from forge_core.registry.catalog import Catalog


class Invocation(Protocol):
    """The options of ``forge`` itself. A command is given it by ``@click.pass_obj``."""

    arguments: tuple[str, ...]
    """The words behind ``forge``, without ``--debug``."""
    debug: bool
    """Tracebacks are wanted."""
    disabled: tuple[str, ...]
    """Distributions named by ``--disable-plugin``."""
    until_the_end: ExitStack
    """Contexts that stay open until the process of a command ends, or its caller goes on."""

    def catalog(self, disable: Collection[str] = (), *, notes_slow: bool = True) -> Catalog:
        """The installed plugins, without the disabled distributions: those of the command line, and ``disable``.

        Args:
            notes_slow: whether to say, once, which plugins take long to import.

        Raises:
            ConfigError: the command line disables a distribution that is not there.
        """

    def ranks(self) -> int:
        """The number of processes that do a command with ``ranks=True``: what a launcher has started, this one among
        them, or else what ``--nproc`` asks for.

        Raises:
            ConfigError: ``--nproc`` is no number that this machine could start, or another one than the launcher's.
        """

    def start_ranks(self, arguments: Sequence[str] | None = None) -> None:
        """Let ranks do the rest. If ``ranks()`` are several and no launcher has started them, this starts them, each a
        process that runs the command from its beginning, and ends the command with their exit code. On a rank, and in
        the only process, it returns.

        Args:
            arguments: the words behind ``forge`` for each rank; by default those of this process.

        Raises:
            ConfigError: as ``ranks`` does.
        """


def options_of(command: click.Command) -> list[str]:
    """The long options of a command, for the hint about a misspelt one."""
    return [name for parameter in command.params for name in parameter.opts if name.startswith("--")]
