"""What ``forge`` prints, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from forge_core.cli import main
from forge_core.errors import nearest

PLUGIN = """
    from forge_core.api import Command, Component, hookimpl

    @hookimpl
    def forge_commands():
        yield Command(name="acme", summary="what acme does", run="acme.commands:group")

    @hookimpl
    def forge_optimizers():
        yield Component(
            name="acme_sgd", aliases=["plain"], deprecated="use 'lion'", modules=["no_such_module"],
            summary="follows the gradient", factory="acme.sgd:make", config="acme.config:SgdConfig",
        )
"""
COMMANDS = """
    import click
    from forge_core.errors import ConfigError, NonFiniteError

    @click.group()
    def group():
        "Ends in many ways."

    @group.command()
    @click.argument("rest", nargs=-1)
    def say(rest):
        click.echo("|".join(rest))

    @group.command()
    @click.argument("how")
    @click.pass_context
    def end(ctx, how):
        if how == "mistake":
            raise ConfigError("optimizer.lr: must be positive, got -1.0")
        if how == "nan":
            raise NonFiniteError("the loss is nan")
        if how == "bug":
            error = ZeroDivisionError("division by zero")
            error.add_note("callback acme:probe raised this")
            raise error
        if how == "exit":
            ctx.exit(3)
        if how == "return":
            return 5
        if how == "eof":
            raise EOFError("Ran out of input")
        if how == "debug":
            click.echo(ctx.obj.debug)
"""
CONFIG = '''
    from pathlib import Path
    from typing import Annotated, Literal

    import attrs
    from forge_core.api import Slot, Use


    @attrs.frozen(kw_only=True)
    class Base:
        lr: float
        """Base learning
        rate."""


    @attrs.frozen(kw_only=True)
    class SgdConfig(Base):
        momentum: float | None = None
        """Heavy ball."""
        nesterov: bool = False
        mode: Literal["a", "b"] = "a"
        steps: tuple[int, ...] = (1, 2)
        where: Path = Path("x")
        router: Annotated[Use | None, Slot("router")] = None
        tokens: Annotated[Use, Slot("tokenizer", default="bytes")]
'''


@pytest.fixture
def acme(make_distribution):
    files = {"acme/plugin.py": PLUGIN, "acme/commands.py": COMMANDS, "acme/config.py": CONFIG}
    return make_distribution("acme", "0.3", files)


def test_help_lists_all_commands_and_imports_none(acme, capsys):
    assert main(["--help"]) == 0

    shown = capsys.readouterr().out
    assert "train what a TOML file describes" in shown
    assert "what acme does  [acme]" in shown
    assert "acme.commands" not in sys.modules


def test_a_plugins_command_runs(acme, capsys):
    assert main(["acme", "say", "a", "b"]) == 0
    assert capsys.readouterr().out == "a|b\n"


@pytest.mark.parametrize(
    ("how", "code", "shown"),
    [
        ("mistake", 2, "error: optimizer.lr: must be positive, got -1.0\n"),
        ("nan", 4, "error: the loss is nan\n"),
        (
            "bug",
            1,
            """error: ZeroDivisionError: division by zero
