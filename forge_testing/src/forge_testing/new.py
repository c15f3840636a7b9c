"""``forge new KIND NAME``: a plugin package to start from, or a configuration."""

from __future__ import annotations

from pathlib import Path

import click

from forge_testing.scaffold.package import HOOKS, write_config, write_package


@click.command(epilog=f"Kinds: {', '.join(HOOKS)}. And config: a TOML file.")
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

    It works as it is: install it, and its tests, the conformance kit, pass. Then change it. With config as KIND, it is
    a configuration, NAME.toml, that trains as it is.
    """
    if kind == "config":
        file = write_config(name, parent)
        click.echo(f"{file}: a small model on text that every machine has. Next:")
        click.echo(f"    forge run {file}")
        return
    target = write_package(kind, name, parent)
    click.echo(f"{target}: a package with the {kind.replace('_', ' ')} '{name.replace('-', '_')}'. Next:")
    click.echo(f"    cd {target}")
    click.echo("    pip install -e . forge-testing")
    click.echo("    pytest")
