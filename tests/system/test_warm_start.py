"""``[checkpoint.load]``: beginning with tensors of another run."""

import json
import shutil

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from forge_core.checkpoint.store import open_checkpoint
from forge_core.cli import main


def _tensors(path):
    checkpoint = open_checkpoint(path)
    entries = checkpoint.saved_tensors()
    tensors = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in entries.items()}
    checkpoint.load(tensors)
    return tensors


@pytest.fixture(scope="module")
def source(shared_tiny):
    shared_tiny.completed("run.name=source")
    return shared_tiny.path("source") / "checkpoints" / "step_00000010"


@pytest.fixture
def start(shared_tiny, source, request):
    """A run that saves what it begins with, and then does one step; returns the tensors of step 0 by key."""
    name = f"warm-{abs(hash(request.node.name))}"
    path = shared_tiny.path(name)

    def begin(*arguments):
        settings = ["train.steps=1", "checkpoint.powers_of_two_until=1"]
        if not any(one.startswith("checkpoint.load=") for one in arguments):
            settings.append(f"checkpoint.load.path={source}")
        constant = ['scheduler={name="constant"}']  # with which one step is enough
        code = main(["run", str(shared_tiny.config), f"run.name={name}", *settings, *constant, *arguments])
        return _tensors(path / "checkpoints" / "step_00000000") if code == 0 else code

    begin.path = path
    return begin


def _accounts(start):
    return json.loads((start.path / "loaded.json").read_text())


def test_weights_alone_begin_a_run_at_step_0(start, source, capsys):
    begun, saved = start(), _tensors(source)

    assert begun
    assert all(key.startswith("model.") and torch.equal(tensor, saved[key]) for key, tensor in begun.items())
    accounts = _accounts(start)
    assert accounts["loaded"] == sorted(begun)
    assert accounts["left_out"] == sorted(key for key in saved if key.startswith("optimizer."))
    assert accounts["without_a_place"] == accounts["fresh"] == []
    said = capsys.readouterr().out
    assert f"fresh start with tensors of {source}" in said
    assert "left out by checkpoint.load: 75 tensors (optimizer." in said


def test_weights_that_know_other_tokens_by_the_same_ids_are_said(start, source, tmp_path, capsys):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    other = Tokenizer(models.BPE({one: index for index, one in enumerate([*letters, "</s>"])}, []))
    other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    other.save(str(tmp_path / "tokenizer.json"))

    start()
    same = capsys.readouterr().out
    given = f'data.tokenizer={{name="tokenizer_file", path="{tmp_path}/tokenizer.json"}}', "checkpoint.resume=never"
    start(*given)
    said = capsys.readouterr().out
    start(*given, 'checkpoint.load.exclude=["model.embed.*", "model.head.*", "optimizer.*"]')

    assert "another tokenizer" not in same + capsys.readouterr().out
    assert (
        f"warning: checkpoint.load: {source} was trained with another tokenizer, by which these ids are other tokens; "
        f"give the data that one, which is in {source}/tokenizer, or leave embedding and head out with "
        "checkpoint.load.exclude\n"
    ) in said


def test_the_other_half_is_the_optimizer_s_state(start, source, shared_tiny):
    begun, saved = start('checkpoint.load.include=["optimizer.*"]'), _tensors(source)

    state = {key for key in saved if key.startswith("optimizer.")}
    assert all(torch.equal(begun[key], saved[key]) for key in state)
    assert not any(torch.equal(begun[key], saved[key]) for key in begun if key.endswith("q.weight"))
    assert _accounts(start)["fresh"] == sorted(key for key in begun if key.startswith("model."))


