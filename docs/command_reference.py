"""Every command with its options and exit codes, from the commands themselves."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import click
from markdown_table import table  # it lies beside this file

from forge_core.cli import CORE_COMMANDS
from forge_core.commands.invocation import load_command
from forge_core.errors import INTERRUPTED, ExitCode
from forge_core.registry.catalog import Catalog
from forge_core.registry.component import Command

RUN = {
    ExitCode.COMPLETED: "done; a run has reached its last step",
    ExitCode.UNEXPECTED: "an unforeseen error; `--debug` shows the traceback",
    ExitCode.INVALID: "the configuration, the data, a plugin or the command line is wrong; nothing was started",
    ExitCode.STOPPED: "stopped early, and what there was to save is saved",
    ExitCode.NON_FINITE: "a run gave up: too many steps with values that are not finite",
    ExitCode.LOST_PEER: "a run lost another rank",
}


def command_reference(catalog: Catalog) -> Iterator[str]:
    """The page: exit codes, then each command."""
    yield "# Commands"
    yield ""
    yield "Generated from the commands of `forge-core` and of plugins; `forge COMMAND --help` says the same."
    yield "Every command takes `--debug`, which shows tracebacks, and `--trust-files`, which runs the plugin files of a"
    yield "checkpoint; `forge` takes `--disable-plugin` and `--version`."
    yield ""
    yield "## Exit codes"
    yield ""
    codes = [(str(code.value), words) for code, words in RUN.items()]
    yield from table(("code", "what has happened"), [*codes, (str(INTERRUPTED), "a second Ctrl-C")])
    yield ""
    yield "A command that says nothing of its own below ends with 0, 1 or 2."
    yield ""
    for command in CORE_COMMANDS:
        yield from _command(command, "forge-core")
    for _, (command, plugin) in sorted(catalog.commands.items()):
        yield from _command(command, plugin.distribution)


def exit_codes_of(command: click.Command) -> str:
    """The sentence of the command's help about its exit codes; empty if it has none."""
    words = " ".join(inspect.cleandoc(command.help or "").split())
    match = re.search(r"Exit codes?:? .*$|The exit code is .*?\.(?= |$)", words)
    return match[0] if match else ""


def subcommands(group: click.Group) -> Iterator[tuple[str, click.Command]]:
    """Those of a group by name, also of one that imports each when it is called."""
    context = click.Context(group)
    for name in sorted(group.list_commands(context)):
        command = group.get_command(context, name)
        assert command is not None, "it is in the list"
        yield name, command


def _command(command: Command, distribution: str) -> Iterator[str]:
    yield f"## `forge {command.name}`"
    yield ""
    yield f"{command.summary[:1].upper()}{command.summary[1:]}. From {distribution}."
    yield ""
    yield from _page(f"forge {command.name}", load_command(command, distribution))


def _page(name: str, command: click.Command) -> Iterator[str]:
    """What a command is told, and its sub-commands."""
    # click keeps the help option that it makes here: it has to be that of the command line
    context = click.Context(command, info_name=name, help_option_names=["-h", "--help"])
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"`{name} {usage}`"
    yield ""
    codes = exit_codes_of(command)
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        words = " ".join(paragraph.replace("\b", "").split())
        if words and not (codes and words.startswith(codes[:20])):
            yield _escaped(words)
            yield ""
    if codes:
        yield codes
        yield ""
    options = [one for one in command.params if isinstance(one, click.Option) and not one.hidden]
    if options:
        yield from table(("option", "default", "meaning"), (_option(one, context) for one in options))
        yield ""
    if isinstance(command, click.Group):
        for sub, inner in subcommands(command):
            yield f"### `{name} {sub}`"
            yield ""
            yield from _page(f"{name} {sub}", inner)


def _option(option: click.Option, context: click.Context) -> tuple[str, str, str]:
    record = option.get_help_record(context)
    assert record is not None, "hidden ones are left out"
    names, words = record
    match = re.search(r"\s*\[default: (.*?)(?:; (.*))?\]$", words)
    if match:
        words = words[: match.start()] + (f" [{match[2]}]" if match[2] else "")
    return f"`{names}`", f"`{match[1]}`" if match else "", _escaped(words)


def _escaped(words: str) -> str:
    """Text of a terminal as text of Markdown: options in code, and stars, brackets and braces as what they are."""
    parts = re.split(r"((?<![\w-])--?[a-z][\w.-]*)", words)
    return "".join(
        f"`{part}`" if number % 2 else re.sub(r"([*\[\]<>{}_`])", r"\\\1", part) for number, part in enumerate(parts)
    )
