"""``forge completion``, which is ``forge --install-completion``, too."""

from __future__ import annotations

import os
import re
from pathlib import Path
from textwrap import shorten

import click

from forge_core.errors import ConfigError
from forge_plugins_monitor.completion.scripts import SCRIPTS


@click.command()
@click.argument("shell", metavar="[SHELL]", required=False)
@click.option("--install", is_flag=True, help="Write it where SHELL finds it, instead of printing it.")
@click.option("--words", is_flag=True, hidden=True)  # what the script calls
@click.pass_context
def completion(ctx: click.Context, shell: str | None, install: bool, words: bool) -> None:
    """Print what SHELL (bash, zsh or fish; by default that of $SHELL) needs to complete forge's command lines.

    Exit codes: 0 printed or written, 2 SHELL is another one or a file cannot be written.
    """
    shell = _known(shell)
    if words:
        _complete(shell, ctx)
    elif install:
        _install(shell)
    else:
        click.echo(SCRIPTS[shell], nl=False)


def _known(shell: str | None) -> str:
    name = shell if shell is not None else Path(os.environ.get("SHELL", "")).name
    if name in SCRIPTS:
        return name
    said = f"forge does not complete in the shell {name!r}" if name else "$SHELL is not set"
    raise ConfigError(f"{said}; name one of {', '.join(SCRIPTS)}")


def _install(shell: str) -> None:
    home = Path.home()
    if shell == "fish":
        script, startup = (
            Path(os.environ.get("XDG_CONFIG_HOME", home / ".config")) / "fish/completions/forge.fish",
            None,
        )
    else:
        script = Path(os.environ.get("XDG_DATA_HOME", home / ".local/share")) / f"forge/completion.{shell}"
        startup = home / ".bashrc" if shell == "bash" else Path(os.environ.get("ZDOTDIR", home)) / ".zshrc"
    try:
        _write(script, SCRIPTS[shell])
        if startup is not None:
            _add_line(startup, f'source "{script}"  # forge --install-completion')
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}") from error
    click.echo("next: open a new terminal" + (f", or type: source {startup}" if startup else ""))


def _write(script: Path, text: str) -> None:
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(text, encoding="utf-8")
    click.echo(f"wrote {script}")


def _add_line(startup: Path, line: str) -> None:
    """At the end of a file that the shell reads when it starts, once."""
    there = startup.read_text(encoding="utf-8", errors="surrogateescape") if startup.exists() else ""
    if line in there.splitlines():
        click.echo(f"{startup} reads it already")
        return
    with startup.open("a", encoding="utf-8") as file:
        file.write(f"{'' if there.endswith(chr(10)) or not there else chr(10)}{line}\n")
    click.echo(f"added to {startup}: {line}")


def _complete(shell: str, ctx: click.Context) -> None:
    from forge_plugins_monitor.completion.words import words_at

    line = os.environ.get("COMP_LINE", "")
    forge = ctx.find_root().command
    assert isinstance(forge, click.Group)
    for word in words_at(line, forge, ctx.obj):
        if shell == "bash":
            breaks = re.escape(os.environ.get("COMP_WORDBREAKS", ""))
            typed = re.search(r"\S*$", line)[0]  # type: ignore[index]  # it matches the empty word, too
            kept = re.match(rf".*[{breaks}]|", typed)[0] if breaks else ""  # type: ignore[index]
            click.echo(word.text.removeprefix(kept) + ("" if word.is_open else " "))
        elif shell == "zsh":
            click.echo(f"{'open' if word.is_open else 'plain'}\t{word.text}\t{_short(word.about)}")
        else:
            click.echo(f"{word.text}\t{_short(word.about)}" if word.about else word.text)


def _short(about: str) -> str:
    """Its first sentence, in one line."""
    sentence = re.split(r"[.;:](?: |$)", " ".join(about.replace("`", "").split()))[0]
    return shorten(sentence, 70, placeholder=" …")