def test_a_part_of_the_model_is_loaded_into_a_larger_one_and_the_rest_is_listed(start, source, capsys):
    begun = start("model.n_layers=3", 'checkpoint.load.exclude=["model.head.*", "model.blocks.1.*"]')
    saved = _tensors(source)

    loaded = set(_accounts(start)["loaded"])
    assert {key for key in begun if key in saved and torch.equal(begun[key], saved[key])} >= loaded
    assert {key.split(".")[2] for key in loaded if ".blocks." in key} == {"0"}
    assert "model.head.weight" in _accounts(start)["fresh"]
    assert any(key.startswith("model.blocks.2.") for key in _accounts(start)["fresh"])
    assert "not loaded, with their first values:" in capsys.readouterr().out


def test_tensors_without_a_place_are_listed(start):
    start("model.n_layers=1")

    assert {key.split(".")[2] for key in _accounts(start)["without_a_place"]} == {"1"}


def test_it_is_done_once(start, capsys):
    start()
    begun = json.loads((start.path / "events.jsonl").read_text().splitlines()[0])
    assert begun["loaded"].endswith("step_00000010")

    start("train.steps=2")

    assert "resumed from step_00000001" in capsys.readouterr().out


def test_names_of_there_become_names_of_here(start, source):
    rename = 'checkpoint.load.rename={"blocks.0.*"="blocks.1.*", "blocks.1.*"="blocks.0.*"}'
    begun, saved = start(rename, 'checkpoint.load.include=["*"]'), _tensors(source)

    for key in ("attention.q.weight", "feed_forward.up.weight"):
        for one, other in ((0, 1), (1, 0)):
            assert torch.equal(begun[f"model.blocks.{one}.{key}"], saved[f"model.blocks.{other}.{key}"])
            state = [f"optimizer.blocks.{block}.{key}.exp_avg" for block in (one, other)]
            assert torch.equal(begun[state[0]], saved[state[1]])
    assert torch.equal(begun["model.embed.weight"], saved["model.embed.weight"])
    assert _accounts(start)["fresh"] == []


def test_state_goes_to_the_parameter_that_has_the_new_name_though_another_has_the_old_one(start, source):
    rename = 'checkpoint.load.rename={"blocks.1.*"="blocks.0.*"}'
    begun = start(rename, 'checkpoint.load.include=["optimizer.blocks.1.*"]')
    saved = _tensors(source)

    state = {key for key in begun if key.startswith("optimizer.")}
    assert state
    assert all(torch.equal(begun[key], saved[key.replace("blocks.0.", "blocks.1.")]) for key in state)
    assert all(".blocks.0." in key for key in state)


def test_the_longest_name_counts_also_after_the_job_has_been_written(start, source):
    swap = 'checkpoint.load.rename={"blocks.*"="blocks.*", "blocks.0.*"="blocks.1.*", "blocks.1.*"="blocks.0.*"}'
    begun, saved = start(swap), _tensors(source)

    assert torch.equal(begun["model.blocks.0.attention.q.weight"], saved["model.blocks.1.attention.q.weight"])


