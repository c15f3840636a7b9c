"""What the reference says of commands, events, metrics and files is what there is."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import ModuleType

import attrs
import click
import pytest

from doc_pages import DOCS, ROOT, type_in, write_text
from forge_core.cli import CORE_COMMANDS, forge, main
from forge_core.commands.config import config
from forge_core.commands.invocation import Invocation, load_command
from forge_core.errors import ExitCode
from forge_core.registry.discovery import discover
from forge_testing.json_output import json_option_of, printed_type

RUNNING = (DOCS / "running.md").read_text(encoding="utf-8")
JOB = """
[model]
name = "transformer"
dim = 32
n_layers = 2
n_heads = 2
max_seq_len = 32
num_experts = 4

[model.moe.router]
name = "softmax_topk"

[data]
name = "mixture"

[[data.sources]]
name = "ones"
weight = 0.5
source = { name = "text_files", path = "corpus", pattern = "**/1*.txt", validation = 0.2 }

[[data.sources]]
name = "twos"
weight = 0.5
source = { name = "text_files", path = "corpus", pattern = "**/2*.txt", validation = 0.2 }

[train]
steps = 24
seq_len = 32
batch_size = 2
precision = "fp32"

[optimizer]
name = "adamw"
lr = 1e-3

[eval]
interval = 12

[checkpoint]
interval = 12

[metrics]
interval = 2

[[evaluations]]
name = "accuracy"

[[callbacks]]
name = "layer_norms"

[[callbacks]]
name = "activation_norms"
interval = 6

[[callbacks]]
name = "curve_extrapolation"
interval = 2
skip = 2

[[callbacks]]
name = "experts"

[[callbacks]]
name = "profile"
start = 3
"""


@pytest.fixture(scope="module")
def module() -> dict[str, ModuleType]:
    """The modules of the docs that write the reference."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        return {
            name: importlib.import_module(name) for name in ("command_reference", "event_reference", "json_reference")
        }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with much that reports, and its directory."""
    folder = tmp_path_factory.mktemp("reports")
    write_text(folder)
    (folder / "much.toml").write_text(JOB)
    code, said = type_in("forge run much.toml", folder)
    assert code == 0, said
    return folder / "runs/much"


def table(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading."""
    below = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [
        [cell.strip() for cell in line.strip("| ").split(" | ")] for line in re.findall(r"^\| .*$", below, re.M)[1:]
    ]


def patterns(cells: list[str]) -> list[str]:
    """The names in code, ``<…>`` for anything."""
    names = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    return [
        "".join(".+" if part.startswith("<") else re.escape(part) for part in re.split(r"(<\w+>)", name))
        for name in names
    ]


# -- commands


@pytest.fixture(scope="module")
def commands() -> dict[str, click.Command]:
    """Every command and sub-command by its words, as the command line finds them, in their order."""
    found: dict[str, click.Command] = {}

    def look(words: str, group: click.Group, context: click.Context) -> None:
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None, name
            found[f"{words} {name}"] = command
            if isinstance(command, click.Group):
                look(f"{words} {name}", command, context)

    look("forge", forge, click.Context(forge, obj=Invocation()))
    return {words: found[words] for words in sorted(found, key=str.split)}


def test_every_command_and_option_is_in_the_reference(module, commands):
    page = "\n".join(module["command_reference"].command_reference(discover()))
    sections = dict(re.findall(r"^##+ `(forge [^`]*)`\n(.*?)(?=^##|\Z)", page, re.M | re.S))

    assert len(commands) > 40
    assert {"forge data inspect", "forge vlm generate"} <= commands.keys()  # the second is imported when it is called
    assert sections.keys() == commands.keys()
    for name, command in commands.items():
        for option in (one for one in command.params if isinstance(one, click.Option) and not one.hidden):
            assert all(re.search(rf"^\| `.*{re.escape(word)}\b", sections[name], re.M) for word in option.opts), (
                name,
                option.opts,
            )


def test_every_key_of_what_a_command_prints_as_json_is_in_the_reference(module, commands):
    reference = module["json_reference"]
    page = "\n".join(reference.json_reference(discover()))
    sections = dict(re.findall(r"^## `(forge [^`]*) --json`\n(.*?)(?=^## |\Z)", page, re.M | re.S))
    options = {name: option for name, one in commands.items() if (option := json_option_of(one))}

    assert len(options) > 25
    assert [*sections] == [*options]
    for name, option in options.items():
        for cls in reference.printed_classes(printed_type(option)):
            assert f"**`{cls.__name__}`**: {cls.__doc__.split(chr(10))[0][:40]}" in sections[name]
            assert cls.__doc__ != "Method generated by attrs for class."
            for field in attrs.fields(cls):
                assert f"\n| `{field.name}` | " in sections[name], (cls, field.name)
    assert (
        "| `kept_by` | an array, of each: a string; or null | Keys of ``[checkpoint]``"
        in sections["forge checkpoint list"]
    )
    assert "\nOn each line: `StepFacts`.\n" in sections["forge data seen"]


