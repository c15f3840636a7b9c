"""Settings from the command line."""

from __future__ import annotations

import datetime

import pytest

from forge_core.config.overrides import with_overrides
from forge_core.config.problems import ConfigProblems
from forge_core.config.toml_file import read_document
from forge_core.errors import ConfigError
from forge_core.job import load_job

SECTIONS = ("run", "model", "train", "optimizer", "loss", "data", "parallel", "callbacks")
BASE = """\
loss = "cross_entropy"
[run]
name = "r"
dir = "d"
[model]
name = "decoder"
dim = 64
[model.feed_forward]
name = "moe"
n_experts = 8
router = {name = "topk", k = 2}
[train]
steps = 10
[optimizer]
name = "adamw"
lr = 1.0
[parallel.passes]
fsdp = true
[[callbacks]]
name = "progress"
interval = 1
"""


@pytest.fixture
def edit(write):
    def edit(*tokens: str):
        options = ["--world-size", "--nproc"]
        return with_overrides(read_document(write(BASE)), tokens, sections=SECTIONS, options=options)

    return edit


@pytest.mark.parametrize(
    "tokens", [["--train.steps=20"], ["train.steps=20"], ["--train.steps", "20"]], ids=lambda tokens: " ".join(tokens)
)
def test_three_spellings_mean_the_same(edit, tokens):
    document = edit(*tokens)

    assert document.table["train"]["steps"] == 20
    assert str(document.locate(("train", "steps"))) == " ".join(tokens)


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        ("3e-4", 3e-4),
        ("20", 20),
        ("1_000", 1000),
        ("true", True),
        ("True", "True"),
        ("bf16", "bf16"),
        ("a b", "a b"),
        ("", ""),
        ("/path/to.x", "/path/to.x"),
        ("~/x", "~/x"),
        ("a=b", "a=b"),
        ("a#b", "a#b"),
        ("1#b", "1#b"),
        ("1, y = 2", "1, y = 2"),
        ("1\nsmuggled = 2", "1\nsmuggled = 2"),
        ("1 }\nw = { v = 2", "1 }\nw = { v = 2"),
        ('"123"', "123"),
        ("[0.9, 0.99]", [0.9, 0.99]),
        ('{name = "adamw", lr = 1e-4}', {"name": "adamw", "lr": 1e-4}),
        ("2024-01-02", datetime.date(2024, 1, 2)),
    ],
)
def test_values_are_toml_and_bare_words_are_strings(edit, raw, value):
    found = edit(f"--data.x={raw}").table["data"]["x"]

    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("value", ["-1", "-.5", "-1e-3", "-inf"])
def test_a_negative_number_is_a_value_and_not_an_option(edit, value):
    assert "x" in edit("--data.x", value).table["data"]


def test_an_array_is_replaced_or_one_entry_is_changed(edit):
    assert edit("--callbacks=[]").table["callbacks"] == []
    document = edit("--callbacks.0.interval=5")
    assert document.table["callbacks"] == [{"name": "progress", "interval": 5}]
    assert str(document.locate(("callbacks", 0, "interval"))) == "--callbacks.0.interval=5"


def test_a_whole_table_is_replaced(edit):
    document = edit('--optimizer={name = "adamw", eps = 1}')

    assert document.table["optimizer"] == {"name": "adamw", "eps": 1}
    assert document.locate(("optimizer", "eps")).is_override


def test_another_name_drops_the_keys_of_the_other_component_at_any_depth(edit):
    assert edit("optimizer.name=muon").table["optimizer"] == {"name": "muon"}
    assert edit("optimizer=muon").table["optimizer"] == {"name": "muon"}
    assert edit("model.feed_forward.name=mlp").table["model"] == {
        "name": "decoder",
        "dim": 64,
        "feed_forward": {"name": "mlp"},
    }


def test_the_same_name_keeps_them(edit):
    assert edit("optimizer.name=adamw").table["optimizer"] == {"name": "adamw", "lr": 1.0}
    assert edit("optimizer=adamw").table["optimizer"] == {"name": "adamw", "lr": 1.0}


@pytest.mark.parametrize("order", [1, -1])
def test_a_name_and_keys_beside_it_may_come_in_any_order(edit, order):
    tokens = ["optimizer.name=muon", "optimizer.momentum=0.9", "model.feed_forward.router.k=3", "model.feed_forward=x"]

    document = edit(*tokens[::order])

    assert document.table["optimizer"] == {"name": "muon", "momentum": 0.9}
    assert document.table["model"]["feed_forward"] == {"name": "x", "router": {"k": 3}}


def test_the_run_keeps_its_directory_under_another_name(edit):
    assert edit("run.name=other").table["run"] == {"name": "other", "dir": "d"}


def test_a_component_chosen_by_name_alone_has_room_for_keys(edit):
    assert edit("loss.chunk=3").table["loss"] == {"name": "cross_entropy", "chunk": 3}
    assert edit("parallel.passes.fsdp.reshard=false").table["parallel"]["passes"]["fsdp"] == {"reshard": False}
    assert edit("model.feed_forward.router=hash").table["model"]["feed_forward"]["router"] == {"name": "hash"}


def test_tables_that_are_not_there_are_made(edit):
    assert edit("parallel.passes.compile.mode=x").table["parallel"]["passes"]["compile"] == {"mode": "x"}


def test_the_last_of_two_settings_of_one_key_holds(edit):
    assert edit("train.steps=1", "train.steps=2").table["train"]["steps"] == 2


