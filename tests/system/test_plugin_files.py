"""A plugin in a file: what it registers is found by name, travels with the job, and is never run unasked."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from forge_core.checkpoint.store import open_checkpoint
from forge_core.cli import main
from forge_core.config.problems import ConfigProblems
from forge_core.distributed.fingerprint import fingerprint
from forge_core.errors import ConfigError
from forge_core.job import catalog_of, dump_job, load_job
from forge_core.registry.discovery import discover

ROOT = Path(__file__).resolve().parents[2]
HALVES = '''"""Halves of things."""

from typing import Annotated

from attrs.validators import gt
from forge_core.api import component
from forge_core.contracts.callback import Callback


@component("scheduler")
def half_of(*, total_steps: int, share: Annotated[float, gt(0)] = 0.5):
    """The same share of the rate at each step.

    Args:
        share: Of the optimizer's rate.
    """
    return lambda step: share


@component("callback", name="tells")
class Tells(Callback):
    """Prints the step."""

    def step_end(self, context):
        print("step", context.step)
'''
LINES = len(HALVES.splitlines())


@pytest.fixture
def with_file(new_tiny):
    """A job that names the file; what it may run is what it reads."""

    def with_file(name: str, text: str = HALVES, more: str = "", files: str = '["halves.py"]'):
        tiny = new_tiny(name)
        (tiny.folder / "halves.py").write_text(text)
        settings = tiny.config.read_text().replace(
            'name = "cosine"\nwarmup_steps = 2', 'name = "half_of"\nshare = 0.25'
        )
        tiny.config.write_text(f"{settings}\n[plugins]\nfiles = {files}\n{more}")
        return tiny

    return with_file


@pytest.fixture
def untrusting(monkeypatch):
    """As a process that has read no configuration of its own."""
    monkeypatch.delenv("FORGE_TRUST_FILES", raising=False)
    return lambda: monkeypatch.delenv("FORGE_TRUST_FILES", raising=False)


def test_a_run_uses_what_a_file_registers_and_goes_on_from_the_copy_in_its_checkpoint(
    with_file, training_values, untrusting, capfd
):
    tiny = with_file("travels", more='[[callbacks]]\nname = "tells"\n')
    straight = tiny.completed("run.name=straight", "train.steps=6")
    assert straight[-1]["lr"] == pytest.approx(0.25e-2)
    assert "step 6" in capfd.readouterr().out.splitlines()
    tiny.completed("run.name=halved", "train.steps=3")
    (tiny.folder / "halves.py").unlink()
    saved = tiny.path("halved") / "checkpoints" / "step_00000003" / "job.toml"
    assert HALVES in saved.read_text()  # to be read by people as it was written
    copy = shutil.copy(saved, tiny.folder / "copy.toml")
    untrusting()

    assert main(["run", str(copy), "train.steps=6"]) == 2
    said = capfd.readouterr().err
    assert f"{copy}:" in said
    assert f"plugins.files: halves.py is code of {LINES} lines that came with this job, and is not run unasked." in said
    assert "--trust-files" in said
    done = tiny.run("train.steps=6", "--trust-files", "--nproc", "1", command="validate")
    assert done.returncode == 2  # the configuration names a file that has gone
    assert main(["run", str(copy), "train.steps=6", "--trust-files"]) == 0
    assert training_values(tiny.metrics("halved")) == training_values(straight)


def test_ranks_are_given_the_text_and_compare_it(with_file, untrusting):
    tiny = with_file("ranks")

    done = tiny.run("--nproc", "2", "train.batch_size=2", "train.steps=2")
    assert done.returncode == 0, done.stderr
    job = load_job(tiny.config, catalog=discover, world_size=2)
    facts = fingerprint(job, catalog_of(job, discover))
    other = load_job(with_file("others", HALVES + "\n").config, catalog=discover, world_size=2)

    expected = hashlib.sha256(HALVES.encode()).hexdigest()[:12]
    assert facts["version of file:halves.py"] == expected
    assert len(facts["plugins.files.halves.py"]) == 12
    differing = {
        key for key, value in fingerprint(other, catalog_of(other, discover)).items() if facts.get(key) != value
    }
    assert {"version of file:halves.py", "plugins.files.halves.py"} <= differing


def test_a_resolved_job_loads_equal_and_names_its_components_by_file(with_file, tmp_path, untrusting):
    for text in (
        HALVES,
        HALVES.replace('"""', "'''"),
        HALVES + "# bell: \x07 \\ '\n",
        HALVES.replace("\n", "\r\n"),
    ):
        tiny = with_file("resolved", text)
        job = load_job(tiny.config, catalog=discover, world_size=1)
        resolved = tmp_path / "job.toml"
        resolved.write_text(dump_job(job))

        again = load_job(resolved, catalog=discover, world_size=1)

        assert again == job
        assert dump_job(again) == dump_job(job)
        assert job.scheduler.qualified_name == "file:halves.py:half_of"


