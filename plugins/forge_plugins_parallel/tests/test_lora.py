"""Low-rank adapters: what they compute, what they leave alone, and how a checkpoint is used without them. Layouts are
in ``tests/parity``."""

import json

import attrs
import pytest
import torch
from torch import nn

from forge_core.checkpoint.store import open_checkpoint
from forge_core.cli import main
from forge_core.contracts.parallel_pass import PassContext
from forge_core.distributed.mesh import build_mesh, join_process_group
from forge_core.errors import ConfigError
from forge_core.registry.discovery import discover
from forge_core.train.build import materialise
from forge_plugins_parallel.config import LoraConfig
from forge_plugins_parallel.lora import Lora
from forge_plugins_weights.loading import load_model
from forge_testing.parallel_pass import ParallelPassConformance
from forge_testing.small_model import SEQ_LEN, SmallModel, cross_entropy, small_job

CPU = torch.device("cpu")


class TestEverywhere(ParallelPassConformance):
    component = "forge-plugins-parallel:lora"
    config = {"rank": 3}
    changes_parameters = True


class TestInSomeLayers(TestEverywhere):
    config = {"rank": 3, "include": ["blocks.1.*"]}


@pytest.fixture
def adapted():
    """Makes a small model with adapters that are not zero, and its pass."""
    join_process_group(CPU)

    def adapted(model=None, **config):
        if model is None:
            with torch.device("meta"):
                model = SmallModel()
        lora, job = Lora(LoraConfig(**config)), small_job()
        lora.add(model)
        lora.apply(model, PassContext(build_mesh(job, CPU), job, CPU))
        materialise(model, CPU, seed=0)
        generator = torch.Generator().manual_seed(1)
        for name, parameter in model.named_parameters():
            if name.endswith("adapter.up"):
                parameter.data.uniform_(-0.3, 0.3, generator=generator)
        return model, lora

    yield adapted
    torch.distributed.destroy_process_group()


def loss_of(model):
    generator = torch.Generator().manual_seed(0)
    tokens, targets = (torch.randint(32, (2, SEQ_LEN), generator=generator) for _ in range(2))
    return model(tokens, targets=targets, loss=cross_entropy).total


def test_loss_and_gradients_are_those_of_the_folded_matrices(adapted):
    model, lora = adapted(rank=3, alpha=6.0)
    named = dict(model.named_parameters())
    plain = SmallModel()
    weights = {name: one.detach() for name, one in named.items() if ".adapter." not in name}
    for name, folded in lora.folded(named).items():
        weights[name] = folded.make(*(named[one].detach() for one in folded.reads))
        assert not torch.equal(weights[name], named[name])
    plain.load_state_dict(weights)

    loss, expected = loss_of(model), loss_of(plain)
    loss.backward()
    expected.backward()

    torch.testing.assert_close(loss, expected)
    of_matrices = dict(plain.named_parameters())
    layers = {name.removesuffix(".adapter.up") for name in named if name.endswith(".adapter.up")}
    assert {f"{layer}.weight" for layer in layers} == set(lora.folded(named))
    for layer in layers:  # d(W + s U D): dU = s dW Dᵀ, dD = s Uᵀ dW
        up, down, of_matrix = (
            named[f"{layer}.adapter.up"],
            named[f"{layer}.adapter.down"],
            of_matrices[f"{layer}.weight"],
        )
        torch.testing.assert_close(up.grad, 2.0 * of_matrix.grad @ down.detach().T)
        torch.testing.assert_close(down.grad, 2.0 * up.detach().T @ of_matrix.grad)


def test_nothing_but_adapters_is_trained(adapted):
    model, _ = adapted(rank=2, include=("*.query", "blocks.0.*"), exclude=("blocks.2.*",))

    loss_of(model).backward()

    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    layers = {
        name.removesuffix(end) for name in trained for end in (".adapter.up", ".adapter.down") if name.endswith(end)
    }
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert layers == {
        name for name in linear if not name.startswith("blocks.2.") and name.startswith(("blocks.0.", "blocks.1.query"))
    }


