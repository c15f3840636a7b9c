"""An evaluation depends neither on later tokens nor on what is evaluated with them; where it does, that is said."""

import json

import pytest
import torch

from forge_core.cli import main
from forge_core.config.builder import ComponentBuilder
from forge_core.registry.discovery import discover
from forge_core.train.initialisation import SeededInitializer

CONFIG = """
[run]
name = "tiny"
dir = "{folder}/runs"

[model]
name = "transformer"
dim = 32
n_layers = 2
n_heads = 4
max_seq_len = 64
num_experts = 4

[data]
name = "text_files"
path = "{folder}"
pattern = "*.txt"
validation = 0.5

[train]
steps = 2
seq_len = 32
batch_size = 4

[optimizer]
name = "adamw"
lr = 1e-2

[eval]
interval = 1
"""
LOOKS_AHEAD = "model.moe.router={name='expert_choice'}"
PREDICTS = "model.moe.router={name='expert_choice', predictor=true}"


def layer(**keys):
    builder = ComponentBuilder(discover())
    with torch.device("meta"):
        made = builder(
            builder.resolve("feed_forward", {"name": "moe", "n_experts": 4, "hidden_dim": 24, **keys}),
            dim=16,
            layer=0,
            n_layers=2,
        )
    made.to_empty(device="cpu")
    made.init_weights(SeededInitializer(0), "blocks.0.feed_forward.", 0.3, 0.3)
    return made.eval()


def hidden(*shape):
    return torch.randn(*shape, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("predictor", [False, True])
@torch.no_grad()
def test_earlier_positions_are_moved_by_a_later_one_only_without_a_predictor(predictor):
    subject, states = layer(router={"name": "expert_choice", "predictor": predictor}), hidden(1, 20)
    sequence = torch.zeros(1, 20, dtype=torch.int64)
    others = states.clone()
    others[:, -1] = 5 * others[:, -1].roll(3)

    before, after = (subject(one, sequence=sequence)[:, :-1] for one in (states, others))

    assert torch.allclose(before, after, atol=1e-6) is predictor  # threads share out the work by the number of tokens
    assert subject.looks_ahead is not predictor
    assert subject.train().looks_ahead


@torch.no_grad()
def test_nothing_is_dropped_in_evaluation():
    limited, unlimited, states = layer(capacity_factor=0.5), layer(), hidden(4, 10)

    torch.testing.assert_close(limited(states), unlimited(states), rtol=0, atol=0)
    torch.testing.assert_close(limited(states)[:1], limited(states[:1]))
    assert not torch.allclose(limited.train()(states), unlimited.train()(states)), (
        "in training, there is no room for all"
    )


@pytest.fixture
def forge(tmp_path, capsys):
    (tmp_path / "tiny.toml").write_text(CONFIG.format(folder=tmp_path))
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("a line of some text, and another one\n" * 40)

    def forge(command, *overrides):
        code = main([command, str(tmp_path / "tiny.toml"), *overrides])
        said = capsys.readouterr()
        return code, said.out + said.err

    return forge


def test_an_evaluation_that_looks_ahead_is_told_at_validation_at_the_start_and_beside_the_number(forge, tmp_path):
    note = "note: model.moe.router.predictor: eval/loss looks ahead, as experts choose among later tokens"
    assert note in forge("validate", LOOKS_AHEAD)[1]
    code, said = forge("run", LOOKS_AHEAD)

    assert code == 0
    assert note in said
    assert said.count("looks ahead: later tokens are seen") == 2
    lines = [json.loads(line) for line in (tmp_path / "runs/tiny/metrics.jsonl").read_text().splitlines()]
    assert [line["eval/looks_ahead"] for line in lines if "eval/loss" in line] == [1, 1]
    assert main(["generate", str(tmp_path / "runs/tiny"), "--prompt", "a line", "--max-new-tokens", "2"]) == 2


def test_one_with_a_predictor_does_not(forge, tmp_path):
    code, said = forge("run", PREDICTS)

    assert code == 0
    assert "ahead" not in said
    assert main(["generate", str(tmp_path / "runs/tiny"), "--prompt", "a line", "--max-new-tokens", "2"]) == 0


def test_evaluation_does_not_depend_on_how_many_are_evaluated_together(forge, tmp_path):
    losses = []
    for size in (2, 4):
        more = [f"run.name=size{size}", f"train.batch_size={size}", "train.global_batch_size=4", "train.precision=fp32"]
        assert forge("run", "model.moe.capacity_factor=0.6", "optimizer.lr=1e-12", *more)[0] == 0
        lines = (tmp_path / f"runs/size{size}/metrics.jsonl").read_text().splitlines()
        losses.append(next(one["eval/loss"] for one in map(json.loads, lines) if "eval/loss" in one))

    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
