"""The command line: which commands there are, and how an error ends.

Nothing is imported for a command but the command itself: ``forge --help`` shows what descriptions say.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from forge_core import __version__
from forge_core.commands.invocation import Invocation, load_command
from forge_core.config.describe import printable
from forge_core.errors import INTERRUPTED, ExitCode, ForgeError, did_you_mean, exit_code_of, path_problem, place_of
from forge_core.registry.hookspecs import CORE_COMMANDS
from forge_core.registry.plugin_files import TRUST_VARIABLE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``forge`` with these arguments (by default the process') and return its exit code.

    A command's own exit code is the integer that it returns, or that it gives to ``click.Context.exit``.
    """
    is_process = arguments is None
    arguments, debug = _take("--debug", sys.argv[1:] if arguments is None else arguments)
    arguments, trusts = _take("--trust-files", arguments)
    invocation = Invocation(arguments, debug=debug)
    if trusts:
        invocation.until_the_end.callback(os.environ.update, {TRUST_VARIABLE: os.environ.get(TRUST_VARIABLE, "")})
        os.environ[TRUST_VARIABLE] = "all"  # for the ranks that it starts, too
    try:
        return _run(arguments, invocation)
    finally:
        if not is_process:
            invocation.until_the_end.close()


def _run(arguments: Sequence[str], invocation: Invocation) -> int:
    try:
        result = forge.main(arguments, prog_name="forge", standalone_mode=False, obj=invocation)
    except click.ClickException as error:
        error.show()
        if hint := _meant(error):
            click.echo(hint.strip(), err=True)
        return error.exit_code
    except click.Abort as error:  # this is how click passes on Ctrl-C, and the end of an input it was asking for
        if isinstance(error.__cause__, EOFError):
            return _report(error.__cause__, invocation.debug)
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001  # the last line of defence: a traceback only for those who ask for it
        return _report(error, invocation.debug)
    return int(result) if isinstance(result, int) else ExitCode.COMPLETED


class ForgeGroup(click.Group):
    """The core's commands and those of plugins, each imported when it is called."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        installs = args[:1] == ["--install-completion"]
        return super().parse_args(ctx, ["completion", "--install", *args[1:]] if installs else args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*(command.name for command in CORE_COMMANDS), *sorted(ctx.obj.catalog().commands)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        for command in CORE_COMMANDS:
            if command.name == cmd_name:
                return load_command(command, "forge-core")
        found = ctx.obj.catalog().command(cmd_name)
        return load_command(found[0], found[1].distribution) if found else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        args = args[1:] if args[:2] == ["plugins", "show"] else args  # of a package, as no run needs it
        name = args[0]
        if name.startswith("-") or self.get_command(ctx, name) is not None:
            return super().resolve_command(ctx, args)
        from forge_core.registry.suggestions import why_no_command

        core = (command.name for command in CORE_COMMANDS)
        raise click.UsageError(why_no_command(ctx.obj.catalog(), name, core), ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        catalog = ctx.obj.catalog()
        with formatter.section("Commands"):
            formatter.write_dl([(command.name, command.summary) for command in CORE_COMMANDS])
        rows = [(name, f"{one.summary}  [{owner.distribution}]") for name, (one, owner) in catalog.commands.items()]
        if rows:
            with formatter.section("Commands of plugins"):
                formatter.write_dl(sorted(rows))
        for conflict in catalog.conflicts():
            if conflict.kind == "command":
                formatter.write_text(f"conflict: {conflict}")


def _disable(ctx: click.Context, _: click.Parameter, distributions: tuple[str, ...]) -> None:
    ctx.obj.disabled = distributions


def _print_versions(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    from forge_core.registry.entry_points import API_VERSION, installed

    torch = f"torch {version}" if (version := installed("torch")) else "no torch"  # importing it takes a second
    click.echo(f"forge-core {__version__} (plugin API {API_VERSION}), Python {sys.version.split()[0]}, {torch}")
    plugins = ", ".join(f"{plugin.distribution}-{plugin.version}" for plugin in ctx.obj.catalog().plugins)
    click.echo(f"plugins: {plugins or 'none'}")
    ctx.exit()


@click.group(cls=ForgeGroup, no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})
# Both are taken out of the arguments before click sees them; here for the help only.
@click.option("--debug", is_flag=True, expose_value=False, help="Show tracebacks. May stand after the command, too.")
@click.option("--install-completion", is_flag=True, expose_value=False, help="Short for completion --install [SHELL].")
@click.option(
    "--trust-files",
    is_flag=True,
    expose_value=False,
    help="Run the plugin files of a checkpoint, or of another resolved job. May stand after the command, too.",
)
@click.option(
    "--disable-plugin",
    metavar="DIST",
    multiple=True,
    expose_value=False,
    is_eager=True,
    callback=_disable,
    help="Do not import this plugin. May be repeated.",
)
@click.option(
    "-V",
    "--version",
    is_flag=True,
    expose_value=False,
    callback=_print_versions,
    help="Show the versions of Forge, Python, torch and every plugin.",
)
def forge() -> None:
    """Forge trains foundation models from TOML files and plugins.

    forge COMMAND --help says more about a command.
    """


def _take(flag: str, arguments: Sequence[str]) -> tuple[list[str], bool]:
    """Remove a flag from the arguments, wherever it stands before ``--``."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    ours = [argument for argument in arguments[:end] if argument != flag]
    return [*ours, *arguments[end:]], len(ours) < end


def _meant(error: click.ClickException) -> str:
    """The nearest of the values that an option takes, of which click only says which there are."""
    choice = error.param.type if isinstance(error, click.BadParameter) and error.param is not None else None
    if not isinstance(choice, click.Choice) or "'" not in error.message:
        return ""
    return did_you_mean(error.message.split("'")[1], map(str, choice.choices))


def _report(error: BaseException, debug: bool) -> int:
    if debug:
        from traceback import format_exception

        click.echo(printable("".join(format_exception(error))), err=True, nl=False)
    expected = isinstance(error, ForgeError)
    message = str(error) if expected else path_problem(error) or f"{type(error).__name__}: {error}"
    if message:  # another rank says it
        click.echo(printable(f"error: {message}"), err=True)
    for note in getattr(error, "__notes__", ()):
        click.echo(printable(note), err=True)
    if exit_code_of(error) == ExitCode.UNEXPECTED and not expected and not debug:
        click.echo(f"at {place_of(error)}", err=True)
        click.echo("re-run with --debug for the traceback; it is a bug in Forge or in a plugin", err=True)
    return exit_code_of(error)