def test_flops_are_four_a_frozen_weight_and_six_a_trained_one(adapted):
    model, _ = adapted(rank=2)
    plain = SmallModel()

    frozen = sum(
        one.numel() for name, one in plain.named_parameters() if plain.parameter_roles()[name] in ("matrix", "head")
    )
    added = sum(one.numel() for name, one in model.named_parameters() if ".adapter." in name)
    assert model.flops_per_token(SEQ_LEN) == plain.flops_per_token(SEQ_LEN) - 2 * frozen + 6 * added


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            {"include": ("blocks.0.quary",)},
            "lora.include: 'blocks.0.quary' means no linear layer of a block; did you mean 'blocks.0.query'",
        ),
        ({"exclude": ("head",)}, "lora.exclude: 'head' means no linear layer of a block"),
        ({"exclude": ("blocks.*",)}, r"lora.exclude: leaves nothing of include = \['\*'\]"),
    ],
)
def test_patterns_that_mean_nothing_are_refused(keys, sentence):
    with torch.device("meta"):
        model = SmallModel()

    with pytest.raises(ConfigError, match=sentence):
        Lora(LoraConfig(**keys)).add(model)


def test_a_stage_without_an_adapter_is_refused():
    with torch.device("meta"):
        model = SmallModel()
    lora = Lora(LoraConfig(include=("blocks.0.*",)))
    lora.add(model)
    del model.blocks["0"]

    with pytest.raises(ConfigError, match="a pipeline stage holds none of the layers that are adapted"):
        lora.apply(model, None)


MODEL = ["name=transformer", "dim=32", "n_layers=2", "n_heads=4", "max_seq_len=64"]
SETTINGS = [
    *(f"model.{one}" for one in MODEL),
    *("data.name=text_files", "data.path=texts", "data.tokenizer=bytes", "loss=cross_entropy"),
    *("train.seq_len=16", "train.batch_size=2", "train.precision=fp32", "scheduler=constant"),
    *("optimizer.name=adamw", "optimizer.lr=1e-2", "run.device=cpu", "metrics.interval=1", "checkpoint.interval=2"),
    *("eval.interval=4", "eval.batches=2", "data.validation=0.3"),
]
LORA = "parallel.passes.lora.rank=2"


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """Gives the exit code and the output of a run."""
    monkeypatch.chdir(tmp_path)
    for part in range(4):
        text = "".join(f"{n} and {n * n}. " for n in range(100 * part, 100 * part + 100))
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{part}.txt").write_text(text)
    (tmp_path / "job.toml").write_text("")

    def run(name, *overrides, command="run"):
        subject = "job.toml" if command == "run" else f"runs/{name}"
        more = [f"run.name={name}", *SETTINGS, *overrides] if command == "run" else overrides
        code = main([command, subject, *more])
        printed = capfd.readouterr()
        return code, printed.out + printed.err

    return run


def model_of(run):
    checkpoint = open_checkpoint(next(path.resolve() for path in run.glob("checkpoints/latest")))
    return checkpoint, {key: checkpoint.read(key) for key in checkpoint.saved_tensors()}


