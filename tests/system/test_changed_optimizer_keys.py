"""A run goes on where a key of its optimizer has changed that decides what state it keeps."""

import pytest

from forge_core.checkpoint.store import open_checkpoint

PURE = ('train.precision="bf16_pure"', "optimizer={{name='adamw', lr=1e-2, stochastic_rounding={}}}")
ROUNDING = ('train.precision="bf16_pure"', "optimizer={{name='adamw', lr=1e-2, rounding='{}'}}")
SGD_ROUNDING = ('train.precision="bf16_pure"', "optimizer={{name='sgd', lr=1e-2, rounding='{}'}}")
ADAFACTOR = ("optimizer={{name='adafactor', lr=1e-2, beta1={}}}",)
EIGHT_BIT = ("optimizer={{name='adamw_8bit', lr=1e-2, min_elements={}}}",)
SGD = ("optimizer={{name='sgd', lr=1e-2, momentum={}, nesterov=false}}",)
MATRIX = "blocks.0.attention.q.weight"


@pytest.mark.parametrize(
    ("settings", "before", "after", "slots"),
    [
        (ADAFACTOR, "0.0", "0.9", {"step", "row", "column", "momentum"}),
        (ADAFACTOR, "0.9", "0.0", {"step", "row", "column"}),
        (EIGHT_BIT, "4096", "64", {"step", "momentum", "square"}),
        (EIGHT_BIT, "64", "4096", {"step", "momentum", "momentum_scale", "square", "square_scale"}),
        (SGD, "0.9", "0.0", set()),
        (SGD, "0.0", "0.9", {"momentum"}),
        (PURE, "true", "false", {"step", "exp_avg", "exp_avg_sq"}),
        (PURE, "false", "true", {"step", "exp_avg", "exp_avg_sq"}),
        (ROUNDING, "nearest", "split", {"step", "exp_avg", "exp_avg_sq", "tail"}),
        (ROUNDING, "split", "nearest", {"step", "exp_avg", "exp_avg_sq"}),
        (ROUNDING, "split", "stochastic", {"step", "exp_avg", "exp_avg_sq"}),
        (SGD_ROUNDING, "split", "nearest", {"momentum"}),
    ],
)
def test_a_run_goes_on(shared_tiny, settings, before, after, slots):
    name = f"{settings[-1].split(chr(39))[1]}-{before}-{after}"
    given = ["scheduler.decay_steps=8", "scheduler.warmup_steps=1", f"run.name={name}"]
    changed = [[one.format(value) for one in settings] for value in (before, after)]

    shared_tiny.completed(*given, *changed[0], "train.steps=2")
    lines = shared_tiny.completed(*given, *changed[1], "train.steps=4")

    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 4
    assert losses[3] < losses[0]
    kept = open_checkpoint(shared_tiny.path(name) / "checkpoints/step_00000004").saved_tensors()
    prefix = f"optimizer.{MATRIX}."
    assert {key.removeprefix(prefix) for key in kept if key.startswith(prefix)} == slots
