"""Resume is exact: bit-identical on the same layout."""

import gc
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from forge_core.checkpoint.store import open_checkpoint
from forge_core.cli import main
from forge_core.errors import ConfigError, ExitCode
from forge_core.job import load_job
from forge_core.registry.discovery import discover
from forge_core.run.global_batch import with_global_batch
from forge_core.train.trainer import Trainer


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    entries = open_checkpoint(checkpoint).saved_tensors()
    tensors = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in entries.items()}
    open_checkpoint(checkpoint).load(tensors)
    return tensors


def assert_same_checkpoint(one: Path, other: Path) -> None:
    first, second = tensors_of(one), tensors_of(other)
    assert first.keys() == second.keys()
    assert any(key.startswith("optimizer.") for key in first)
    differing = [key for key in first if not torch.equal(first[key], second[key])]
    assert differing == []


LAYOUTS = {
    "shuffled, no workers": ["data.workers=0"],
    "in order, two workers": ["data.shuffle=false", "data.workers=2"],
    "packed": ["data.document_mask=true"],
    "accumulated": ["train.grad_accumulation=2", "train.batch_size=2"],
    "bf16 through fsdp": ["train.precision=bf16"],
    "evaluated before it is saved": ["train.precision=bf16", "eval.interval=5"],
    "two ranks, evaluated": ["--nproc", "2", "train.batch_size=2", "eval.interval=5"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_five_steps_then_five_more_equal_ten(shared_tiny, training_values, layout):
    overrides = [*LAYOUTS[layout], "scheduler.decay_steps=10"]  # the same schedule, however many steps are asked for
    name = layout.replace(" ", "-").replace(",", "")

    straight = shared_tiny.completed(*overrides, f"run.name={name}-straight", "train.steps=10")
    shared_tiny.completed(*overrides, f"run.name={name}-halved", "train.steps=5")
    resumed = shared_tiny.completed(*overrides, f"run.name={name}-halved", "train.steps=10")

    assert training_values(resumed) == training_values(straight)
    checkpoints = [shared_tiny.path(f"{name}-{half}") / "checkpoints/step_00000010" for half in ("straight", "halved")]
    assert_same_checkpoint(*checkpoints)


@pytest.mark.parametrize("load", [False, True], ids=["resumed", "loaded"])
def test_where_tensors_lie_in_a_checkpoint_is_not_kept_while_it_trains(tiny, monkeypatch, load):
    """Of thousands of ranks, it is gigabytes on each."""
    assert main(["run", str(tiny.config), "train.steps=3"]) == 0
    train_step, kept = Trainer._train_step, []

    def step(self, microbatches):
        kept.append(sum(isinstance(one, Metadata) for one in gc.get_objects()))
        return train_step(self, microbatches)

    monkeypatch.setattr(Trainer, "_train_step", step)
    more = ["run.name=loaded", f"checkpoint.load.path={tiny.path()}"] if load else []
    assert main(["run", str(tiny.config), "train.steps=4", *more]) == 0

    assert kept[0] == 0


def test_a_run_of_two_ranks_goes_on_in_one_process_with_the_same_samples_and_losses(shared_tiny):
    whole = ["scheduler.decay_steps=10", "train.global_batch_size=4"]
    straight = shared_tiny.completed(*whole, "run.name=one-process", "train.steps=10")
    two = ["--nproc", "2", "train.batch_size=2", "eval.interval=5"]

    shared_tiny.completed(*whole, *two, "run.name=two-then-one", "train.steps=5")
    environment = json.loads((shared_tiny.path("two-then-one") / "environment.json").read_text())
    assert shlex.split(environment["command"])[:5] == ["forge", "run", str(shared_tiny.config), *whole]
    moved = shared_tiny.completed(*whole, "run.name=two-then-one", "train.steps=10")

    losses = [line for line in moved if "loss" in line]
    assert [line["step"] for line in losses] == list(range(1, 11))
    for line, reference in zip(losses, straight, strict=True):
        assert line["loss"] == pytest.approx(reference["loss"], rel=1e-5)
        assert line["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-5)


@pytest.fixture(scope="module")
def moved(shared_tiny):
    """Of two ranks with two sequences each, at step 4."""
    two = ["--nproc", "2", "train.batch_size=2", "scheduler.decay_steps=10", "run.name=moved"]
    shared_tiny.completed(*two, "train.steps=4")
    return shared_tiny


def test_the_global_batch_stays_on_another_number_of_ranks_without_being_asked_for(moved, capfd):
    schedule = "scheduler.decay_steps=10"
    straight = moved.completed(schedule, "train.batch_size=4", "run.name=straight", "train.steps=10")

    for steps in (6, 8):  # the second time, the checkpoint is one of an accumulation that nobody has asked for
        moved.completed(schedule, "train.batch_size=2", "run.name=moved", f"train.steps={steps}")
        assert "train.global_batch_size stays 4, as in step_000000" in capfd.readouterr().out
    back = moved.completed("--nproc", "2", schedule, "train.batch_size=2", "run.name=moved", "train.steps=10")

    assert [line["tokens"] for line in back] == [line["tokens"] for line in straight]
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in back] == pytest.approx([line[key] for line in straight], rel=1e-5)


@pytest.mark.parametrize(
    ("asked", "batch"),
    [
        (["train.batch_size=2"], (2, 4)),
        (["train.batch_size=1"], (1, 1)),
        (["train.batch_size=2", "train.grad_accumulation=3"], (3, 6)),
        (["train.batch_size=2", "train.global_batch_size=2"], (1, 2)),
    ],
)
def test_whoever_changes_a_key_of_the_batch_gets_what_he_asks_for(moved, asked, batch):
    job = load_job(moved.config, asked, catalog=discover(), world_size=1)
    checkpoint = open_checkpoint(moved.path("moved") / "checkpoints/step_00000004")

    train = with_global_batch(job, 1, checkpoint, lambda line: None).train

    assert (train.grad_accumulation, train.global_batch_size) == batch


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (4, r"2 × 4 = 8\. To keep it, set train.global_batch_size = 4 and train.batch_size = 1\. To go"),
        (3, r"2 × 3 = 6\. To go on with another one, set train.global_batch_size to a multiple of 6"),
    ],
)
def test_a_global_batch_that_the_ranks_cannot_make_up_is_refused_with_the_numbers(moved, ranks, said):
    job = load_job(moved.config, ["train.batch_size=2"], catalog=discover(), world_size=ranks)
    checkpoint = open_checkpoint(moved.path("moved") / "checkpoints/step_00000004")

    with pytest.raises(ConfigError, match=f"a global batch of 4 sequences, which is no multiple of .* = {said}"):
        with_global_batch(job, ranks, checkpoint, lambda line: None)


