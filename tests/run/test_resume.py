"""Resume is exact: bit-identical on the same layout."""

from pathlib import Path

import pytest
import torch

from forge_core.checkpoint.store import open_checkpoint
from forge_core.cli import main


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
def test_ten_steps_then_ten_more_equal_twenty(shared_tiny, training_values, layout):
    overrides = [*LAYOUTS[layout], "scheduler.decay_steps=20"]  # the same schedule, however many steps are asked for
    name = layout.replace(" ", "-").replace(",", "")

    straight = shared_tiny.completed(*overrides, f"run.name={name}-straight", "train.steps=20")
    shared_tiny.completed(*overrides, f"run.name={name}-halved", "train.steps=10")
    resumed = shared_tiny.completed(*overrides, f"run.name={name}-halved", "train.steps=20")

    assert training_values(resumed) == training_values(straight)
    checkpoints = [shared_tiny.path(f"{name}-{half}") / "checkpoints/step_00000020" for half in ("straight", "halved")]
    assert_same_checkpoint(*checkpoints)


def test_a_run_of_two_ranks_goes_on_in_one_process_with_the_same_samples_and_losses(shared_tiny):
    whole = ["scheduler.decay_steps=20", "train.global_batch_size=4"]
    straight = shared_tiny.completed(*whole, "run.name=one-process", "train.steps=20")
    two = ["--nproc", "2", "train.batch_size=2", "eval.interval=5"]

    shared_tiny.completed(*whole, *two, "run.name=two-then-one", "train.steps=10")
    moved = shared_tiny.completed(*whole, "run.name=two-then-one", "train.steps=20")

    losses = [line for line in moved if "loss" in line]
    assert [line["step"] for line in losses] == list(range(1, 21))
    for line, reference in zip(losses, straight, strict=True):
        assert line["loss"] == pytest.approx(reference["loss"], rel=1e-5)
        assert line["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-5)


def test_a_checkpoint_from_before_a_key_of_the_model_is_held_to_its_default(shared_tiny, rewrite_job, capfd):
    """Plugins get new keys, and a run of weeks is not to end with an update."""
    shared_tiny.completed("run.name=updated", "train.steps=10")
    rewrite_job(shared_tiny.path("updated") / "checkpoints/step_00000010", "tie_embeddings = false\n", "")

    again = ["run", str(shared_tiny.config), "run.name=updated", "train.steps=12"]
    assert main([*again, "model.tie_embeddings=true"]) == 2
    assert "model.tie_embeddings: False -> True" in capfd.readouterr().err
    assert main(again) == 0
    assert shared_tiny.metrics("updated")[-1]["step"] == 12


def test_a_checkpoint_whose_model_has_a_key_that_is_gone_is_refused_by_its_name(shared_tiny, rewrite_job, capfd):
    shared_tiny.completed("run.name=outdated", "train.steps=10")
    checkpoint = shared_tiny.path("outdated") / "checkpoints/step_00000010"
    rewrite_job(checkpoint, "tie_embeddings = false\n", "tie_embeddings = false\nknots = 3\n")

    assert main(["run", str(shared_tiny.config), "run.name=outdated", "train.steps=12"]) == 2
    assert "model.knots: 3 -> not set" in capfd.readouterr().err
