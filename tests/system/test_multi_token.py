"""Runs that predict further tokens: what they divide by, report and resume. Formulas are tested with the model, and
layouts in tests/parity."""

import pytest

from forge_core.checkpoint.store import open_checkpoint
from forge_core.cli import main
from forge_core.config.problems import ConfigProblems
from forge_core.job import load_job
from forge_core.registry.discovery import discover

AHEAD = ["model.multi_token={depths=2, weight=0.5}", "train.batch_size=2", "train.grad_accumulation=2"]
PACKED = ["data.document_mask=true", "train.seq_len=64"]


def test_a_loss_is_divided_by_the_targets_of_its_own_depth(shared_tiny):
    for line in shared_tiny.completed(*AHEAD, *PACKED, "run.name=valid"):
        for k, layer in ((1, 2), (2, 3)):
            mean = line[f"multi_token_loss/blocks.{layer}"]
            assert line[f"auxiliary/multi_token_{k}"] == pytest.approx(0.25 * mean, rel=1e-5)


def test_or_by_those_of_the_next_token(shared_tiny):
    lines = shared_tiny.completed(*AHEAD, "model.multi_token.normalizer=paper", "run.name=paper")

    for line in lines:
        for k, layer in ((1, 2), (2, 3)):
            mean = line[f"multi_token_loss/blocks.{layer}"]
            assert line[f"auxiliary/multi_token_{k}"] == pytest.approx(0.25 * mean * (32 - k) / 32, rel=1e-5)


def test_a_resumed_run_goes_on_bit_for_bit_and_generates_without_predictors(tiny, training_values, capfd):
    same_schedule = [*AHEAD, "scheduler.decay_steps=10"]
    straight = tiny.completed(*same_schedule, "run.name=straight")
    tiny.completed(*same_schedule, "run.name=cut", "train.steps=5")
    resumed = tiny.completed(*same_schedule, "run.name=cut")

    assert training_values(resumed) == training_values(straight)
    saved = open_checkpoint(tiny.path("cut") / "checkpoints" / "latest").saved_tensors()
    assert [name for name in saved if name.endswith("embed.weight") and name.startswith("model.")] == [
        "model.embed.weight"
    ]
    assert "model.blocks.3.eh_proj.weight" in saved
    assert main(["generate", str(tiny.path("cut")), "--prompt", "line", "--max-new-tokens", "4"]) == 0
    assert "line" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ("{depths=0}", "model.multi_token.depths: must be greater than 0, got 0"),
        ("{depths=32}", "model.multi_token.depths: no token is 32 ahead of another in train.seq_len = 32"),
        ("{weight=0.0}", "model.multi_token.weight: must be greater than 0"),
        ("{wieght=0.1}", "model.multi_token.wieght: unknown key; did you mean 'weight'?"),
        ('{normalizer="mean"}', 'model.multi_token.normalizer: the string "mean" is not allowed'),
        ('{predictor="sequentail"}', "Did you mean 'sequential'?"),
    ],
)
def test_what_cannot_be_predicted_is_refused(tiny, keys, sentence):
    with pytest.raises(ConfigProblems) as refused:
        load_job(tiny.config, [f"model.multi_token={keys}"], catalog=discover(), world_size=1)

    assert sentence in str(refused.value)


def test_weights_of_sources_are_refused_at_validation(tiny):
    """The run refused them, when it had opened its data."""
    sources = "[{name='a', weight=1, loss_weight=0.5, source={name='synthetic'}}]"
    with pytest.raises(ConfigProblems, match=r"model\.multi_token: .* a source of data has loss_weight = 0\.5"):
        load_job(
            tiny.config,
            ["model.multi_token={depths=1}", f"data={{name='mixture', sources={sources}}}"],
            catalog=discover(),
            world_size=1,
        )
