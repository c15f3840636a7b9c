"""The pass ``tuned_lens``: its loss by hand, what it trains, and the same in layouts."""

from __future__ import annotations

import copy
import json
import os
import sys

import pytest
import torch

import forge_plugins_interp as interp
import fork_server
from forge_core.checkpoint.contents import model_problem
from forge_core.checkpoint.store import find_checkpoint
from forge_core.cli import main
from forge_core.contracts.loss import IGNORED
from forge_core.errors import ConfigError
from forge_core.registry.discovery import discover
from forge_plugins_interp.interventions import Patch
from forge_plugins_interp.lenses.config import TunedLensConfig
from forge_plugins_interp.lenses.logit_lens import logit_lens
from forge_plugins_interp.lenses.tuned_lens import TunedLens, translators_of
from forge_plugins_weights.loading import load_model

TOKENS = torch.randint(0, 250, (2, 16), generator=torch.Generator().manual_seed(0))
TARGETS = TOKENS.roll(-1, 1).masked_fill(torch.arange(16) == 15, IGNORED)


@pytest.fixture
def session(run):
    """Of a model that multiplies between norm and head."""
    with interp.open(run, ["model.output_multiplier=0.5"]) as session:
        yield session


@pytest.fixture
def model(session):
    """With translators that do something."""
    model = copy.deepcopy(session.built.parts[0])
    TunedLens(TunedLensConfig()).add(model)
    generator = torch.Generator().manual_seed(1)
    for translator in translators_of(model).values():
        for tensor in (*translator.parameters(), translator.divergence):
            tensor.data.normal_(0, 0.1, generator=generator)
        translator.divergence.zero_()
    return model


def never(hidden, head, targets):
    raise AssertionError("a loss of its own")


def test_the_loss_is_the_divergence_of_what_each_layer_predicts(session, model):
    found = model(TOKENS, TARGETS, never)

    with torch.no_grad(), session.observe("blocks.*.resid_pre") as seen:
        own = session.model(TOKENS).double().log_softmax(-1)
    each = []
    for layer, translator in translators_of(model).items():
        value = seen[f"blocks.{layer}.resid_pre"]
        translated = value + value @ translator.weight.T + translator.bias
        with (
            torch.no_grad(),
            session.intervene(Patch("blocks.1.resid_post", source={"blocks.1.resid_post": translated})),
        ):
            log = session.model(TOKENS).double().log_softmax(-1)
        each.append((own.exp() * (own - log)).sum(-1) * (TARGETS != IGNORED))
    expected = torch.stack(each).mean(0)
    torch.testing.assert_close(found.each.double(), expected, atol=1e-5, rtol=1e-4)
    assert found.total.item() == pytest.approx(expected.sum().item(), rel=1e-4)
    assert found.count == 30


@pytest.mark.parametrize("settings", [["attention_dropout=0.5"], ["residual_dropout=0.5", "embedding_dropout=0.5"]])
def test_the_model_is_read_without_dropout_while_translators_are_trained(run, settings):
    with interp.open(run, [f"model.{one}" for one in settings]) as session:
        model = copy.deepcopy(session.built.parts[0])
    TunedLens(TunedLensConfig()).add(model)
    for translator in translators_of(model).values():
        for tensor in (*translator.parameters(), translator.divergence):
            tensor.data.zero_()
    as_evaluated = model.eval()(TOKENS, TARGETS, never)

    trained = model.train()(TOKENS, TARGETS, never)

    assert model.training
    assert torch.equal(trained.each, as_evaluated.each)
    sums = [translator.divergence.tolist() for translator in translators_of(model).values()]
    assert sum(total for total, _ in sums) / 2 == pytest.approx(trained.total.item(), rel=1e-5), "counted while trained"
    assert {count for _, count in sums} == {30}


def test_gradients_are_those_of_the_formula(model):
    model.double()
    own = copy.deepcopy(model)
    streams = []
    hooks = [
        block.register_forward_pre_hook(lambda block, args: streams.append(args[0].detach()))
        for block in own.blocks.values()
    ]
    with torch.no_grad():
        final = own(TOKENS).log_softmax(-1)
    for hook in hooks:
        hook.remove()
    total = 0
    for stream, translator in zip(streams, translators_of(own).values(), strict=True):
        log = own.head(own.norm(translator(stream)) * 0.5).log_softmax(-1)
        total = total + ((final.exp() * (final - log)).sum(-1) * (TARGETS != IGNORED)).sum() / 2

    total.backward()
    model(TOKENS, TARGETS, never).total.backward()

    for one, other in zip(translators_of(model).values(), translators_of(own).values(), strict=True):
        torch.testing.assert_close(one.weight.grad, other.weight.grad, atol=1e-5, rtol=1e-5)  # logits are fp32 inside
        torch.testing.assert_close(one.bias.grad, other.bias.grad, atol=1e-5, rtol=1e-5)
    others = [p.grad for name, p in model.named_parameters() if not name.startswith("lens.")]
    assert others == [None] * len(others)