def test_files_of_an_extended_configuration_are_relative_to_it_and_are_kept(with_file, tmp_path):
    base = with_file("base")
    (tmp_path / "more.py").write_text(HALVES.replace("half_of", "third_of").replace('"tells"', '"says"'))
    own = tmp_path / "own.toml"
    own.write_text(f'extends = "{base.config}"\n[plugins]\nfiles = ["more.py"]\n[[callbacks]]\nname = "says"\n')

    job = load_job(own, catalog=discover)

    assert sorted(job.plugins.texts) == ["halves.py", "more.py"]
    assert [job.scheduler.name, job.callbacks[0].provider] == ["half_of", "file:more.py"]


def test_a_changed_file_is_told_when_a_run_goes_on(with_file, capfd):
    tiny = with_file("changed")
    tiny.completed("train.steps=2")
    (tiny.folder / "halves.py").write_text(HALVES + "\n# another line\n")

    tiny.completed("train.steps=3")

    said = capfd.readouterr().out
    change = rf"{LINES} lines of digest (\w{{8}}) -> {LINES + 2} lines of digest (\w{{8}})"
    assert re.search(rf"resuming with another plugins\.files\.halves\.py: {change}", said), said


def test_a_name_that_a_package_has_too_must_be_qualified(with_file):
    text = HALVES.replace("def half_of", "def constant")
    tiny = with_file("twice", text)
    tiny.config.write_text(tiny.config.read_text().replace('"half_of"\nshare = 0.25', '"constant"'))

    with pytest.raises(ConfigError, match=r'"file:halves.py:constant"'):
        load_job(tiny.config, catalog=discover)
    job = load_job(tiny.config, ["scheduler.name=file:halves.py:constant", "scheduler.share=1"], catalog=discover)
    assert job.scheduler.config.share == 1


def test_validation_says_what_a_file_imports(with_file):
    tiny = with_file("heavy", HALVES + "\nimport torch\n")

    # a process of its own: one that is forked has torch already
    done = subprocess.run(tiny.command(command="validate"), capture_output=True, text=True, env=tiny.environment())

    assert done.returncode == 0, done.stderr
    assert "note: plugins.files: halves.py imports " in done.stderr
    assert "torch, which took " in done.stderr


WRONG = {
    "missing": (None, "plugins.files[0]: there is no file {folder}/halves.py"),
    "syntax": ("def f(:\n", "plugins.files: halves.py, line 1: invalid syntax"),
    "raises": ("x = 1\ny = z\n", "plugins.files: halves.py, line 2: NameError: name 'z' is not defined"),
    "nothing": ("x = 1\n", "halves.py registers nothing: put @component(kind) before a class or a function"),
    "no kind": (
        HALVES.replace('"scheduler"', '"sheduler"'),
        "halves.py: @component('sheduler') names no kind. Did you mean 'scheduler'?",
    ),
    "twice": (
        HALVES.replace('"callback", name="tells"', '"scheduler", name="half_of"'),
        "registers the scheduler 'half_of' 2 times",
    ),
    "no summary": (
        HALVES.replace("Prints the step.", ""),
        "halves.py: @component('callback') of Tells: it needs a docstring, whose first line is the",
    ),
    "unknown field": (
        HALVES.replace('"scheduler")', '"scheduler", phase="swap")'),
        "unexpected keyword argument 'phase'",
    ),
    "exit": ("raise SystemExit(3)\n", "halves.py, line 1: SystemExit: 3"),
    "positional": (
        HALVES.replace("*, total_steps", "total_steps"),
        "the parameter 'total_steps' can be given by position",
    ),
    "a file beside it": ("import other_half\n", "A plugin file imports installed packages, and no file beside it"),
    "no kind given": (
        HALVES.replace('@component("scheduler")', "@component"),
        'halves.py, line 10: write the kind: @component("router")',
    ),
    "an instance": (HALVES + "component('router')(3)\n", "@component is put before a class or a function"),
    "a config": (
        HALVES.replace("*, total_steps: int, ", "config, *, "),
        "half_of: the parameter 'config' can be given by position; each key is a parameter of its own, as in",
    ),
    "large": ("#" * 2**19, "it has more than 0.25 MiB, the most that is read"),
    "key": (
        HALVES.replace("share: Annotated", "shore: Annotated"),
        "scheduler.share: unknown key; did you mean 'shore'?",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_a_file_is_told_in_a_sentence(with_file, case):
    text, sentence = WRONG[case]
    tiny = with_file(f"wrong-{case.replace(' ', '-')}", text or "")
    if text is None:
        (tiny.folder / "halves.py").unlink()

    with pytest.raises(ConfigError) as raised:
        load_job(tiny.config, catalog=discover)
    assert sentence.format(folder=tiny.folder) in str(raised.value)
    assert isinstance(raised.value, ConfigProblems)
    assert str(raised.value).startswith(f"{tiny.config}:")


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ('["halves.py", "halves.py"]', "plugins.files[1]: {folder}/halves.py has the name of another file"),
        ('["halves.txt"]', "plugins.files[0]: {folder}/halves.txt must be a Python file, *.py"),
        ('["halve.py"]', "did you mean {folder}/halves.py?"),
        ("[1]", "plugins.files"),
    ],
)
def test_names_of_files_are_checked(with_file, files, sentence):
    tiny = with_file("named", files=files)

    with pytest.raises(ConfigError) as raised:
        load_job(tiny.config, catalog=discover)
    assert sentence.format(folder=tiny.folder) in str(raised.value)


