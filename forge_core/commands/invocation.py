"""An invocation of ``forge``: what every command of it is given, and the ranks of one that runs on several."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from forge_core.errors import ConfigError, ForgeError, PluginError, did_you_mean
from forge_core.registry.component import Command

if TYPE_CHECKING:
    from forge_core.registry.catalog import Catalog


class Invocation:
    """The ``Invocation`` of ``forge_core.contracts.command``."""

    def __init__(self, arguments: Sequence[str] = (), *, debug: bool = False) -> None:
        self.arguments = tuple(arguments)
        self.debug = debug
        self.until_the_end = ExitStack()
        self.disabled: tuple[str, ...] = ()
        """Distributions named by ``--disable-plugin``."""
        self.nproc = "1"
        """The word behind ``--nproc``."""
        self._catalogs: dict[frozenset[str], Catalog] = {}
        self._noted: set[str] = set()

    def catalog(self, disable: Collection[str] = (), *, notes_slow: bool = True) -> Catalog:
        from forge_core.registry.discovery import discover
        from forge_core.registry.entry_points import canonical_distribution

        wanted = frozenset(canonical_distribution(name) for name in (*self.disabled, *disable))
        if wanted not in self._catalogs:
            self._catalogs[wanted] = discover(wanted)
        catalog = self._catalogs[wanted]
        installed = {plugin.distribution for plugin in catalog.plugins}
        for name in self.disabled:
            if canonical_distribution(name) not in installed:
                near = did_you_mean(canonical_distribution(name), installed)
                raise ConfigError(f"--disable-plugin {name}: no plugin of that name is installed.{near}")
        if notes_slow:
            self._note_slow(catalog)
        return catalog

    def ranks(self) -> int:
        from forge_core.distributed.environment import find_cluster, launched_ranks
        from forge_core.launch import processes_asked_for  # imports torch

        launched = launched_ranks(os.environ, find_cluster(self.catalog(), os.environ), self.nproc)
        return launched or processes_asked_for(self.nproc)

    def start_ranks(self, arguments: Sequence[str] | None = None) -> None:
        number = self.ranks()
        if "RANK" in os.environ or number == 1:
            return
        from forge_core.launch import launch_command

        words = [*(["--debug"] if self.debug else []), *(self.arguments if arguments is None else arguments)]
        disabled = {"FORGE_DISABLE_PLUGINS": ",".join([*self.disabled, os.environ.get("FORGE_DISABLE_PLUGINS", "")])}
        click.get_current_context().exit(launch_command(words, number, disabled, self.until_the_end))

    def _note_slow(self, catalog: Catalog) -> None:
        slow = [one for one in catalog.plugins if one.is_slow and one.distribution not in self._noted]
        for plugin in slow if slow and not _is_one_of_many(catalog) else ():
            self._noted.add(plugin.distribution)
            seconds = f"{plugin.import_seconds:.1f} s"
            click.echo(f"note: importing {plugin} takes {seconds}, for which every forge command waits", err=True)


def _is_one_of_many(catalog: Catalog) -> bool:
    """Return whether other processes would say the same."""
    if "RANK" in os.environ:
        return True
    from forge_core.distributed.cluster import find_cluster

    try:
        return find_cluster(catalog, os.environ).is_launched(os.environ)
    except ForgeError:  # a command that needs to know says why
        return False


def _note_nproc(ctx: click.Context, _: click.Parameter, nproc: str) -> None:
    ctx.ensure_object(Invocation).nproc = nproc


_NPROC = click.Option(
    ["--nproc"],
    default="1",
    metavar="N|auto",
    expose_value=False,
    callback=_note_nproc,
    help="Processes on this machine; auto is one a GPU.",
)


def load_command(command: Command, owner: str) -> click.Command:
    """Import a command, with ``--nproc`` if it runs on ranks.

    Args:
        owner: the distribution that provides it.

    Raises:
        PluginError: it cannot be imported, or is no ``click.Command``.
    """
    from forge_core.registry.imports import load_reference

    loaded = load_reference(command.run, what=f"the command '{command.name}'", owner=owner)
    if not isinstance(loaded, click.Command):
        raise PluginError(
            f"{owner}: the command '{command.name}' ({command.run}) must be a click.Command, not "
            f"{type(loaded).__name__}. This is a bug in {owner}."
        )
    if command.ranks and _NPROC not in loaded.params:
        loaded.params.append(_NPROC)
    return loaded
