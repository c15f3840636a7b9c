"""Resume is exact: bit-identical on the same layout."""

from pathlib import Path

import pytest
import torch

from forge_core.checkpoint.store import open_checkpoint


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