@pytest.mark.parametrize("layout", [["parallel.pp=2"], []], ids=["pipeline", "sharded"])
def test_every_rank_reads_its_own_part(shared_tiny, source, layout, training_values):
    load = [f"checkpoint.load.path={source}", 'checkpoint.load.include=["*"]', "train.steps=3"]
    load += ['checkpoint.load.rename={"blocks.0.*"="blocks.1.*", "blocks.1.*"="blocks.0.*"}']
    alone = shared_tiny.completed("run.name=alone", *load)
    name = f"run.name=ranks-{len(layout)}"
    together = shared_tiny.completed(
        name, "--nproc", "2", "train.batch_size=2", "train.global_batch_size=4", *layout, *load
    )

    for one, other in zip(training_values(together), training_values(alone), strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_parts_of_several_runs_come_together(start, source, shared_tiny, capsys):
    shared_tiny.completed("run.name=other", "train.seed=7")
    other = shared_tiny.path("other")
    parts = [
        f'{{path="{source}", include=["model.blocks.*"]}}',
        f'{{path="{other}", include=["model.embed.*", "model.head.*"]}}',
    ]
    begun = start(f"checkpoint.load=[{', '.join(parts)}]")
    saved, saved_other = _tensors(source), _tensors(other / "checkpoints" / "step_00000010")

    assert torch.equal(begun["model.blocks.0.attention.q.weight"], saved["model.blocks.0.attention.q.weight"])
    assert torch.equal(begun["model.embed.weight"], saved_other["model.embed.weight"])
    first, second = _accounts(start)["loads"]
    assert (len(first["loaded"]), second["loaded"]) == (22, ["model.embed.weight", "model.head.weight"])
    assert first["fresh"] == second["fresh"] == ["model.norm.weight"]
    assert "not loaded, with their first values: 1 tensors (model.norm.weight)" in capsys.readouterr().out


def test_a_tensor_of_two_runs_is_refused(start, source, capfd):
    assert start(f'checkpoint.load=[{{path="{source}"}}, {{path="{source}", include=["model.head.*"]}}]') == 2
    assert "checkpoint.load[1]: checkpoint.load[0] loads 1 tensors (model.head.weight)" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (['checkpoint.load.rename={"blocks.*"="x"}'], "'x' must have as many '*' as 'blocks.*'"),
        (['checkpoint.load.rename={"bloks.*"="x.*"}'], "checkpoint.load.rename: 'bloks.*' means nothing in"),
        (['checkpoint.load.rename={"blocks.*.q.weight"="a.*", "blocks.*.k.weight"="a.*"}'], "would both be model.a."),
        (['checkpoint.load.rename={"*"="other.*"}'], "has a place in this run: 25 tensors (model.other."),
        (["model.dim=64"], "model.embed.weight has shape (257, 64), in the checkpoint (257, 32)"),
        (["train.precision=bf16_pure"], "has dtype torch.bfloat16, in the checkpoint torch.float32"),
        (['checkpoint.load.include=["model.bloks.*"]'], "'model.bloks.*' means nothing in"),
        (['checkpoint.load.exclude=["optimiser.*"]'], "checkpoint.load.exclude: 'optimiser.*' means nothing"),
        (['checkpoint.load.exclude=["model.*"]'], "leaves nothing of include = ['model.*']"),
        (['checkpoint.load.include=["*"]', 'checkpoint.load.exclude=["*.exp_avg"]'], "needs all of it or none"),
        (
            ["checkpoint.load.path=nowhere"],
            "checkpoint.load.path=nowhere: checkpoint.load.path: there is no directory nowhere",
        ),
        (["checkpoint.load.path=/dev/null"], "there is no directory /dev/null; give a run's directory"),
        (["--resume", "0"], "checkpoint.load: has no effect"),
    ],
)
def test_what_cannot_be_loaded_is_refused_by_name_and_nothing_is_written(start, capfd, settings, said):
    assert start(*settings) == 2

    assert said in capfd.readouterr().err
    assert not start.path.exists()


def test_state_of_another_optimizer_is_refused(start, source, rewrite_job, tmp_path, capfd):
    foreign = rewrite_job(shutil.copytree(source, tmp_path / "foreign"), "forge-plugins-optim:adamw", "acme-optim:jay")

    assert start(f"checkpoint.load.path={foreign}", 'checkpoint.load.include=["*"]') == 2

    said = capfd.readouterr().err
    assert "has state of the optimizer acme-optim:jay, and this job has forge-plugins-optim:adamw" in said


def test_tensors_are_loaded_without_the_code_of_the_plugins_that_made_them(start, source, rewrite_job, tmp_path, capfd):
    foreign = rewrite_job(
        shutil.copytree(source, tmp_path / "foreign"),
        "forge-plugins-dense:transformer",
        "acme:jay",
        acme="0.3",
        bystander="1",
    )

    start(f"checkpoint.load.path={foreign}")

    assert len(_accounts(start)["loaded"]) == 25
    assert main(["generate", str(foreign)]) == 2
    said = capfd.readouterr().err
    assert "was written with acme 0.3, which is not installed" in said
    assert "bystander" not in said  # it was installed, and not used