def test_a_run_trains_adapters_goes_on_and_is_used_without_them(tmp_path, run):
    code, said = run("base", "train.steps=4")
    assert code == 0, said
    base = tmp_path / "runs/base"
    load = f"checkpoint.load.path={base}"

    code, said = run("tuned", "train.steps=4", load, LORA)
    assert code == 0, said
    assert "not loaded, with their first values: 28 tensors" in said
    code, said = run("tuned", "train.steps=6", load, LORA)
    assert code == 0, said
    assert run("straight", "train.steps=6", load, LORA, "eval.interval=6")[0] == 0

    (_, before), (checkpoint, after) = model_of(base), model_of(tmp_path / "runs/tuned")
    assert all(torch.equal(after[key], one) for key, one in before.items() if key.startswith("model."))
    assert {key.split(".adapter.")[0] for key in after if key.startswith("optimizer.")} == {
        f"optimizer.blocks.{layer}.{one}"
        for layer in range(2)
        for one in ("attention.q", "attention.k", "attention.v", "attention.o", *(f"feed_forward.{x}" for x in FF))
    }
    _, straight = model_of(tmp_path / "runs/straight")
    assert straight.keys() == after.keys()
    assert all(torch.equal(after[key], one) for key, one in straight.items())

    model = load_model(checkpoint, lambda _: discover(), CPU, None).model
    changed = {name for name, one in model.named_parameters() if not torch.equal(one, after[f"model.{name}"])}
    assert len(changed) == 14
    code, said = run("tuned", command="eval")
    lines = [json.loads(line) for line in (tmp_path / "runs/straight/metrics.jsonl").read_text().splitlines()]
    assert f"{lines[-1]['eval/loss']:.5f}" in said
    with torch.no_grad():
        assert model(torch.arange(8)[None]).shape == (1, 8, 257)


FF = ("gate", "up", "down")


def test_what_would_change_the_model_unseen_is_refused(tmp_path, run):
    assert run("tuned", "train.steps=2", LORA)[0] == 0
    load = f"checkpoint.load.path={tmp_path / 'runs/tuned'}"

    code, said = run("tuned", "train.steps=4", LORA, "parallel.passes.lora.alpha=4.0")
    assert (code, "parallel.passes.lora.alpha: 32.0 -> 4.0" in said) == (2, True), said
    code, said = run("tuned", "train.steps=4")
    assert (code, "the model has no parameter blocks.0.attention.q.adapter.down" in said) == (2, True), said
    code, said = run("whole", "train.steps=2", load)
    assert (code, "was trained with the pass lora, whose parameters this job has not" in said) == (2, True), said
    assert run("again", "train.steps=2", load, LORA)[0] == 0
    code, said = run("louder", "train.steps=2", load, LORA, "parallel.passes.lora.alpha=4.0")
    assert (code, "has the pass lora with the scale 16.0, and this job with 2.0; restore" in said) == (2, True), said
    attention_alone = [load, LORA, "parallel.passes.lora.include=['*.attention.*']"]
    code, said = run("half", "train.steps=2", *attention_alone)
    assert (code, "adds to model.blocks.0.feed_forward.down.weight, and has no place" in said) == (2, True), said
    left_out = "checkpoint.load.exclude=['model.*feed_forward*.adapter.*', 'optimizer.*']"
    assert run("half", "train.steps=2", *attention_alone, left_out)[0] == 0
    code, said = run("scaled", "train.steps=2", LORA, "parametrization={name='mup', base={dim=16}}")
    assert (code, "adapters have no place in a parametrization" in said) == (2, True), said


def test_it_comes_after_fp8_and_is_known_to_add_parameters():
    component = discover().lookup("parallel_pass", "lora").component

    assert (component.phase, component.after, component.adds_parameters) == ("swap", ("fp8",), True)
    assert attrs.fields_dict(LoraConfig).keys() == {"rank", "alpha", "include", "exclude"}


def test_averages_of_adapters_are_what_is_folded(tmp_path, run):
    code, said = run("averaged", "train.steps=4", "callbacks=[{name='ema', decay=0.5}]", LORA)
    assert code == 0, said
    checkpoint, saved = model_of(tmp_path / "runs/averaged")
    layer = "blocks.1.attention.q"

    for weights, namespace in (("training", "model"), ("evaluation", "evaluation"), (None, "evaluation")):
        model = load_model(checkpoint, lambda _: discover(), CPU, None, weights).model
        up, down = (saved[f"{namespace}.{layer}.adapter.{one}"] for one in ("up", "down"))
        expected = saved[f"model.{layer}.weight"] + 16.0 * up @ down
        torch.testing.assert_close(model.get_parameter(f"{layer}.weight").data, expected)
    assert not torch.equal(saved[f"model.{layer}.adapter.up"], saved[f"evaluation.{layer}.adapter.up"])
