"""Preference tuning from its reference on: what the commands say, write and refuse."""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fork_server
from forge_core.cli import main
from forge_plugins_data.preference_reference import digest_of

JOB = """
extends = "tiny.toml"

[run]
name = "tuned"

[data]
name = "preference_pairs"
path = "{folder}/pairs.jsonl"
validation = 0.2
reference = "{folder}/reference.npz"

[loss]
name = "dpo"

[eval]
interval = 10

[checkpoint.load]
path = "{folder}/runs/tiny"
"""


@pytest.fixture(scope="module")
def begun(shared_tiny):
    """A run that tuning begins with, the pairs, and the configuration."""
    folder = shared_tiny.folder
    pairs = [{"prompt": f"{n} is ", "chosen": f"{n}", "rejected": "no"} for n in range(40)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (folder / "dpo.toml").write_text(JOB.format(folder=folder))
    shared_tiny.completed()
    return shared_tiny


@pytest.fixture
def reference(begun, capsys):
    """Writes the reference by some ranks; gives back its arrays."""

    def reference(*arguments):
        words = ["eval", str(begun.path()), "--evaluation", "preference_reference", "--job", f"{begun.folder}/dpo.toml"]
        if "--nproc" in arguments:
            done = fork_server.run(
                [sys.executable, "-m", "forge_core", *words, *arguments],
                env=begun.environment(), capture_output=True, text=True, timeout=240,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
        else:
            assert main([*words, *arguments]) == 0, capsys.readouterr().err
        with np.load(begun.folder / "reference.npz") as arrays:
            return dict(arrays)

    return reference


def test_a_run_begins_where_the_reference_is_and_leaves_it_the_right_way(begun, reference, capsys):
    arrays = reference()

    assert arrays["log_probabilities"].shape == (40, 2)
    assert main(["run", str(begun.folder / "dpo.toml"), "train.steps=30"]) == 0, capsys.readouterr().err
    lines = begun.metrics("tuned")
    steps = [line for line in lines if "loss" in line]
    assert steps[0]["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert steps[-1]["auxiliary/reward_margin"] > 0.5
    evaluated = [line for line in lines if "eval/loss" in line]
    assert evaluated[-1]["eval/loss"] < evaluated[0]["eval/loss"] < 0.69
    assert 4 <= evaluated[0]["eval/tokens"] <= 14  # pairs
    said = capsys.readouterr().out
    assert re.search(r"eval/loss \d\.\d{4}  \(\d+ tokens\)$", said, re.M)
    assert "perplexity" not in said
    assert "eval/perplexity" not in evaluated[-1]

    text = ["--evaluation", "perplexity", f"data={{name='text_files', path='{begun.folder}/text'}}"]
    assert main(["eval", str(begun.path("tuned")), "--json", *text]) == 0  # a text has no pairs
    found = json.loads(capsys.readouterr().out)
    assert found["eval/perplexity/perplexity"] == pytest.approx(math.exp(found["eval/perplexity/loss"]))


@pytest.mark.parametrize(
    "layout",
    [["parallel.dp_shard=2"], ["parallel.tp=2"], ["parallel.pp=2"], ["parallel.cp=2"]],
    ids=["fsdp2", "tp2", "pp2", "cp2"],
)
def test_the_reference_is_the_same_in_every_layout(reference, layout):
    alone = reference()

    found = reference("--nproc", "2", *layout)

    assert np.array_equal(found["pairs"], alone["pairs"])
    np.testing.assert_allclose(found["log_probabilities"], alone["log_probabilities"], rtol=1e-5)


CHECKED = "callbacks=[{name='reference_check'}]"
NO_REFERENCE = "data={{name='preference_pairs', path='{folder}/pairs.jsonl'}}"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["loss.name=cross_entropy"], "batches have 'answers' for the loss, and loss 'cross_entropy' of forge"),
        (
            ["loss={name='z_loss', loss='dpo'}"],
            "loss.loss: must be a loss of single targets, such as cross_entropy; dpo is none",
        ),
        (["loss.loss=z_loss"], "loss.loss: must give log-probabilities alone, as cross_entropy and chunked_cross_entr"),
        (["loss.beta=0"], "loss.beta"),
        ([CHECKED, "data={name='text_files', path='{folder}/text'}"], "is for data of preference_pairs, and [data] is"),
        (
            ["data={name='text_files', path='{folder}/text', validation=0.3}"],
            "takes 'answers' of batches, which have tokens, targets; choose",
        ),
        ([NO_REFERENCE.replace("{{", "{").replace("}}", "}")], "data.reference: is missing: name the file that forge"),
        (["data.reference={folder}/none.npz"], "none.npz': there is no such file; make it by forge eval RUN"),
        (
            ["model.multi_token={depths=1}"],
            "which forge-plugins-dense:transformer cannot give to its targets of tok",
        ),
        (
            ["checkpoint={interval=5, keep_last=1, keep_best=1, best_metric='eval/perplexity'}", "eval.interval=5"],
            "checkpoint.best_metric: loss 'dpo' of forge-plugins-optim 0.1.0 has no perplexity; choose eval/loss",
        ),
        (["data.rejected_field=worse"], "line 1 has no 'worse'; its keys are prompt, chosen, rejected"),
    ],
)
def test_what_does_not_go_together_is_refused(begun, reference, capsys, settings, sentence):
    reference()
    given = [one.replace("{folder}", str(begun.folder)) for one in settings]

    assert main(["run", str(begun.folder / "dpo.toml"), "run.name=refused", "eval.interval=0", *given]) == 2
    assert sentence in capsys.readouterr().err


