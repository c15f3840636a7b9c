"""``forge new KIND NAME``: a plugin package to start from."""

from __future__ import annotations

from pathlib import Path

import click

from forge_core.scaffold.package import HOOKS, write_package


@click.command(epilog=f"Kinds: {', '.join(HOOKS)}.")
@click.argument("kind")
@click.argument("name")
@click.option(
    "--dir",
    "parent",
    type=click.Path(path_type=Path),
    default=Path(),
    help="Where the package's own folder is made; by default here.",
)
def new(kind: str, name: str, parent: Path) -> None:
    """Write an installable package with one component of KIND, called NAME.

    It works as it is: install it, and its tests, the conformance kit, pass. Then change it.
    """
    target = write_package(kind, name, parent)
    click.echo(f"{target}: a package with the {kind.replace('_', ' ')} '{name.replace('-', '_')}'. Next:")
    click.echo(f"    cd {target}")
    click.echo("    pip install -e .")
    click.echo("    pytest")
