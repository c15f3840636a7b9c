"""Checkpoints whose manifest is right, and whose ``state.json`` or ``job.toml`` anybody may have written."""

import json
import os
import shutil
import sys
from functools import reduce
from types import SimpleNamespace

import attrs
import pytest
import torch

from forge_core.checkpoint.contents import resume_problem
from forge_core.checkpoint.manifest import describe_file, read_manifest, write_manifest
from forge_core.checkpoint.store import CheckpointStore, open_checkpoint
from forge_core.cli import main
from forge_core.errors import ConfigError
from forge_plugins_weights.loading import build_within

SETTINGS = ("train.steps=2", "scheduler.warmup_steps=1", "checkpoint.interval=1")


@pytest.fixture(scope="module")
def trained(shared_tiny):
    shared_tiny.completed(*SETTINGS)
    return shared_tiny.path()


@pytest.fixture(autouse=True)
def recursion_limit():
    """Python's own: Inductor raises it in a process that has compiled something."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


@pytest.fixture
def run(trained, tmp_path):
    """A copy of it, of steps 1 and 2."""
    return shutil.copytree(trained, tmp_path / "run", symlinks=True)


def written(checkpoint, name, content):
    """``content`` in a file of ``checkpoint``, as if it had been saved so."""
    (checkpoint / name).write_bytes(content.encode() if isinstance(content, str) else content)
    manifest = read_manifest(checkpoint)
    files = {**manifest.files, name: describe_file(checkpoint / name)}
    write_manifest(checkpoint, attrs.evolve(manifest, files=files))
    return checkpoint


def newest(run):
    return run / "checkpoints" / "step_00000002"


def with_state(run, **changes):
    state = json.loads((newest(run) / "state.json").read_text()) | changes
    state = {key: value for key, value in state.items() if value != "REMOVED"}
    return written(newest(run), "state.json", json.dumps(state))


def with_job(run, old, new):
    text = (newest(run) / "job.toml").read_text()
    assert old in text
    return written(newest(run), "job.toml", text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"position": "REMOVED"}, "state.json: position: is required (an integer)"),
        ({"position": None}, "state.json: position: expected an integer"),
        ({"position": "8"}, 'state.json: position: expected an integer, got the string "8"'),
        ({"position": -8}, "state.json: position: must be at least 0, got -8"),
        ({"position": 2**62}, "state.json: position: must be less than 4611686018427387904"),
        ({"vocab_size": 10**12}, "state.json: vocab_size: must be at most 2147483648"),
        ({"vocab_size": "257"}, "state.json: vocab_size: expected an integer"),
        ({"optimizer": "REMOVED"}, "state.json: optimizer: is required"),
        ({"optimizer": {"values": []}}, "state.json: optimizer."),
        ({"callbacks": {"a.b": 3}}, "state.json: callbacks.a.b: expected a table, got the integer 3"),
        ({"anomalies": {"skipped": 0, "row": [1], "mean_norm": [0.0, 0.0]}}, "state.json: anomalies.row: expected"),
        ({"left_out": [[4, 2]]}, "state.json: left_out: must be stretches in their order"),
        ({"step": 1}, "state.json: step: it is of step 1, the checkpoint of step 2"),
        ({"tokenizer": {"name": "x", "path": "/etc/passwd"}}, "'/etc/passwd' leads outside of the checkpoint"),
        ({"tokenizer": {"name": "x", "path": "a/../../x"}}, "'a/../../x' leads outside of the checkpoint"),
        ({"tokenizer": {"name": "x", "path": "a\0b"}}, "'a\\x00b' leads outside of the checkpoint"),
        ({"tokenizer": {"name": reduce(lambda inner, _: [inner], range(700), [])}}, "state.json nests too deep"),
    ],
)
def test_a_state_that_is_not_what_a_run_saves_is_named_with_its_key_and_the_one_before_is_used(run, changes, sentence):
    with_state(run, **changes)
    said = []

    found = CheckpointStore(run / "checkpoints", problem_of=resume_problem).newest(said.append)

    assert found.step == 1
    assert f"step_00000002 cannot be used: {sentence}" in said[0] or sentence in said[0]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("state.json", "[" * 100_000, "state.json is no table of JSON values"),
        ("job.toml", "a = " + "[" * 100_000, "job.toml is no TOML: It is nested more than 64 deep"),
        ("job.toml", "a = = 2", "job.toml is no TOML: Invalid value"),
        ("job.toml", b"\xff", "job.toml is no TOML"),
        ("job.toml", "[train]\nsteps = 3", "job.toml: model: is required (a table) (and"),
        ("job.toml", 'extends = "/etc/passwd"', "job.toml: extends: a checkpoint stands alone"),
    ],
)
def test_a_file_that_is_no_table_or_leads_elsewhere_is_named_and_the_one_before_is_used(run, name, content, sentence):
    written(newest(run), name, content)
    said = []

    found = CheckpointStore(run / "checkpoints", problem_of=resume_problem).newest(said.append)

    assert found.step == 1
    assert f"step_00000002 cannot be used: {sentence}" in said[0]


def test_a_run_goes_on_from_the_checkpoint_before_one_whose_state_is_wrong(run, shared_tiny, capfd):
    with_state(run, position=None)
    config = shared_tiny.config

    code = main(["run", str(config), f"run.dir={run.parent}", "run.name=run", *SETTINGS])

    assert code == 0
    printed = capfd.readouterr().out
    assert "step_00000002 cannot be used: state.json: position: expected an integer" in printed
    assert "resumed from step_00000001" in printed


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("n_layers = 2", "n_layers = 10000", "describes another model than the one whose"),
        ("dim = 32", "dim = 65536", "another model than the one whose"),
        ("n_layers = 2", 'n_layers = "2"', "model.n_layers: expected an integer"),
        ("n_layers = 2", "n_layers = 3", "is not in the checkpoint"),
    ],
)
def test_a_model_that_is_larger_than_what_is_stored_is_refused_before_it_is_built(run, old, new, sentence, capfd):
    with_job(run, old, new)

    assert main(["generate", str(newest(run)), "--max-new-tokens", "1"]) == 2

    said = capfd.readouterr().err
    assert sentence in said
    assert "bug in Forge" not in said


def test_a_vocabulary_that_is_larger_than_what_is_stored_is_refused_before_the_model_is_built(run, capfd):
    with_state(run, vocab_size=2**31)

    assert main(["generate", str(newest(run)), "--max-new-tokens", "1"]) == 2
    assert "describes another model than the one whose" in capfd.readouterr().err


def test_a_table_that_is_not_stored_and_would_take_all_memory_is_refused(run):
    class Tabled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(257, 32)
            self.register_buffer("angles", torch.empty(10**12), persistent=False)

        def parameter_roles(self):
            return {"embed.weight": "embedding"}

    job = SimpleNamespace(model=None, parametrization=None, train=SimpleNamespace(precision="fp32"))

    with pytest.raises(ConfigError, match=r"by its job\.toml, angles would take 3\.6 TiB, and the whole"):
        build_within(open_checkpoint(newest(run)), job, 257, lambda use, vocab_size: Tabled())


def test_generating_from_a_strangers_checkpoint_reads_no_other_file(run, tmp_path, capfd):
    (tmp_path / "secret.toml").write_text("password = hunter2")
    with_job(run, "[run]", f'extends = "{tmp_path}/secret.toml"\n[run]')

    assert main(["generate", str(newest(run)), "--max-new-tokens", "1"]) == 2

    said = capfd.readouterr().err
    assert "job.toml: extends: a checkpoint stands alone, and reads no other file" in said
    assert "hunter2" not in said


def test_a_tokenizer_file_that_the_manifest_does_not_name_is_not_read(run, tmp_path, capfd):
    (newest(run) / "tokenizer" / "t.json").symlink_to("/etc/passwd")
    with_state(run, tokenizer={"name": "forge-plugins-data:tokenizer_file", "path": "t.json"})

    assert main(["generate", str(newest(run)), "--max-new-tokens", "1"]) == 2
    assert "tokenizer/t.json is not among the files that its manifest names" in capfd.readouterr().err


def test_a_folder_that_is_a_link_and_a_manifest_that_is_a_pipe_are_passed_over(run, tmp_path):
    newest(run).rename(tmp_path / "elsewhere")
    newest(run).symlink_to(tmp_path / "elsewhere")
    pipe = run / "checkpoints" / "step_00000003"
    pipe.mkdir()
    os.mkfifo(pipe / "manifest.json")
    said = []

    assert CheckpointStore(run / "checkpoints").newest(said.append).step == 1

    assert "step_00000003 cannot be used: manifest.json cannot be read (it is a pipe, a socket or a device" in said[0]
    assert "step_00000002 cannot be used: it is a link, not a folder of its own" in said[1]


def test_control_characters_in_the_texts_of_a_checkpoint_are_shown_as_escapes(run, capfd):
    manifest = read_manifest(newest(run))
    write_manifest(newest(run), attrs.evolve(manifest, versions={"forge\x1b[2J": "1\u202e\x9b31m"}))
    with_job(run, 'name = "tiny"', 'name = "a\\u001b]0;gone\\u0007"')

    assert main(["checkpoint", "show", str(newest(run))]) == 0
    assert main(["generate", str(newest(run)), "--max-new-tokens", "1"]) == 2

    printed = "".join(capfd.readouterr())
    assert r"forge\x1b[2J 1\u202e\x9b31m (not installed)" in printed
    assert r"\x1b]0;gone\x07" in printed
    assert not {*printed} & {"\x1b", "\x07", "\x9b", "\u202e"}


def test_what_a_run_saves_can_be_resumed_and_used(run):
    assert resume_problem(newest(run)) is None
    assert open_checkpoint(run / "checkpoints" / "latest").step == 2
    with pytest.raises(ConfigError, match="it is of step 1, the checkpoint of step 2"):
        open_checkpoint(with_state(run, step=1), resume_problem)


@pytest.mark.parametrize(
    ("resume", "said"),
    [
        ("nope/x", "and there is nothing of that name"),
        ("-1", "and there is nothing of that name"),
        ("{config}", "and this is a file"),
        ("a\0b", "checkpoint.resume: cannot hold a null character"),
    ],
)
def test_a_place_that_is_none_is_refused_though_the_run_has_checkpoints_of_its_own(
    shared_tiny, run, resume, said, capfd
):
    resume = resume.format(config=shared_tiny.config)
    settings = [f"run.dir={run.parent}", "run.name=run"]

    assert main(["run", str(shared_tiny.config), "--dry-run", "--resume", resume, *settings, *SETTINGS]) == 2
    assert said in capfd.readouterr().err


def test_where_a_run_began_is_said_of_nothing_else(trained, run, shared_tiny, capfd):
    arguments = ["run", str(shared_tiny.config), "--dry-run", "--resume", str(trained), *SETTINGS]

    assert main([*arguments, f"run.dir={run.parent}", "run.name=run"]) == 0

    printed = capfd.readouterr().out
    assert "is not used, as this run has checkpoints of its own" in printed
    assert "where this run began" not in printed


@pytest.mark.parametrize("files", ["extends", '["evil.py"]', '["{folder}/evil.py"]', '{{"evil.py" = """{code}"""}}'])
@pytest.mark.parametrize(
    "command",
    [
        ["generate", "{run}", "--prompt", "line"],
        ["eval", "{run}"],
        ["eval", "{run}", "--nproc", "2"],
        ["convert", "{run}", "--to", "huggingface", "--out", "{run}/hf"],
        ["data", "seen", "{run}", "--steps", "1"],
        ["moe", "upcycle", "{run}", "--out", "{run}-sparse", "--experts", "2"],
        ["checkpoint", "show", "{run}"],
        ["run", "{checkpoint}/job.toml", "train.steps=3"],
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else None,
)
def test_code_of_a_stranger_is_not_run(run, tmp_path, command, files, capfd, monkeypatch):
    monkeypatch.delenv("FORGE_TRUST_FILES", raising=False)
    proof = tmp_path / "proof"
    code = f"open('{proof}', 'w')\n"
    folder = newest(run)
    files = files.format(folder=folder, code=code.replace("\n", "\\n"))
    if files == "extends":
        text = (folder / "job.toml").read_text().replace("files = []\n", "")
        written(folder, "job.toml", f'extends = "evil.toml"\n{text}')
        (folder / "evil.toml").write_text('[plugins]\nfiles = ["evil.py"]\n')
    else:
        with_job(run, "files = []", f"files = {files}")
    (folder / "evil.py").write_text(code)
    words = [word.format(run=run, checkpoint=folder) for word in command]

    code = main(words)

    said = "".join(capfd.readouterr())
    assert not proof.exists()
    refused = "plugins.files" in said and code == 2
    passed_over = files == "extends" and "extends: a checkpoint stands alone" in said  # for the one before
    assert refused or passed_over or command[0] == "checkpoint", said