def test_a_reference_that_cannot_be_written_is_refused_before_it_is_measured(begun, capsys):
    (begun.folder / "taken").mkdir(exist_ok=True)
    job = begun.folder / "taken.toml"
    job.write_text((begun.folder / "dpo.toml").read_text().replace("reference.npz", "taken"))

    assert main(["eval", str(begun.path()), "--evaluation", "preference_reference", "--job", str(job)]) == 2
    assert "taken' cannot be written: it is a folder" in capsys.readouterr().err


def test_a_reference_is_written_over_no_other_file(begun, capsys):
    pairs = begun.folder / "mine.jsonl"
    pairs.write_text("mine")
    job = begun.folder / "mine.toml"
    job.write_text((begun.folder / "dpo.toml").read_text().replace("reference.npz", pairs.name))

    assert main(["eval", str(begun.path()), "--evaluation", "preference_reference", "--job", str(job)]) == 2
    assert "mine.jsonl' is a file that is no reference; name a new one, or remove it" in capsys.readouterr().err
    assert pairs.read_text() == "mine"


def test_a_reference_of_other_weights_ends_the_run_at_its_first_step(begun, reference, capsys):
    reference()
    arguments = ["run", str(begun.folder / "dpo.toml"), CHECKED, "eval.interval=0", "train.steps=3"]
    fresh = ["scheduler.warmup_steps=1", "optimizer.lr=1e-3"]

    assert main([*arguments, *fresh, "run.name=fits"]) == 0, capsys.readouterr().err
    begun.completed("run.name=another", "train.seed=5")
    assert main([*arguments, *fresh, "run.name=other", f"checkpoint.load.path={begun.path('another')}"]) == 2

    assert "log 2 = 0.6931 with a reference of the weights that the run begins with" in capsys.readouterr().err
    assert not list(begun.path("other").glob("checkpoints/step_*"))


def test_a_run_that_begins_with_another_checkpoint_than_its_reference_says_so_and_goes_on(begun, reference, capsys):
    """Two may have the same weights; a file of before that does not say which is as good as ever."""
    arrays = reference()
    own = newest(begun.path())
    about = json.loads(str(arrays["about"]))
    assert about["checkpoint"] == {"path": str(own), "step": int(own.name[5:]), "digest": digest_of(own)}
    copy = begun.folder / "moved" / own.name
    shutil.copytree(own, copy, dirs_exist_ok=True)
    arguments = ["run", str(begun.folder / "dpo.toml"), "eval.interval=0", "train.steps=2", "scheduler.warmup_steps=1"]

    def said(name, *settings):
        assert main([*arguments, f"run.name={name}", *settings]) == 0, capsys.readouterr().err
        return [line for line in capsys.readouterr().out.splitlines() if "was made with" in line]

    assert said("fits_too") == said("moved", f"checkpoint.load.path={copy}") == []
    begun.completed("run.name=third", "train.seed=6")
    third = newest(begun.path("third"))
    (line,) = said("warned", f"checkpoint.load.path={begun.path('third')}")
    assert f"reference.npz' was made with {own}, and this run begins with {third}; the callback reference_check" in line
    assert said("warned", f"checkpoint.load.path={begun.path('third')}", "train.steps=4") == []  # which is resumed
    del about["checkpoint"]
    np.savez(begun.folder / "reference.npz", **arrays | {"about": np.array(json.dumps(about))})
    assert said("old_file", f"checkpoint.load.path={third}") == []


def newest(run):
    return sorted((run / "checkpoints").glob("step_*"))[-1].resolve()


@pytest.mark.parametrize(
    ("job", "settings", "sentence"),
    [
        ("tiny.toml", [], "tiny.toml: [data] must be preference_pairs, with a file to write as its reference"),
        ("dpo.toml", ["train.seq_len=16"], "train.seq_len is 32, and that of the evaluated run 16; add train."),
        ("dpo.toml", ["train.precision=bf16"], "train.precision is fp32, and that of the evaluated run bf16; add"),
        ("none.toml", [], "none.toml"),
    ],
)  # fmt: skip
def test_a_reference_is_made_of_a_configuration_that_wants_one(begun, capsys, job, settings, sentence):
    words = ["eval", str(begun.path()), "--evaluation", "preference_reference", "--job", f"{begun.folder}/{job}"]

    assert main([*words, *settings]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.slow
def test_the_demo_goes_from_one_command_to_the_next(tmp_path, monkeypatch, capsys):
    root = Path(__file__).parents[2]
    shutil.copytree(root / "configs", tmp_path / "configs")
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^#   (.*)$", Path("configs/dpo_demo.toml").read_text(), re.M)
    page = (root / "docs" / "preference-tuning.md").read_text()
    assert commands == page.partition("```\n")[2].partition("```")[0].splitlines()

    demo = Path("configs/demo.toml")  # cut short
    short = {"dim = 192": "dim = 48", "n_layers = 4": "n_layers = 1", "steps = 400": "steps = 24", "**/*.py": "a*.py"}
    short["batch_size = 16"] = "batch_size = 4"
    for long, brief in short.items():
        assert long in demo.read_text()
        demo.write_text(demo.read_text().replace(long, brief))
    for command in commands[:-1]:
        words = command.split()
        if words[0] == "python":
            assert subprocess.run([sys.executable, *words[1:]], check=False).returncode == 0
            lines = Path(words[-1]).read_text().splitlines(keepends=True)
            Path(words[-1]).write_text("".join(lines[:80]))
        else:
            steps = ["train.steps=24", "eval.batches=1"] if words[1] == "run" else []
            assert main([*words[1:], *steps]) == 0, capsys.readouterr().err

    lines = [json.loads(line) for line in Path("runs/dpo_demo/metrics.jsonl").read_text().splitlines()]
    assert lines[0]["loss"] == pytest.approx(0.693147, abs=1e-4)