def test_options_in_the_text_of_a_command_are_code(module):
    """A dash alone would become a long one, and a star emphasis."""
    escaped = module["command_reference"]._escaped

    assert escaped("with --section.key=value, *, <x> or -f") == r"with `--section.key`=value, \*, \<x\> or `-f`"


def test_writing_the_reference_leaves_the_commands_as_they_are(module, capsys, monkeypatch):
    monkeypatch.setattr(config, "_help_option", None)  # click keeps the one that a test without `forge` has made
    list(module["command_reference"].command_reference(discover()))

    assert main(["config", "-h"]) == 0
    assert "-h, --help" in capsys.readouterr().out


def test_every_exit_code_is_in_the_reference_and_on_the_page_about_running(module):
    page = "\n".join(module["command_reference"].command_reference(discover()))

    for code in ExitCode:
        assert f"\n| {code.value} | " in page
        assert f"\n| {code.value} | " in RUNNING
    assert set(module["command_reference"].RUN) == set(ExitCode)


def test_what_a_command_says_of_its_exit_codes_is_found(module):
    found = {}
    for command in CORE_COMMANDS:
        loaded = load_command(command, "forge-core")
        found[command.name] = module["command_reference"].exit_codes_of(loaded)

    assert found["run"].startswith("Exit codes: 0 reached its end, 1 unexpected")
    assert found["plugins"] == "The exit code is 1 if any plugin is broken or incompatible."
    assert found["config"] == ""


# -- events


def test_every_event_that_the_code_writes_is_in_the_table_with_its_fields(module):
    described = module["event_reference"].described_events()
    written = module["event_reference"].written_events()

    assert {event.name for event in written} == set(described)
    for event in written:
        assert set(event.fields) <= set(re.findall(r"`(\w+)`", described[event.name][1])), event


def test_the_outcomes_of_a_start_are_those_that_the_source_assigns(module):
    source = (ROOT / "forge_core/run/run.py").read_text(encoding="utf-8")
    assigned = set(re.findall(r'"(\w+)"', "\n".join(re.findall(r"^ *outcome(?:: str|, why)? = .*$", source, re.M))))

    assert assigned - {"reason"} == set(module["event_reference"].OUTCOMES)


@pytest.mark.slow
def test_the_events_of_a_run_have_the_fields_of_the_table(module, run):
    described = module["event_reference"].described_events()
    events = [json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()]

    assert [event["event"] for event in events] == ["started", "saved", "saved", "completed"]
    for event in events:
        fields = set(re.findall(r"`(\w+)`", described[event["event"]][1]))
        assert set(event) == fields | {"time", "event", "step"}


# -- metrics and files


@pytest.mark.slow
def test_every_metric_of_a_run_is_in_a_table(run):
    moe = (DOCS / "moe.md").read_text(encoding="utf-8")
    known = patterns([cells[0] for cells in table(RUNNING, "Metrics")])
    known += [rf"{one}/blocks\..+" for one in patterns([cells[0] for cells in table(moe, "What is reported")])]
    logged = {
        key for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines() for key in json.loads(line)
    }

    assert {"loss/ones", "update_ratio/embed", "eval/accuracy/accuracy", "load_entropy/blocks.1.feed_forward"} <= logged
    assert sorted(key for key in logged if not any(re.fullmatch(one, key) for one in known)) == []


@pytest.mark.slow
def test_every_file_of_a_run_is_in_the_table(run):
    known = [name.rstrip("/") for name in patterns([cells[0] for cells in table(RUNNING, "The run's directory")])]
    files = [path for path in run.iterdir() if path.name != "checkpoints"]

    assert len(files) >= 7
    assert sorted(path.name for path in files if path.name not in {one.replace("\\", "") for one in known}) == []


# -- the drawing of what happens to a batch


def test_the_files_in_the_drawing_of_a_batch_are_there():
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    drawing = page.split("\n## What happens to a batch\n")[1].split("\n## ")[0]
    files = re.findall(r"(\w+/\w+\.py)$", drawing, re.M)

    assert len(files) > 12
    assert [name for name in files if not (ROOT / "forge_core" / name).exists()] == []
