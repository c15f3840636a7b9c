"""Every command that tells something tells it to programs, too: ``--json``, and what its class says."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import click
import numpy as np
import pytest

from forge_core.cli import forge, main
from forge_core.commands.invocation import Invocation
from forge_core.commands.json_output import JsonOption, print_json
from forge_core.config.sections import TrainSection
from forge_testing.json_output import check_json, json_of, json_option_of, misfits

ROOT = Path(__file__).resolve().parents[2]

WITHOUT = {
    "run": "trains, and writes metrics.jsonl and events.jsonl",
    "replicas": "starts runs, which write these",
    "schema": "prints JSON as it is",
    "completion": "prints a script for a shell",
    "new": "writes a package",
    "report": "writes a page; forge runs and eval have its numbers",
    "convert": "writes a checkpoint or a folder",
    "extract": "writes a store, whose manifest is JSON",
    "autoencoder export": "writes files of others",
    "autoencoder features": "writes a page, with numbers as .csv",
    "data prepare": "writes a folder, of which forge data inspect tells",
    "moe heat-map": "draws",
    "moe upcycle": "writes a checkpoint",
    "store export": "writes files of others",
    "vlm inspect": "writes a page",
    "vlm prepare-coco": "writes files",
    "vlm shapes": "draws",
    "vlm words": "draws",
    "vlm upcycle": "writes a checkpoint",
}
"""Commands without ``--json``, and why."""

CASES = {
    "checkpoint fetch": ["file://$RUN", "--to", "$FETCHED"],
    "checkpoint list": ["$RUN"],
    "checkpoint prune": ["$RUN", "--keep-last", "1", "--dry-run"],
    "checkpoint show": ["$RUN"],
    "checkpoint verify": ["$RUN"],
    "config": ["$CONFIG"],
    "data inspect": ["$CONFIG"],
    "data seen": ["$RUN", "--steps", "1..2", "--show", "1"],
    "docs": [],
    "eval": ["$RUN", "--evaluation", "accuracy", "--samples", "4"],
    "explain": ["$RUN"],
    "generate": ["$RUN", "--prompt", "line 1", "--prompt", "line 2", "--max-new-tokens", "3"],
    "origins": ["$CONFIG", "train.seed=3"],
    "plan": ["$CONFIG", "--world-size", "1", "--gpu", "h100", "--ettr"],
    "plot-schedule": ["$CONFIG", "--width", "10"],
    "plugins": [],
    "runs": ["$RUN"],
    "show": ["parallel_pass", "tensor_parallel"],
    "validate": ["$CONFIG"],
    "sites": ["$RUN"],
    "attention": ["$RUN", "--prompt", "line 5", "--layers", "0"],
    "compare": ["$STORE", "$STORE"],
    "lens": ["$RUN", "--prompt", "line 5"],
    "patch": ["$RUN", "--clean", "line 5", "--corrupt", "lime 5", "--answers", "a,b"],
    "probe": ["$STORE", "--column", "kind"],
    "store spectrum": ["$STORE", "--ranks", "1-9"],
    "score": ["$STORE", "$RECORDINGS", "--null", "2"],
    "trace": ["--compare", "$TRACE", "$TRACE"],
}
"""What each command is given."""
MORE = (
    ("config", ["--diff", "$CONFIG", "$RUN/job.toml"]),
    ("data inspect", ["$PREPARED", "--verify"]),
    ("docs", ["running"]),
    ("lens", ["$RUN", "--prompt", "line 5", "--attribute", "e", "--heads"]),
    ("plan", ["$CONFIG", "--world-size", "2"]),
    ("plugins", ["--kind", "parallel_pass"]),
    ("runs", ["$RUN/.."]),
    ("score", ["$STORE", "$RECORDINGS", "--method", "banded_ridge", "--draws", "5"]),
)
"""Other shapes that some of them print."""
ELSEWHERE = {
    "autoencoder recover": "forge_plugins_interp/tests/test_activations_of.py",
    "coordinate-check": "plugins/forge_plugins_studies/tests/test_coordinate_check.py",
    "doctor": "tests/test_doctor.py",
    "submit": "plugins/forge_plugins_slurm/tests/test_submit.py",
    "sweep": "plugins/forge_plugins_studies/tests/test_sweep.py",
    "vlm generate": "forge_plugins_vlm/tests/test_runs.py",
}
"""Commands that need what only other tests have, or seconds."""


def commands() -> dict[str, click.Command]:
    """Every command by its words; a group is one, if it does something alone."""
    found: dict[str, click.Command] = {}

    def look(words: str, command: click.Command, context: click.Context) -> None:
        if not isinstance(command, click.Group) or (words and command.invoke_without_command):
            found[words] = command
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                inner = command.get_command(context, name)
                assert inner is not None
                look(f"{words} {name}".strip(), inner, context)

    look("", forge, click.Context(forge, obj=Invocation()))
    return found


@pytest.fixture(scope="module")
def things(shared_tiny, tmp_path_factory) -> dict[str, str]:
    """What stands for the words with a dollar."""
    folder = tmp_path_factory.mktemp("told")
    shared_tiny.completed("run.name=told", "checkpoint.interval=5", "eval.interval=5")
    run = shared_tiny.path("told")
    sentences = "\n".join(["stimulus_id,sentence,kind", *(f"s{n},line {n} of file {n % 3},{n % 2}" for n in range(30))])
    (folder / "sentences.csv").write_text(sentences)
    extracted = ["extract", str(run), "--sites", "blocks.*.resid_post", "--reduce", "last", "--out", f"{folder}/store"]
    assert main([*extracted, "--stimuli", f"{folder}/sentences.csv", "--column", "sentence"]) == 0
    ids = np.array([f"s{n}" for n in range(30)])
    values = np.random.default_rng(0).normal(size=(len(ids), 2, 3))
    np.savez(folder / "brain.npz", values=values, stimulus_id=ids, neuroid_id=["a", "b", "c"])
    prepared = ["data", "prepare", str(shared_tiny.folder / "text"), "--output", f"{folder}/tokens", "--workers", "1"]
    assert main(prepared) == 0
    assert main(["trace", str(shared_tiny.config), "--steps", "1", "--out", f"{folder}/trace"]) == 0
    return {
        "$RUN": str(run),
        "$FETCHED": str(folder / "fetched"),
        "$CONFIG": str(shared_tiny.config),
        "$STORE": str(folder / "store"),
        "$RECORDINGS": str(folder / "brain.npz"),
        "$PREPARED": str(folder / "tokens"),
        "$TRACE": str(folder / "trace"),
    }


def test_a_command_without_json_has_a_reason():
    assert {words for words, one in commands().items() if json_option_of(one) is None} == set(WITHOUT)


def test_what_each_command_prints_is_tried():
    told = {words for words, one in commands().items() if json_option_of(one) is not None}

    assert told == {*CASES, *ELSEWHERE}
    for words, file in ELSEWHERE.items():
        called = ", ".join(f'"{word}"' for word in words.split())
        text = (ROOT / file).read_text(encoding="utf-8")
        assert f"json_of({called}" in text or f"grid = [{called}" in text, words


@pytest.mark.parametrize(("words", "arguments"), [*CASES.items(), *MORE])
def test_what_a_command_prints_is_what_its_class_says(words, arguments, things):
    for name, thing in things.items():
        arguments = [word.replace(name, thing) for word in arguments]

    found = json_of(*words.split(), *arguments)

    assert found or words == "config"


def test_problems_of_a_configuration_are_told_with_their_places(shared_tiny, capsys):
    wrong = shared_tiny.folder / "wrong.toml"
    wrong.write_text(shared_tiny.config.read_text().replace("steps = 10", "stepz = 10"))

    told = json_of("validate", str(wrong), "optimizer.lr=fast", code=2)

    assert not told["valid"]
    misspelt, text = told["problems"]
    line = 1 + wrong.read_text().splitlines().index("stepz = 10")
    assert {**misspelt, "message": ""} == {
        "file": str(wrong),
        "line": line,
        "setting": None,
        "key": "train.stepz",
        "message": "",
        "nearest": "steps",
        "allowed": {"enum": [field.name for field in attrs.fields(TrainSection)]},
    }
    assert text["nearest"] is None
    assert text["allowed"] == {"type": "number"}
    assert (text["file"], text["line"], text["setting"]) == (None, None, "optimizer.lr=fast")
    assert text["message"].startswith("expected a number")
    assert "train.stepz: unknown key" in capsys.readouterr().err

    told = json_of("validate", "nowhere.toml", code=2)
    assert "there is no such file" in told["problems"][0]["message"]


@pytest.mark.parametrize(
    ("setting", "allowed"),
    [
        ("train.steps=0", {"exclusiveMinimum": 0}),
        ("checkpoint.keep_last=0", {"minimum": 1}),
        ("checkpoint.keep_last=[]", {"type": "integer"}),
        ('data.shuffle="yes"', {"type": "boolean"}),
        ("train.clip_norm=[1]", {"type": "number"}),
        ("checkpoint.best_is=median", {"enum": ["lowest", "highest"]}),
        ('plugins.disable=["acme"]', "forge-plugins-optim"),
        ("optimizer.name=adamx", "adamw"),
        ("optimizer.name=5", "adamw"),
        ("optimizer.betaz=[0.9,0.95]", "betas"),
        ("optimizer.betas=[0.9]", {"type": "array", "minItems": 2, "maxItems": 2}),
        ("parallel.passes.fsdq=false", "fsdp"),
        ("steps=3", "train"),
        ("train.global_batch_size=7", None),
    ],
)
def test_a_problem_says_in_data_what_is_allowed(setting, allowed, shared_tiny):
    """One name stands for a list of many."""
    (problem,) = json_of("validate", str(shared_tiny.config), setting, "--world-size", "2", code=2)["problems"]

    found = problem["allowed"]
    assert allowed in found["enum"] if isinstance(allowed, str) else found == allowed


@attrs.frozen
class Told:
    """What is told here."""

    where: Path
    how_many: int
    value: float
    names: tuple[str, ...] = ()


def test_what_json_has_not_is_null_or_text(capsys):
    print_json([Told(Path("ftp://user:secret@host/x"), 1, float("nan"))], indent=None)

    (read,) = check_json(capsys.readouterr().out, JsonOption(["--json"], prints=list[Told], lines=False))
    assert read == {"where": "ftp:/user:secret@host/x", "how_many": 1, "value": None, "names": []}

    print_json({"url": "ftp://user:secret@host/x\x1b"})
    assert json.loads(capsys.readouterr().out) == {"url": "ftp://user:***@host/x\x1b"}


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        ({"where": "a", "how_many": 1, "value": 0.5, "names": ["x"]}, []),
        ({"where": "a", "how_many": True, "value": 1, "names": []}, [".how_many is True, not int"]),
        (
            {"where": 1, "how_many": 1, "value": None, "names": {}},
            [".names is {}, not an array", ".where is 1, not Path"],
        ),
        ({"how_many": 1, "value": "1", "names": []}, [".value is '1', not float", ".where is missing"]),
        (
            {"where": "a", "how_many": 1, "value": 1, "names": [1], "b": 1},
            [".b is not declared in Told", ".names[0] is 1, not str"],
        ),
        ([], ["it is [], not an object of Told"]),
    ],
)
def test_what_differs_from_the_class_is_named(value, wrong):
    assert sorted(misfits(value, Told)) == wrong
    assert sorted(misfits([value], list[Told])) == [
        f"[0]{'' if one.startswith('.') else ' '}{one.removeprefix('it ')}" for one in wrong
    ]


def test_stdout_must_have_json_alone():
    option = JsonOption(["--json"], prints=list[int], lines=False)

    for text in ("note: a\n[1]", "[NaN]", ""):
        with pytest.raises(AssertionError, match="stdout is not JSON alone"):
            check_json(text, option)
    with pytest.raises(AssertionError, match=r"not what the class of --json says: .0. is '1', not int"):
        check_json('["1"]', option)