def test_without_a_loss_the_model_predicts_as_ever(session, model):
    with torch.no_grad():
        assert torch.equal(model(TOKENS), session.model(TOKENS))


def test_translators_are_a_mean_of_a_token(model):
    model.train()
    found = model(TOKENS, TARGETS, never)
    for translator in translators_of(model).values():
        translator.before_optimizer_step(translator.accumulators(), 0.5)

    values = [translator.step_metrics()["kl"] for translator in translators_of(model).values()]
    assert torch.stack(values).mean().item() == pytest.approx((found.total / found.count).item(), rel=1e-5)


def test_a_step_without_targets_has_no_divergence(model):
    model.train()
    model(TOKENS, torch.full_like(TARGETS, IGNORED), never)
    for translator in translators_of(model).values():
        translator.before_optimizer_step(translator.accumulators(), 0.5)
        assert translator.step_metrics()["kl"].item() == 0.0


def train(run, name, *settings, code=0):
    command = [sys.executable, "-m", "forge_core", "run", "job.toml", f"run.name={name}"]
    keys = [
        f"checkpoint.load.path={run}",
        "loss.name=own",
        "parallel.passes.tuned_lens={}",
        "train.steps=20",
        "train.global_batch_size=4",
        "metrics.interval=1",
        "optimizer.weight_decay=0.0",
    ]
    done = fork_server.run(
        [*command, *keys, *settings],
        cwd=run.parent.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def logged(run, name):
    lines = map(json.loads, (run.parent / name / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def tuned(run):
    train(run, "lens")
    return run.parent / "lens"


def test_layers_predict_more_of_what_the_model_predicts(run, tuned):
    first, *_, last = logged(run, "lens")

    assert last["loss"] < 0.8 * first["loss"]
    assert last["kl/lens.0"] < first["kl/lens.0"]
    assert last["loss"] == pytest.approx((last["kl/lens.0"] + last["kl/lens.1"]) / 2, rel=1e-4)


def test_the_model_is_frozen_and_used_without_the_lens(run, tuned):
    def weights(path):
        checkpoint = find_checkpoint(path, print, model_problem)
        return load_model(checkpoint, lambda *_: discover(), torch.device("cpu"), None).model.state_dict()

    before, after = weights(run), weights(tuned)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(["parallel.dp_shard=2"], marks=pytest.mark.nightly), ["parallel.cp=2"]],
    ids=["fsdp2", "cp2"],
)
def test_every_layout_trains_the_same(run, tuned, layout):
    name = f"lens-{layout[0][-4:-2]}"
    train(run, name, "--nproc", "2", *layout)

    for one, other in zip(logged(run, name), logged(run, "lens"), strict=True):
        for key in ("loss", "kl/lens.0", "kl/lens.1"):
            assert one[key] == pytest.approx(other[key], rel=1e-3), (one["step"], key)


def test_the_lens_reads_through_translators(run, tuned, capsys):
    with interp.open(run) as plain:
        without = logit_lens(plain, TOKENS)
    with interp.open(tuned) as session:
        found = logit_lens(session, TOKENS)
        before = logit_lens(session, TOKENS, ["blocks.1.resid_pre"])["blocks.1.resid_pre"]
        with torch.no_grad():
            own = session.model(TOKENS)
        with pytest.raises(ConfigError, match=r"site blocks.0.resid_mid: a tuned lens has translators for"):
            logit_lens(session, TOKENS, ["blocks.0.resid_mid"])

    assert torch.equal(found["blocks.1.resid_post"], own)
    assert torch.equal(found["blocks.0.resid_post"], before)
    log = own.log_softmax(-1)

    def divergence(logits):
        return (log.exp() * (log - logits.log_softmax(-1))).sum(-1).mean()

    assert divergence(found["blocks.0.resid_post"]) < 0.9 * divergence(without["blocks.0.resid_post"])
    assert main(["lens", str(tuned), "--prompt", "line 5"]) == 0
    assert "blocks.0.resid_post" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["loss.name=cross_entropy"], "has a loss of its own, so that loss.name = 'cross_entropy' has no effect"),
        (["--nproc", "2", "parallel.tp=2"], "each rank predicts from every layer, which parallel.tp shares out"),
        (["parallel.passes.compile={}"], "it looks at what compiled blocks read"),
        (["model.multi_token.depths=1"], "the model predicts further tokens as well"),
    ],
)
def test_bad_input_is_a_sentence(run, settings, message):
    assert message in " ".join(train(run, "refused", *settings, code=2).split())