def test_the_file_as_read_is_left_alone(write):
    document = read_document(write(BASE))

    with_overrides(document, ["callbacks.0.interval=9", "train.steps=1"], sections=SECTIONS)

    assert document.table["callbacks"][0]["interval"] == 1
    assert document.table["train"]["steps"] == 10


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["--train.steps"], "--train.steps: needs a value, as in --train.steps=…"),
        (["--train.steps", "--run.name=x"], "--train.steps: needs a value, as in --train.steps=…"),
        (["--train.steps", "run.name=x"], "--train.steps: needs a value, as in --train.steps=…"),
        (["--train.steps", "-x"], "--train.steps: needs a value, as in --train.steps=…"),
        (["--wrld-size", "8"], "--wrld-size 8: is neither an option nor a section; did you mean '--world-size'?"),
        (["--nprocs=8"], "--nprocs=8: is neither an option nor a section; did you mean '--nproc'?"),
        (["--optimiser=x"], "--optimiser=x: is neither an option nor a section; did you mean '--optimizer'?"),
        (["optimiser=x"], "optimiser=x: is not a section; did you mean 'optimizer'?"),
        (["--verbose"], "--verbose: is neither an option nor a section; a setting is written section.key=value"),
        (["-x"], "-x: is not a setting; a setting is written section.key=value"),
        (["extra"], "extra: is not a setting; a setting is written section.key=value"),
        (["train.steps"], "train.steps: is not a setting; a setting is written section.key=value"),
        (["--train..steps=1"], "'train..steps' is not a key; keys are words joined by dots"),
        (["--train.a b=1"], "'train.a b' is not a key"),
        (["--train.a\nb=1"], "is not a key"),
        (["--model.name.foo=1"], '--model.name.foo=1: model.name is the string "decoder", not a table'),
        (["--train.steps.x=1"], "--train.steps.x=1: train.steps is the integer 10, not a table"),
        (["--callbacks.7.x=1"], "--callbacks.7.x=1: callbacks has 1 entries; '7' is not one of them"),
        (["--callbacks.x=1"], "callbacks has 1 entries; 'x' is not one of them"),
        (["--optimizer.betas=[0.9, 0.99"], "--optimizer.betas=[0.9, 0.99: the value is not valid TOML"),
    ],
)
def test_what_is_no_setting_is_refused(edit, tokens, message):
    with pytest.raises(ConfigError) as caught:
        edit(*tokens)

    assert message in str(caught.value)


def test_all_wrong_settings_are_reported_at_once(edit):
    with pytest.raises(ConfigProblems) as caught:
        edit("--wrld-size", "8", "callbacks.7.x=1", "train.steps=1", "y")

    assert len(caught.value.problems) == 3
    assert str(caught.value).endswith("3 problems in the command line")


@pytest.mark.parametrize(
    ("setting", "hint"),
    [
        ("--data.path=123", "got the integer 123 (for the text, write --data.path='\"123\"')"),
        ("--run.name=2024-01-02", "got the date 2024-01-02 (for the text, write --run.name='\"2024-01-02\"')"),
        ("data.pattern=true", "(for the text, write data.pattern='\"true\"')"),
    ],
)
def test_a_string_that_looks_like_something_else_comes_with_its_remedy(complaint, setting, hint):
    assert hint in complaint(setting)


def test_the_place_of_a_problem_from_the_command_line_is_what_was_typed(complaint):
    assert complaint("--train.stepz=3") == "--train.stepz=3: train.stepz: unknown key; did you mean 'steps'?"
    assert complaint("--optimizer.name=muom").startswith("--optimizer.name=muom: optimizer: no installed plugin")
    assert complaint("--trian.steps=3") == "--trian.steps=3: trian: unknown key; did you mean 'train'?"


def test_a_key_is_taken_back_before_what_is_set_within_it(edit):
    document = edit("~optimizer.lr", "optimizer.weight_decay=0.1", "model.feed_forward.name=mlp", "~model.feed_forward")

    assert document.table["optimizer"] == {"name": "adamw", "weight_decay": 0.1}
    assert document.table["model"] == {"name": "decoder", "dim": 64, "feed_forward": {"name": "mlp"}}
    assert ("optimizer", "lr") not in document.locations
    assert ("model", "feed_forward", "n_experts") not in document.locations


def test_a_key_that_is_taken_back_has_its_default(write, catalog):
    path = write()
    path.write_text(path.read_text().replace("steps = 10", "steps = 10\nseed = 7"))

    assert load_job(path, catalog=catalog).train.seed == 7
    assert load_job(path, ["~train.seed"], catalog=catalog).train.seed == 42
    with pytest.raises(ConfigError, match=r"train\.steps: is required"):
        load_job(path, ["~train.steps"], catalog=catalog)


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("~optimizer.lrr", "~optimizer.lrr: 'optimizer.lrr' is not set; did you mean 'optimizer.lr'?"),
        ("~run.seed", "~run.seed: 'run.seed' is not set"),
        ("~train.steps=3", "~train.steps=3: 'train.steps=3' is not a key; keys are words joined by dots"),
        ("~", "~: '' is not a key"),
    ],
)
def test_what_cannot_be_taken_back_is_told(edit, setting, sentence):
    with pytest.raises(ConfigProblems) as caught:
        edit(setting)
    assert str(caught.value).startswith(sentence)


def test_an_override_mends_a_wrong_value_of_the_file(write, catalog):
    path = write()
    path.write_text(path.read_text().replace("steps = 10", 'steps = "ten"'))

    assert load_job(path, ["train.steps=3"], catalog=catalog).train.steps == 3


def test_a_long_setting_is_told_by_its_beginning(complaint):
    said = complaint(f"train.steps={'9' * 5000}")

    assert said.startswith("train.steps=999")
    assert len(said) < 500
