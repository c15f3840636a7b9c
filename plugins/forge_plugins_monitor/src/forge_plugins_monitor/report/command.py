"""``forge report``: a page about runs, to look at and to send to others."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import click

from forge_core.contracts.command import Invocation
from forge_core.errors import ConfigError
from forge_plugins_monitor.report.page import page
from forge_plugins_monitor.report.run_record import find_runs, read_runs


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--out",
    "-o",
    type=click.Path(path_type=Path),
    default=Path("report.html"),
    show_default=True,
    help="File to write.",
)
@click.pass_obj
def report(obj: Invocation, runs: tuple[Path, ...], out: Path) -> None:
    """Write one HTML page about RUN..., directories of runs or folders of them: curves, events, configurations.

    The page is complete in itself: it needs no network and no other file. Runs may be running; nothing of theirs is
    changed. A file that is there already is replaced.

    Exit codes: 0 written, 2 a RUN is none or the page cannot be written.
    """
    found = find_runs(runs)
    catalog = obj.catalog()
    html, problems = page(read_runs(found), catalog)
    text = html.encode(errors="backslashreplace")  # names of files need not be UTF-8
    _write(out, text)
    for problem in problems:
        click.echo(f"note: {problem}", err=True)
    click.echo(f"wrote {out}: {len(found)} run{'s' * (len(found) > 1)}, {len(text) / 1e6:.2f} MB")


def _write(out: Path, text: bytes) -> None:
    beside = out.parent / f".{out.name}.new"
    try:
        if out.exists() and not out.is_file():  # /dev/stdout stays what it is
            out.write_bytes(text)
        else:
            beside.write_bytes(text)
            beside.replace(out)
    except OSError as error:
        with suppress(OSError):
            beside.unlink()
        raise ConfigError(f"--out: cannot write {out}: {error.strerror}") from error
