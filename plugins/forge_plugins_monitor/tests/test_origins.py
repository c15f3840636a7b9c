"""``forge config --origins``: where each value of a job was written."""

from __future__ import annotations

import json
import re

import pytest

from forge_core.cli import main

BASE = """\
[model]
name = "transformer"
dim = 32
n_layers = 1
n_heads = 2

[optimizer]
name = "adamw"
lr = 1e-3
weight_decay = 0.5
"""
TOP = """\
extends = "base.toml"
callbacks = [
    {name = "health"},
    {name = "layer_norms", updates = true},
]
scheduler = "linear"

[data]
name = "text_files"
path = ["a",
  "b"]

[train]
steps = 5
seq_len = 8
batch_size = 1

[optimizer]
lr = 2e-3

[parallel.passes]
activation_checkpointing = true

[[optimizer.groups]]
pattern = "*norm*"
lr_scale = 0.1
"""


@pytest.fixture
def told(tmp_path, monkeypatch, capsys):
    """The places of values, by key."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.toml").write_text(BASE)
    (tmp_path / "c.toml").write_text(TOP)

    def ask(*settings: str) -> dict[str, str]:
        assert main(["config", "--origins", "c.toml", *settings]) == 0
        lines = [line.rsplit("  ", 1) for line in capsys.readouterr().out.splitlines()]
        return {said.partition(" = ")[0]: place.strip() for said, place in lines}

    return ask


def test_a_value_is_where_the_last_file_has_it(told):
    places = told()

    assert places["model.dim"] == "base.toml:3"
    assert places["optimizer.lr"] == "c.toml:19"
    assert places["optimizer.weight_decay"] == "base.toml:10"
    assert places["optimizer.name"] == "base.toml:8"
    assert places["optimizer.groups[0].lr_scale"] == "c.toml:26"
    assert places["data.path"] == "c.toml:10"
    assert places["callbacks[1].updates"].startswith("c.toml:")


def test_what_nobody_wrote_is_a_default_also_in_a_table_that_is_there(told):
    places = told()

    assert places["optimizer.eps"] == places["train.seed"] == places["run.name"] == "default"
    assert places["callbacks[0].interval"] == "default"
    assert places["parallel.passes.activation_checkpointing.mode"] == "default"


def test_a_name_alone_is_the_component(told):
    assert told()["scheduler.name"] == "c.toml:6"
    assert told("scheduler=constant")["scheduler.name"] == "scheduler=constant"


def test_a_setting_is_told_as_it_was_typed(told):
    places = told("--train.steps", "7", "optimizer.lr=5e-4", 'callbacks=[{name="health", interval=3}]')

    assert places["train.steps"] == "--train.steps 7"
    assert places["optimizer.lr"] == "optimizer.lr=5e-4"
    assert places["callbacks[0].interval"] == 'callbacks=[{name="health", interval=3}]'
    assert places["train.seq_len"] == "c.toml:15"


def test_the_text_of_a_plugin_file_is_where_its_name_is_and_short(told, tmp_path):
    words = "nothing, said at length. " * 20
    (tmp_path / "flat.py").write_text(
        f'"""{words}"""\nfrom forge_core.api import component\n\n\n@component("scheduler", summary="flat")\n'
        "def flat(*, total_steps: int):\n    return lambda step: 1.0\n"
    )
    setting = 'plugins.files=["flat.py"]'

    places = told(setting, "scheduler=flat")

    assert places["plugins.files.flat.py"] == setting
    assert places["scheduler.name"] == "scheduler=flat"


def test_a_section_that_a_setting_has_opened_has_defaults_all_the_same(told):
    places = told("--eval.interval=2", "data.validation=0.5")

    assert places["eval.interval"] == "--eval.interval=2"
    assert places["eval.batches"] == "default"


def test_every_key_is_there_that_forge_config_prints(told, capsys):
    keys = {word for key in told() for word in re.findall(r"[^.\[\]]+", key)}

    assert main(["config", "c.toml"]) == 0
    printed = {line.partition(" = ")[0] for line in capsys.readouterr().out.splitlines() if " = " in line}
    assert {key for key in printed if key.isidentifier()} <= keys


def test_json_has_files_lines_and_settings(told, capsys):
    told()
    assert main(["origins", "c.toml", "train.seed=3", "--json"]) == 0

    rows = {row.pop("key"): row for row in json.loads(capsys.readouterr().out)}
    assert rows["model.dim"] == {"value": 32, "origin": "file", "source": "base.toml", "line": 3}
    assert rows["train.seed"] == {"value": 3, "origin": "setting", "source": "train.seed=3", "line": None}
    assert rows["optimizer.eps"]["origin"] == "default"


def test_a_wrong_job_is_refused_as_ever(told, capsys):
    assert main(["config", "--origins", "c.toml", "train.stepz=3"]) == 2
    assert "train.stepz" in capsys.readouterr().err


def test_without_the_package_it_says_what_is_missing(told, capsys):
    assert main(["--disable-plugin", "forge-plugins-monitor", "config", "--origins", "c.toml"]) == 2
    assert "the command 'origins' is in forge-plugins-monitor" in capsys.readouterr().err