callback acme:probe raised this
at {folder}/acme/commands.py:25, in end
re-run with --debug for the traceback; it is a bug in Forge or in a plugin
""",
        ),
        ("exit", 3, ""),
        ("return", 5, ""),
    ],
)
def test_the_exit_code_and_one_sentence_tell_how_a_command_ended(acme, capsys, how, code, shown):
    assert main(["acme", "end", how]) == code
    assert capsys.readouterr().err == shown.format(folder=acme)


def test_an_end_of_file_in_a_command_is_not_mistaken_for_an_interrupt(acme, capsys):
    assert main(["acme", "end", "eof"]) == 1
    assert "error: EOFError: Ran out of input" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--debug", "acme", "end", "bug"], ["acme", "end", "bug", "--debug"]])
def test_debug_shows_the_traceback_wherever_it_stands(acme, capsys, arguments):
    assert main(arguments) == 1

    shown = capsys.readouterr().err
    assert "Traceback (most recent call last)" in shown
    assert "re-run with --debug" not in shown


def test_debug_after_a_double_dash_belongs_to_the_command(acme, capsys):
    assert main(["acme", "say", "--debug", "--", "--debug", "x"]) == 0
    assert capsys.readouterr().out == "--debug|x\n"


def test_an_unknown_command_gets_the_nearest_one(capsys):
    assert main(["plugns"]) == 2
    assert "there is no command 'plugns'. Did you mean 'plugins'?" in capsys.readouterr().err


def test_a_published_command_that_is_not_there_says_how_to_get_it(capsys):
    assert main(["--disable-plugin", "forge-plugins-data", "data"]) == 2
    assert "the command 'data' is in forge-plugins-data, which was not imported" in capsys.readouterr().err


def test_a_usage_error_of_a_command_is_2(acme, capsys):
    assert main(["acme", "end"]) == 2
    assert "Missing argument 'HOW'" in capsys.readouterr().err


def test_a_command_that_cannot_be_imported_is_its_plugins_bug(make_distribution, capsys):
    make_distribution("acme", files={"acme/plugin.py": PLUGIN, "acme/commands.py": "import no_such_module"})

    assert main(["acme"]) == 2
    assert capsys.readouterr().err == (
        "error: acme: cannot import the command 'acme' 'acme.commands:group' (ModuleNotFoundError: No module named "
        "'no_such_module'). This is a bug in acme.\n"
    )


def test_a_disabled_plugin_has_no_command(acme, capsys):
    assert main(["--disable-plugin", "ACME", "acme"]) == 2
    assert "note: acme 0.3 was not imported (it was switched off)" in capsys.readouterr().err


def test_disabling_a_plugin_that_is_not_there_is_an_error(acme, capsys):
    assert main(["--disable-plugin", "acne", "plugins"]) == 2
    assert "no plugin of that name is installed. Did you mean 'acme'?" in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["config"], ["plugins", "show"], ["acme", "say"]], ids=" ".join)
def test_h_is_short_for_help(acme, command, capsys):
    assert main([*command, "--help"]) == 0
    long = capsys.readouterr().out

    assert main([*command, "-h"]) == 0
    assert capsys.readouterr().out == long
    assert "-h, --help" in long


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_version_names_core_python_torch_and_plugins(acme, capsys, option):
    assert main([option]) == 0

    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("forge-core 0.1.0 (plugin API 1.5), Python 3.")
    assert "torch 2." in first
    assert second.startswith("plugins: ")
    assert "acme-0.3" in second


def test_plugins_shows_status_reason_and_conflicts(acme, make_distribution, capsys):
    make_distribution("beta", files={"beta/plugin.py": PLUGIN})
    make_distribution("zz-broken", "0.1", {"zz_broken/plugin.py": "import no_such_module"})

    assert main(["plugins"]) == 1

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["PLUGIN", "VERSION", "STATUS", "IMPORT", "PROVIDES"]
    acme_line = next(line for line in lines if line.startswith("acme"))
    assert acme_line.split()[1:3] == ["0.3", "ok"]
    assert acme_line.endswith("optimizer:acme_sgd, command:acme")
    place = next(index for index, line in enumerate(lines) if line.startswith("zz-broken"))
    assert lines[place + 1].strip() == "└ ModuleNotFoundError: No module named 'no_such_module'"
    assert "conflict: command 'acme' is provided by acme and beta; --disable-plugin beta leaves the other" in lines
    assert any(line.startswith("conflict: optimizer 'plain' is provided by acme and beta; write") for line in lines)


def test_plugins_shows_the_traceback_one_flag_away(make_distribution, capsys):
    make_distribution("zz-broken", "0.1", {"zz_broken/plugin.py": "import no_such_module"})

    assert main(["plugins", "--debug"]) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().out


def test_plugins_warns_of_heavy_imports(make_distribution, capsys):
    make_distribution("acme", files={"acme/plugin.py": "import jax", "jax/core.py": ""})

    main(["plugins"])
    expected = "warning: importing acme also imports jax: every forge command waits for it"
    assert expected in capsys.readouterr().out.splitlines()


def test_plugins_as_json(acme, capsys):
    main(["plugins", "--json"])

    shown = json.loads(capsys.readouterr().out)
    found = next(plugin for plugin in shown["plugins"] if plugin["distribution"] == "acme")
    assert (shown["api"], found["version"], found["status"]) == ("1.5", "0.3", "ok")
    assert found["components"][0]["kind"] == "optimizer"
    assert found["components"][0]["aliases"] == ["plain"]
    assert found["commands"][0]["name"] == "acme"


def test_plugins_of_one_kind(acme, capsys):
    main(["plugins", "--kind", "optimizer"])
    assert any(line.split()[:3] == ["acme_sgd", "acme", "0.3"] for line in capsys.readouterr().out.splitlines())

    main(["plugins", "--kind", "optimizer", "--json"])
    assert "acme_sgd" in [one["name"] for one in json.loads(capsys.readouterr().out)]

    assert main(["plugins", "--kind", "optimiser"]) == 2


def test_plugins_show_prints_the_keys_of_a_component(acme, capsys):
    assert main(["plugins", "show", "optimizer", "plain"]) == 0

    head, _, table = capsys.readouterr().out.partition("\n\n")
    assert head.splitlines() == [
        "optimizer acme_sgd: follows the gradient",
        "provided by acme 0.3, built by acme.sgd:make",
        "also called plain",
        "'acme_sgd' of acme 0.3 is deprecated: use 'lion'",
        "needs the module no_such_module, which is not installed",
    ]
    rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in table.splitlines()]
    assert rows == [
        ["KEY", "TYPE", "DEFAULT"],
        ["lr", "number", "required", "Base learning rate."],
        ["momentum", "number", "unset", "Heavy ball."],
        ["nesterov", "true or false", "false"],
        ["mode", '"a" or "b"', '"a"'],
        ["steps", "array of integers", "[1, 2]"],
        ["where", "path", '"x"'],
        ["router", "router", "unset"],
        ["tokens", "tokenizer", '"bytes"'],
    ]


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ('size: "Unknown" = 1', "NameError: name 'Unknown' is not defined"),
        ("size: int = attrs.field(factory=lambda: [][0])", "IndexError: list index out of range"),
    ],
)
def test_plugins_show_says_whose_bug_it_is_that_keys_cannot_be_read(make_distribution, capsys, keys, error):
    config = f"import attrs\n\n@attrs.frozen(kw_only=True)\nclass SgdConfig:\n    {keys}\n"
    make_distribution("acme", "0.3", {"acme/plugin.py": PLUGIN, "acme/config.py": config})

    assert main(["plugins", "show", "optimizer", "plain"]) == 2

    why = f"error: acme 0.3: the keys of 'acme.config:SgdConfig' cannot be read ({error}). This is a bug in acme.\n"
    assert capsys.readouterr().err == why


def test_the_nearest_value_of_an_option_is_named(capsys):
    for written, hint in (
        ("hf", "Did you mean 'huggingface'?"),
        ("huggingfce", "Did you mean 'huggingface'?"),
        ("zz", ""),
    ):
        assert main(["convert", "x", "--to", written, "--out", "y"]) == 2
        said = capsys.readouterr().err
        assert f"'{written}' is not one of 'forge', 'huggingface', 'peft'." in said
        assert ("Did you mean" in said) is bool(hint)
        assert hint in said


def test_an_abbreviation_means_the_only_name_that_it_can():
    assert nearest("lr", ["learning_rate", "dim"]) == "learning_rate"
    assert nearest("ps", ["precision", "passes"]) is None
    assert nearest("rl", ["learning_rate"]) is None


def test_an_interrupt_ends_with_130(make_distribution):
    waiting = """
        import click, time

        @click.command()
        def group():
            print("waiting", flush=True)
            time.sleep(60)
    """
    site = make_distribution("acme", files={"acme/plugin.py": PLUGIN, "acme/commands.py": waiting})

    process = subprocess.Popen(
        [sys.executable, "-m", "forge_core", "acme"],
        env={**os.environ, "PYTHONPATH": str(site)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout.readline() == "waiting\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, shown = process.communicate(timeout=200)

    assert process.returncode == 130
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("end", "code", "shown"),
    [
        ("return 0", 0, "running\nat exit\n"),
        ("sys.exit(3)", 3, "running\nat exit\n"),
        ("raise LostPeerError('rank 1 is gone')", 5, "running\n"),
    ],
)
def test_a_process_ends_with_its_exit_code_and_without_unloading_torch(make_distribution, end, code, shown):
    """The threads of a group that was given up for lost may abort the process in the teardown of the interpreter; so
    does what this module holds."""
    aborting = f"""
        import atexit, os, sys
        import click, torch
        from forge_core.errors import LostPeerError

        class Threads:
            def __del__(self):
                os.abort()

        @click.command()
        def group():
            global threads
            threads = Threads()
            atexit.register(print, "at exit")
            print("running")
            {end}
    """
    site = make_distribution("acme", files={"acme/plugin.py": PLUGIN, "acme/commands.py": aborting})

    process = subprocess.run(
        [sys.executable, "-m", "forge_core", "acme"],
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert (process.returncode, process.stdout) == (code, shown), process.stderr


@pytest.mark.parametrize("arguments", [["show", "parallel_pass", "fsdp"], ["--kind", "router"], []])
def test_what_there_is_wraps_at_the_width_of_the_terminal(monkeypatch, capsys, arguments):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")

    assert main(["plugins", *arguments]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 100] == []
    assert len(lines) > 5
