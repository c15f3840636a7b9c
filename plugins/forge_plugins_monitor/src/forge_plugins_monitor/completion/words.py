"""The words that may stand at the cursor of a command line: commands, options, values, files, runs, settings."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import click
from click.shell_completion import CompletionItem, ShellComplete, split_arg_string

from forge_core.contracts.command import Invocation
from forge_core.registry.catalog import Catalog
from forge_core.registry.hookspecs import CORE_COMMANDS
from forge_plugins_monitor.pages.library import pages

RUNS = ("run", "runs", "run_dir", "folder")
"""Arguments of commands that are directories of runs."""


@attrs.frozen
class Word:
    """A word that may stand at the cursor."""

    text: str
    about: str = ""
    """What it is, in a line."""
    is_open: bool = False
    """More may follow without a space, as behind ``optimizer.`` and ``runs/``."""


def words_at(line: str, forge: click.Group, invocation: Invocation) -> list[Word]:
    """The words for the end of a command line, each beginning with what is typed of the last word.

    Args:
        line: from its first word, ``forge``, to the cursor.
        forge: the command of this name.
    """
    *before, last = split_arg_string(f"{line}\0")  # with the mark, there is a last word behind a space, too
    arguments, begun = before[1:], last.rstrip("\0")
    context = _context(arguments, forge, invocation)
    if context is None:
        return []
    return [word for word in _Line(arguments, begun, context).words() if word.text.startswith(begun)]


class _Line:
    """A command line whose last word is ``begun``."""

    def __init__(self, arguments: Sequence[str], begun: str, context: click.Context) -> None:
        self._arguments, self._begun, self._context = arguments, begun, context
        self._catalog: Catalog = context.obj.catalog()

    def words(self) -> Iterator[Word]:
        option = self._option_before()
        if option is not None:
            yield from self._values_of(option)
            return
        argument = self._next_argument()
        if argument is not None and not self._begun.startswith("-"):
            yield from self._values_of(argument)
            return
        if argument is not None and argument.name == "overrides":
            yield from self._settings()
        if self._context.parent is None and not self._begun.startswith("-"):
            yield from self._commands()
            return
        for item in self._of_click():
            yield Word(item.value, item.help or "")

    def _commands(self) -> Iterator[Word]:
        """As described: importing all of them would take seconds."""
        yield from (Word(command.name, command.summary) for command in CORE_COMMANDS)
        yield from (Word(name, command.summary) for name, (command, _) in sorted(self._catalog.commands.items()))

    def _values_of(self, parameter: click.Parameter) -> Iterator[Word]:
        metavar = parameter.metavar or ""
        if parameter.name == "config":
            yield from _paths(self._begun, suffix=".toml")
        elif parameter.name == "overrides" or metavar.startswith("KEY="):
            yield from self._settings()
        elif parameter.name in RUNS or self._context.command_path.startswith("forge checkpoint"):
            yield from _runs(self._begun)
        elif isinstance(parameter.type, click.Path):
            yield from _paths(self._begun)
        elif metavar == "DIST":
            yield from (Word(plugin.distribution) for plugin in self._catalog.plugins)
        elif parameter.name == "kind" and not isinstance(parameter.type, click.Choice):
            yield from (Word(name, kind.summary) for name, kind in self._catalog.kinds.items())
        elif self._context.command_path == "forge show":
            yield from _components(self._catalog, self._context.params["kind"])
        elif self._context.command_path == "forge docs":
            yield from (Word(page.name, page.title) for page in pages().values())
        else:
            yield from (Word(word) for word in metavar.split("|") if word.islower())  # of auto|never|STEP|PATH
            yield from (Word(item.value, item.help or "") for item in self._of_click() if item.type == "plain")

    def _settings(self) -> Iterator[Word]:
        from forge_plugins_monitor.completion.settings import settings

        params, begun, cut = self._context.params, self._begun, 0
        if params.get("config") is None or "--" in self._arguments:
            return
        if self._arguments[-1].startswith("--") and "." in self._arguments[-1] and "=" not in self._arguments[-1]:
            begun = f"{self._arguments[-1]}={begun}"  # --optimizer.name adamw
            cut = len(self._arguments[-1]) + 1
        dashes = "--" * begun.startswith("--")
        found = settings(begun.removeprefix("--"), Path(params["config"]), params["overrides"], self._catalog)
        for text, about in found:
            yield Word(f"{dashes}{text}"[cut:], about, is_open=text.endswith((".", "=")))

    def _option_before(self) -> click.Option | None:
        """The option whose value is begun."""
        name = self._arguments[-1] if self._arguments else ""
        for parameter in self._context.command.params:
            if isinstance(parameter, click.Option) and name in parameter.opts and not parameter.is_flag:
                return parameter
        return None

    def _next_argument(self) -> click.Argument | None:
        for parameter in self._context.command.params:
            if isinstance(parameter, click.Argument) and (
                parameter.nargs == -1 or not self._context.params.get(str(parameter.name))
            ):
                return parameter
        return None

    def _of_click(self) -> list[CompletionItem]:
        shell = ShellComplete(self._context.find_root().command, {"obj": self._context.obj}, "forge", "")
        return shell.get_completions([*self._arguments], self._begun)


def _context(arguments: list[str], forge: click.Group, invocation: Invocation) -> click.Context | None:
    """Of the innermost command that is named; ``None`` if there is none of that name."""
    command: click.Command = forge
    settings = forge.context_settings
    context = click.Context(command, info_name="forge", obj=invocation, resilient_parsing=True, **settings)
    while isinstance(command, click.Group):
        _, arguments, _ = command.make_parser(context).parse_args([*arguments])
        if not arguments:
            return context
        if command.get_command(context, arguments[0]) is None:
            return None
        name, found, arguments = command.resolve_command(context, arguments)
        assert found is not None, "it was looked up"
        command = found
        complete = (
            arguments[:-1] if arguments and arguments[-1].startswith("-") else arguments
        )  # of one that has its value
        context = command.make_context(name, [*complete], parent=context, resilient_parsing=True)
    return context


def _components(catalog: Catalog, kind: str) -> Iterator[Word]:
    for one in catalog.components(kind) if kind in catalog.kinds else ():
        yield Word(one.component.name, one.component.summary)


def _paths(begun: str, suffix: str = "") -> Iterator[Word]:
    """Directories, and the files whose names end so."""
    start = begun[: begun.rfind("/") + 1]
    try:
        entries = sorted(os.scandir(Path(start or ".").expanduser()), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith(".") and not begun[len(start) :].startswith("."):
            continue
        if entry.is_dir():
            yield Word(f"{start}{entry.name}/", is_open=True)
        elif entry.name.endswith(suffix):
            yield Word(f"{start}{entry.name}")


def _runs(begun: str) -> Iterator[Word]:
    """Directories of runs, and directories on the way to them; those in ``runs/`` before anything is typed."""
    if not begun and any(Path("runs").glob("*/job.toml")):
        begun = "runs/"
    for word in _paths(begun):
        if word.is_open:
            is_run = (Path(word.text).expanduser() / "job.toml").is_file()
            yield Word(word.text.rstrip("/")) if is_run and begun != word.text else word
