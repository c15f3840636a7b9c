"""``forge doctor``: what is fine on this machine, what is not, and what to do."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import attrs
import click

from forge_core.api import Check
from forge_core.commands.json_output import json_option, print_json
from forge_core.config.builder import load_reference, output_of
from forge_core.contracts.check import CheckContext, Finding
from forge_core.contracts.command import Invocation
from forge_core.distributed.environment import find_cluster, world_size_of
from forge_core.errors import ConfigError, ExitCode, ForgeError, nearest_hint
from forge_plugins_monitor.doctor.logins import CHECKS as LOGINS

OWN = "forge-plugins-monitor"


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path), default=Path("runs"))
@json_option(list[Finding])
@click.option("--init", is_flag=True, help="Also write the file of facts about this cluster that plugins read.")
@click.option(
    "--require",
    "required",
    multiple=True,
    metavar="CHECK",
    help="A check that must find something and warn of nothing, such as gpus, slurm, wandb; repeat for several.",
)
@click.pass_context
def doctor(ctx: click.Context, run_dir: Path, as_json: bool, init: bool, required: Sequence[str]) -> None:
    """Look at this machine, and at RUN_DIR, where runs will be written (by default runs).

    Under torchrun or srun it looks at all hosts, and measures how fast the ranks talk to each other.

    The exit code is 2 if anything is wrong.
    """
    invocation: Invocation = ctx.obj
    catalog = invocation.catalog()
    checks = [(check, plugin.distribution) for plugin in catalog.plugins for check in plugin.checks]
    checks.sort(key=lambda one: one[1] != OWN)  # those of every machine first
    _refuse_unknown(required, {check.name for check in (*LOGINS, *(check for check, _ in checks))})
    checks += [(check, OWN) for check in LOGINS if check.name in required]
    surroundings = CheckContext(run_dir, catalog)

    def look() -> list[Finding]:
        found: list[Finding] = []
        for check, owner in checks:
            of_check = _findings(check, owner, surroundings)
            found += _as_required(check, of_check) if check.name in required else of_check
        return found

    is_alone = world_size_of(os.environ, find_cluster(catalog, os.environ)) is None
    findings = look() if is_alone else _of_all_ranks(run_dir, look)
    if os.environ.get("RANK", "0") == "0":
        if as_json:
            print_json(findings)
        else:
            click.echo(_table(findings))
        if init:
            click.echo(f"wrote {', '.join(_write(checks))}", err=True)
    ctx.exit(ExitCode.INVALID if any(one.state == "wrong" for one in findings) else ExitCode.COMPLETED)


def _refuse_unknown(required: Sequence[str], names: Collection[str]) -> None:
    for name in required:
        if name not in names:
            known = f"there are {', '.join(sorted(names))}"
            raise ConfigError(f"--require: no check is named {name!r}; {known}{nearest_hint(name, names)}")


def _as_required(check: Check, findings: Sequence[Finding]) -> list[Finding]:
    """Warnings are wrong, and so is a check that has nothing to look at."""
    if findings:
        return [attrs.evolve(one, state="wrong") if one.state == "warning" else one for one in findings]
    found = f"this machine has nothing to look at: {check.summary}"
    return [Finding(check.name, "wrong", found, f"set it up, or leave out --require {check.name}")]


def _findings(check: Check, owner: str, surroundings: CheckContext) -> list[Finding]:
    """A check that fails is a finding, and the others are done all the same."""
    findings: list[Finding] = []
    try:
        function = load_reference(check.run, what=f"the check '{check.name}'", owner=owner)
        with output_of(owner):
            for finding in function(surroundings):
                findings.append(finding)
    except Exception as error:  # noqa: BLE001  # one check may fail in any way, the report is about the machine
        found = str(error) if isinstance(error, ForgeError) else f"{type(error).__name__}: {error}"
        findings.append(Finding(check.name, "wrong", found, f"the check of {owner} itself has failed; report it there"))
    return findings


def _of_all_ranks(run_dir: Path, look: Callable[[], list[Finding]]) -> list[Finding]:
    from forge_plugins_monitor.doctor.together import look_together

    try:
        return look_together(run_dir, look)
    except ForgeError as error:
        advice = "look whether every rank has been started, and whether MASTER_ADDR can be reached from its host"
        return [Finding("ranks", "wrong", str(error), advice), *look()]


def _write(checks: Sequence[tuple[Check, str]]) -> list[str]:
    """The files of facts. None is written over."""
    written = []
    for check, owner in checks:
        if check.writes is None:
            continue
        name, text = load_reference(check.writes, what=f"the check '{check.name}'", owner=owner)()
        try:
            with Path(name).open("x") as file:
                file.write(text)
        except FileExistsError:
            raise ConfigError(f"--init: {name} is here already; move it away first") from None
        except OSError as error:
            raise ConfigError(f"--init: cannot write {name}: {error.strerror}") from error
        written.append(name)
    if not written:
        raise ConfigError("--init: no installed plugin has a file of facts to write")
    return written


def _table(findings: Sequence[Finding]) -> str:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"fine": "green", "warning": "yellow", "wrong": "red"}
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for column in ("subject", "state"):
        table.add_column(column, no_wrap=True)
    table.add_column("found", overflow="fold")
    for one in findings:
        text = Text(one.found)
        if one.advice:
            text.append(f"\n→ {one.advice}", style="bold")
        table.add_row(one.subject, Text(one.state, style=colours[one.state]), text)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 1000)
    with console.capture() as capture:
        console.print(table)
    lines = "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())  # rich fills them up to the width
    counts = {state: sum(one.state == state for one in findings) for state in colours}
    return f"{lines}\n{', '.join(f'{count} {state}' for state, count in counts.items())}"
