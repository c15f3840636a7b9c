"""``forge new KIND NAME``: a plugin to start from, as a package or as a file, or a configuration."""

from __future__ import annotations

from pathlib import Path

import click

from forge_core.errors import ConfigError
from forge_testing.scaffold.package import HOOKS, write_config, write_package


@click.command(epilog=f"Kinds: {', '.join(HOOKS)}. And config: a TOML file.")
@click.argument("kind")
@click.argument("name")
@click.option(
    "--dir",
    "parent",
    type=click.Path(path_type=Path),
    default=Path(),
    help="Where the package's own folder, or the file, is made; by default here.",
)
@click.option("--file", "as_file", is_flag=True, help="Write one file, NAME.py, and no package.")
@click.option(
    "--from",
    "source",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the package around the components of a plugin file.",
)
def new(kind: str, name: str, parent: Path, as_file: bool, source: Path | None) -> None:
    """Write an installable package with one component of KIND, called NAME.

    It works as it is: install it, and its tests, the conformance kit, pass. Then change it. With --file it is a plugin
    in a file, which a configuration names, without a package or an installation. With config as KIND, it is a
    configuration, NAME.toml, that trains as it is.
    """
    if (as_file or source) and (kind == "config" or (as_file and source)):
        raise ConfigError("--file writes a plugin in a file, and --from FILE a package of one; give one of them")
    if kind == "config":
        file = write_config(name, parent)
        click.echo(f"{file}: a small model on text that every machine has. Next:")
        click.echo(f"    forge run {file}")
        return
    words = f"the {kind.replace('_', ' ')} '{name.replace('-', '_')}'"
    if as_file:
        from forge_testing.plugin_file import cases_in  # it imports the kit, and torch
        from forge_testing.scaffold.plugin_file import settings_for, write_file

        file = write_file(kind, name, parent)
        click.echo(f"{file}: a plugin file with {words}. Next:")
        click.echo(f"    pytest {file}")
        click.echo("and, in the configuration beside it:")
        click.echo("".join(f"    {line}\n" if line else "\n" for line in settings_for(cases_in(file)[0]).splitlines()))
        return
    if source is not None:
        from forge_testing.scaffold.plugin_file import write_package_from  # as above

        target, words = write_package_from(source, kind, name, parent), f"what {source} registers"
    else:
        target = write_package(kind, name, parent)
    click.echo(f"{target}: a package with {words}. Next:")
    click.echo(f"    cd {target}")
    click.echo("    pip install -e . forge-testing")
    click.echo("    pytest")