def test_the_command_line_names_files_from_the_working_directory(with_file, monkeypatch):
    tiny = with_file("typed", files="[]")
    monkeypatch.chdir(tiny.folder)

    job = load_job(tiny.config, ['plugins.files=["halves.py"]'], catalog=discover)

    assert job.scheduler.provider == "file:halves.py"


def test_a_model_is_sampled_from_a_checkpoint_only_after_a_look(with_file, untrusting, capfd):
    tiny = with_file("sampled")
    tiny.completed("train.steps=1")
    where = str(tiny.path())
    assert open_checkpoint(Path(where) / "checkpoints" / "step_00000001").step == 1
    untrusting()

    assert main(["generate", where, "--prompt", "line", "--max-new-tokens", "2"]) == 2
    assert f"halves.py is code of {LINES} lines" in capfd.readouterr().err
    assert main(["generate", where, "--prompt", "line", "--max-new-tokens", "2", "--trust-files"]) == 0
    assert main(["generate", where, "--prompt", "line", "--max-new-tokens", "2"]) == 2  # it was for one command


EVERYTHING_ELSE = """
{model}
[optimizer]
name = "sign_descent"
lr = 0.01
[scheduler]
name = "trapezoid"
[loss]
name = "cross_entropy_z"
[eval]
interval = 4
[[callbacks]]
name = "good_enough"
loss = 0.001
[[trackers]]
name = "best_loss"
[metrics]
interval = 1
[train]
steps = 4
seq_len = 32
batch_size = 8
global_batch_size = 8
precision = "fp32"
"""
TEXT = """
[data]
name = "text_files"
path = "{folder}/text"
pattern = "**/*.txt"
validation = 0.3
[[evaluations]]
name = "confidence"
interval = 4
"""
COUNTING = """
[data]
name = "counting"
[eval.data]
name = "counting"
"""
MODELS = {
    "dense": """
[model]
name = "transformer"
dim = 32
n_layers = 2
n_heads = 4
max_seq_len = 64
[model.feed_forward]
name = "geglu"
hidden_dim = 48
[parallel.passes.freeze]
role = "embedding"
""",
    "sparse": """
[model]
name = "transformer"
dim = 32
n_layers = 2
n_heads = 4
max_seq_len = 64
num_experts = 4
[model.moe.router]
name = "{router}"
""",
    "bigram": """
[model]
name = "bigram"
dim = 32
""",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "router"),
    [
        pytest.param("dense", "", marks=pytest.mark.nightly),
        ("sparse", "highest"),
        pytest.param("sparse", "top1", marks=pytest.mark.nightly),
        ("bigram", ""),
    ],
)
def test_the_files_on_the_pages_of_hooks_train_the_same_under_fsdp_and_tensor_parallelism(new_tiny, model, router):
    tiny = new_tiny("pages")
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "hooks").glob("forge_*.md"))
    files = dict(re.findall(r"^:caption: (\w+\.py)\n(.*?)^```$", pages, re.M | re.S))
    for name, text in files.items():
        (tiny.folder / name).write_text(text)
    data = COUNTING if model == "bigram" else TEXT.format(folder=tiny.folder)
    job = EVERYTHING_ELSE.format(model=MODELS[model].format(router=router) + data)
    names = sorted(files.keys() - {"relay.py"})  # a pipeline; the page's kit trains with it
    tiny.config.write_text(f'[plugins]\nfiles = {names}\n[run]\nname = "tiny"\ndir = "{tiny.folder}/runs"\n{job}')

    alone = tiny.completed("run.name=alone")
    layout = ("--nproc", "4", "parallel.tp=2", "parallel.dp_shard=2", "train.batch_size=4")
    together = tiny.completed("run.name=together", *layout)

    assert [one["loss"] for one in together if "loss" in one] == pytest.approx(
        [one["loss"] for one in alone if "loss" in one], rel=1e-5
    )
    evaluated = [
        [one.get("eval/confidence/confidence") for one in lines if "eval/loss" in one] for lines in (alone, together)
    ]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-4) if model != "bigram" else evaluated == [[None], [None]]
    assert "nats per token at step 4" in (tiny.path("together") / "best.txt").read_text()
