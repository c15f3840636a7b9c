"""``forge validate`` and ``forge config``, with the sample catalog."""

from __future__ import annotations

import json
import tomllib
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

from forge_core.cli import main
from forge_core.commands.config import config
from forge_core.commands.validate import validate
from forge_core.errors import ConfigError

AS_FORGE = {"help_option_names": ["-h", "--help"]}
"""A command keeps the option of help that it had first; without this, tests after these would find no ``-h``."""


@pytest.fixture
def forge(write, catalog):
    write()
    obj = SimpleNamespace(catalog=lambda disable=(): catalog, debug=False)

    def forge(command: click.Command, *arguments: str) -> str:
        result = CliRunner().invoke(command, arguments, obj=obj, catch_exceptions=False, **AS_FORGE)
        assert result.exit_code == 0, result.output
        return result.output

    return forge


def test_validate_says_in_a_line_what_would_be_trained(forge):
    assert forge(validate, "job.toml") == (
        "job.toml is valid: decoder on text, adamw with constant; "
        "10 steps of 8 × 128 tokens per microbatch and data-parallel rank; passes: none\n"
    )
    assert "10 steps of 32 × 128 tokens on 4 ranks; passes: fsdp" in forge(validate, "job.toml", "--world-size", "4")
    assert "; 1 step of 8 × 128 tokens" in forge(validate, "job.toml", "train.steps=1")


def test_validate_notes_deprecated_components(forge):
    assert "note: optimizer: 'adam-w' of standard 1.0" in forge(
        validate, "job.toml", "optimizer.name=adam-w", "optimizer.lr=1"
    )


@pytest.mark.parametrize("command", [validate, config])
def test_settings_work_in_all_spellings(forge, command):
    forge(command, "job.toml", "--train.steps", "20", "optimizer.lr=1e-3", "--run.name=x", "--train.clip_norm", "0")


@pytest.mark.parametrize("command", [validate, config])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["job.toml", "--wrld-size", "8"], "--wrld-size 8: is neither an option nor a section; did you mean '--world-"),
        (["job.toml", "--train.steps"], "--train.steps: needs a value"),
        (["job.toml", "--train.steps", "--optimizer.lr=1"], "--train.steps: needs a value"),
        (["job.toml", "--optimizer.lr", "-1"], "optimizer.lr: must be greater than 0, got -1.0"),
        (["nope.toml"], "nope.toml: there is no such file"),
        (["--train.steps=3", "job.toml"], "the configuration file comes first"),
    ],
)
def test_mistakes_are_config_errors(forge, command, arguments, message):
    with pytest.raises(ConfigError) as caught:
        forge(command, *arguments)

    assert message in str(caught.value)


def test_config_prints_the_resolved_job_which_resolves_to_itself(forge, write):
    printed = forge(config, "job.toml", "optimizer.lr=2")

    assert tomllib.loads(printed)["optimizer"]["lr"] == 2.0
    write(printed, "again.toml")
    assert forge(config, "again.toml") == printed


def test_config_prints_the_schema_of_the_command_schema_without_a_file(capsys):
    assert main(["config", "--schema"]) == main(["schema"]) == 0
    short, long = capsys.readouterr().out.split("\n}\n{\n")
    assert f"{short}\n}}" == f"{{\n{long}".rstrip()
    assert json.loads(f"{short}\n}}")["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_config_prints_what_differs(forge, write):
    write(name="other.toml").write_text(
        'extends = "job.toml"\nrun.name = "job"\noptimizer.lr = 1\nmodel.window = 3\nparallel.passes.compile = false\n'
    )

    assert forge(config, "--diff", "job.toml", "other.toml").splitlines() == [
        "~ optimizer.lr: 0.001 -> 1.0",
        "- parallel.passes: {}",
        "+ model.window: 3",
        "+ parallel.passes.compile: false",
    ]
    assert (
        forge(config, "--diff", "job.toml", "job.toml", "train.steps=3") == "job.toml and job.toml are the same job\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "Missing argument 'CONFIG'"), (["--schema", "job.toml"], "takes no file or setting")],
)
def test_config_says_what_it_needs(catalog, arguments, message):
    result = CliRunner().invoke(config, arguments, obj=SimpleNamespace(catalog=lambda disable=(): catalog), **AS_FORGE)

    assert result.exit_code == 2
    assert message in result.output