def test_a_checkpoint_from_before_a_key_of_the_model_is_held_to_its_default(shared_tiny, rewrite_job, capfd):
    """Plugins get new keys, and a run of weeks is not to end with an update."""
    shared_tiny.completed("run.name=updated", "train.steps=10")
    rewrite_job(shared_tiny.path("updated") / "checkpoints/step_00000010", "tie_embeddings = false\n", "")

    again = ["run", str(shared_tiny.config), "run.name=updated", "train.steps=12"]
    assert main([*again, "model.tie_embeddings=true"]) == 2
    assert "model.tie_embeddings: False -> True" in capfd.readouterr().err
    assert main(again) == 0
    assert shared_tiny.metrics("updated")[-1]["step"] == 12


def test_a_run_that_has_all_its_steps_says_so_before_it_complains_about_anything_else(shared_tiny, tmp_path, capfd):
    shared_tiny.completed("run.name=all-steps", "train.steps=3")
    capfd.readouterr()
    assert main(["run", str(shared_tiny.config), "run.name=all-steps", "train.steps=3"]) == 0
    assert "note:" not in capfd.readouterr().out, "it is the same job"

    changed = ["model.n_layers=1", f"data.path={tmp_path}/gone", "train.seq_len=16", "optimizer.lr=0.1"]
    assert main(["run", str(shared_tiny.config), "run.name=all-steps", "train.steps=3", *changed]) == 0

    first, note = capfd.readouterr().out.splitlines()[-2:]
    assert first == f"{shared_tiny.path('all-steps')} already has all 3 steps; nothing to do"
    assert re.match(r"note: it was trained with other keys \(.*model\.n_layers: 2 -> 1, .* -> 16", note)
    assert note.endswith("to train with these, choose another run.name")


def test_a_checkpoint_whose_model_has_a_key_that_is_gone_is_refused_by_its_name(shared_tiny, rewrite_job, capfd):
    shared_tiny.completed("run.name=outdated", "train.steps=10")
    checkpoint = shared_tiny.path("outdated") / "checkpoints/step_00000010"
    rewrite_job(checkpoint, "tie_embeddings = false\n", "tie_embeddings = false\nknots = 3\n")

    assert main(["run", str(shared_tiny.config), "run.name=outdated", "train.steps=12"]) == 2
    assert "model.knots: 3 -> unset" in capfd.readouterr().err


def test_a_run_whose_checkpoints_are_gone_is_not_begun_once_more_unasked(shared_tiny, training_values, capfd):
    name = "run.name=without-its-disk"
    before = training_values(shared_tiny.completed(name, "train.steps=3"))
    shutil.rmtree(shared_tiny.path("without-its-disk") / "checkpoints")

    assert main(["run", str(shared_tiny.config), name, "train.steps=3"]) == ExitCode.INVALID
    said = capfd.readouterr().err
    assert "without-its-disk/checkpoints has no checkpoint, and this run has saved step 3 there: is a disk mis" in said

    # a run that was begun afresh, and was killed before it had saved anything, begins once more
    afresh = shared_tiny.completed(name, "train.steps=3", "checkpoint.resume=never")
    assert training_values(afresh) == before
    events = shared_tiny.path("without-its-disk") / "events.jsonl"
    lines = events.read_text().splitlines()
    assert '"event": "saved"' in lines[-2]
    events.write_text("\n".join(lines[:-2]) + "\n")
    shutil.rmtree(shared_tiny.path("without-its-disk") / "checkpoints")

    assert training_values(shared_tiny.completed(name, "train.steps=3")) == before
