"""Parametrizations, applied to a decoder: what each parameter begins with, and the rate that it is trained with."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from forge_core.config.builder import ComponentBuilder
from forge_core.contracts.parallel_pass import PassContext
from forge_core.contracts.parametrization import ModelSize, SizedParameter
from forge_core.distributed.mesh import build_mesh, join_process_group
from forge_core.errors import ConfigError
from forge_core.job import load_job
from forge_core.registry.discovery import discover
from forge_core.train.build import build_model, build_optimizer
from forge_plugins_optim.maximal_update import CompleteP, MaximalUpdate
from forge_plugins_optim.parametrization_config import CompletePConfig, MupConfig

WIDE = ["model.dim=256", "model.n_layers=8", "model.feed_forward.hidden_dim=1024"]
"""Four times as wide, and as deep, as the base."""
BASE = "dim=64, n_layers=2, feed_forward={hidden_dim=256}"
JOB = """
[model]
name = "transformer"
dim = 64
n_layers = 2
n_heads = 4
feed_forward = { name = "mlp", hidden_dim = 256 }
[data]
name = "text_files"
path = "text"
tokenizer = "bytes"
[train]
steps = 4
seq_len = 16
precision = "fp32"
[optimizer]
name = "adamw"
lr = 1e-3
weight_decay = 0.1
eps = 1e-8
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parametrization")
    (folder / "job.toml").write_text(JOB)
    return folder


@pytest.fixture(scope="module")
def group():
    join_process_group(torch.device("cpu"), 60.0)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def build(folder, group):
    def build(*settings):
        catalog = discover()
        job = load_job(folder / "job.toml", settings, catalog=catalog, world_size=1)
        builder = ComponentBuilder(catalog)
        device = torch.device("cpu")
        model = build_model(PassContext(build_mesh(job, device), job, device), 257, [], builder)
        optimizer = build_optimizer(job, model, builder)
        names = {parameter: name for name, parameter in model.parameters.items()}
        groups = {names[one]: group for group in optimizer.param_groups for one in group["params"]}
        return SimpleNamespace(model=model.parts[0], parameters=model.parameters, groups=groups, optimizer=optimizer)

    return build


def parametrization(name, base=BASE):
    return f"parametrization={{name='{name}', base={{{base}}}}}"


def rates(built, name):
    group = built.groups[name]
    return group["lr"], group["weight_decay"], group["eps"]


def test_complete_p_gives_each_parameter_what_its_table_says(build):
    # Dey et al. 2025, table 1, with m_N = m_L = 4 and α = 1
    built = build(*WIDE, parametrization("complete_p"))

    for matrix in ("attention.q", "attention.o", "feed_forward.up", "feed_forward.down"):
        assert rates(built, f"blocks.3.{matrix}.weight") == pytest.approx((1e-3 / 4, 0.1 * 4, 1e-8 / 16))
    assert rates(built, "blocks.3.attention_norm.weight") == pytest.approx((1e-3, 0, 1e-8 / 16))
    assert rates(built, "embed.weight")[::2] == pytest.approx((1e-3, 1e-8 / 4))
    assert rates(built, "head.weight")[::2] == pytest.approx((1e-3, 1e-8 / 4))
    assert rates(built, "norm.weight") == pytest.approx((1e-3, 0, 1e-8 / 4))
    config = built.model.config
    assert (config.output_multiplier, config.residual_multiplier, config.attention_multiplier) == (0.25, 0.25, 0.5)
    expected = {"attention.q": 0.02 / 2, "feed_forward.down": 0.02 / 2 / math.sqrt(2 * 2)}  # two layers of the base
    for matrix, std in expected.items():
        assert built.parameters[f"blocks.3.{matrix}.weight"].std().item() == pytest.approx(std, rel=0.02)
    assert built.parameters["embed.weight"].std().item() == pytest.approx(0.02, rel=0.02)
    assert built.parameters["head.weight"].std().item() == pytest.approx(0.02, rel=0.02)


def test_mup_leaves_depth_to_the_model(build):
    built = build(*WIDE, parametrization("mup"))

    assert rates(built, "blocks.3.attention.q.weight") == pytest.approx((1e-3 / 4, 0.1 * 4, 1e-8 / 4))
    assert built.model.config.residual_multiplier == 1
    down = built.parameters["blocks.3.feed_forward.down.weight"]
    assert down.std().item() == pytest.approx(0.02 / 2 / math.sqrt(2 * 8), rel=0.02)


def test_multipliers_of_the_model_are_multiplied(build):
    own = ["model.output_multiplier=3.0", "model.residual_multiplier=3.0", "model.attention_multiplier=3.0"]
    config = build(*WIDE, parametrization("complete_p"), *own).model.config

    assert (config.output_multiplier, config.residual_multiplier, config.attention_multiplier) == (0.75, 0.75, 1.5)


@pytest.mark.parametrize("name", ["mup", "complete_p"])
def test_at_the_size_of_the_base_nothing_changes(build, name):
    plain, scaled = build(), build(parametrization(name))

    assert all(torch.equal(plain.parameters[one], scaled.parameters[one]) for one in plain.parameters)
    assert [rates(plain, one) for one in plain.parameters] == [rates(scaled, one) for one in plain.parameters]
    tokens = torch.randint(257, (2, 16))
    assert torch.equal(plain.model(tokens), scaled.model(tokens))


def test_standard_changes_nothing(build):
    plain, standard = build(*WIDE), build(*WIDE, "parametrization=standard")

    assert all(torch.equal(plain.parameters[one], standard.parameters[one]) for one in plain.parameters)
    assert standard.optimizer.param_groups[0]["lr"] == plain.optimizer.param_groups[0]["lr"]
    assert len(standard.optimizer.param_groups) == len(plain.optimizer.param_groups)


def test_multipliers_of_a_model_do_what_folding_them_into_its_weights_does(build):
    settings = ["output_multiplier=0.5", "residual_multiplier=0.25", "attention_multiplier=2.0"]
    plain, scaled = build(), build(*(f"model.{one}" for one in settings))
    tokens = torch.randint(257, (2, 16))

    logits = scaled.model(tokens)
    with torch.no_grad():
        plain.parameters["head.weight"].mul_(0.5)
        for layer in range(2):
            plain.parameters[f"blocks.{layer}.attention.q.weight"].mul_(2.0)
            plain.parameters[f"blocks.{layer}.attention.o.weight"].mul_(0.25)
            plain.parameters[f"blocks.{layer}.feed_forward.down.weight"].mul_(0.25)

    torch.testing.assert_close(logits, plain.model(tokens))


def test_every_member_of_grouped_has_the_rule_of_its_own_updates(build):
    muon = '{roles=["matrix"], optimizer={name="muon", lr=0.02}}'
    sgd = '{roles=["embedding"], optimizer={name="sgd", lr=0.1}}'
    lion = '{roles=["norm"], optimizer={name="lion", lr=1e-4}}'
    adamw = '{optimizer={name="adamw", lr=1e-3}}'
    groups = f"[{muon}, {sgd}, {lion}, {adamw}]"
    built = build(*WIDE, parametrization("mup"), f'optimizer={{name="grouped", groups={groups}}}')

    assert built.groups["blocks.0.attention.q.weight"]["lr"] == pytest.approx(0.02)  # spectral
    assert built.groups["embed.weight"]["lr"] == pytest.approx(0.1 * 4)
    assert built.groups["norm.weight"]["lr"] == pytest.approx(1e-4)  # it has no eps to be scaled
    assert built.groups["head.weight"]["lr"] == pytest.approx(1e-3)


def sized(role="matrix", shape=(1024, 256), base_shape=(256, 64), name="blocks.0.up"):
    sizes = (ModelSize(dim=256, n_layers=8, head_size=64), ModelSize(dim=64, n_layers=2, head_size=16))
    return SizedParameter(
        name=name, role=role, shape=torch.Size(shape), base_shape=torch.Size(base_shape), size=sizes[0], base=sizes[1]
    )


@pytest.mark.parametrize(
    ("update_size", "hidden", "outer"),
    [
        ("element", 1 / 4, 1),
        ("orthogonal", 1 / 2, 1),
        ("parameter", 1 / 2, 1),
        ("spectral", 1, 1),
        ("gradient", 1, 4),
    ],
)
def test_a_rate_goes_by_how_large_updates_are(update_size, hidden, outer):
    mup = MaximalUpdate(MupConfig(base={"dim": 64}))
    for role, shape, base_shape, expected in (
        ("matrix", (1024, 256), (256, 64), hidden),
        ("expert", (8, 1024, 256), (8, 256, 64), hidden),
        ("embedding", (257, 256), (257, 64), outer),
        ("head", (257, 256), (257, 64), outer),
        ("norm", (256,), (64,), outer),
    ):
        factors = mup.rates(sized(role, shape, base_shape), update_size)
        assert factors.lr == pytest.approx(expected), role
        assert factors.lr * factors.weight_decay == pytest.approx(1)


def test_gradient_descent_makes_up_for_the_depth_by_which_branches_are_divided():
    one = CompleteP(CompletePConfig(base={"dim": 64, "n_layers": 2}))

    factors = one.rates(sized(), "gradient")
    assert factors.lr == pytest.approx(4)
    assert factors.lr * factors.weight_decay == pytest.approx(1)
    assert one.rates(sized(name="head.weight", role="head"), "gradient").lr == pytest.approx(4)  # by its width


def test_an_optimizer_that_does_not_say_how_large_its_updates_are_is_refused():
    with pytest.raises(ConfigError, match="does not say how large its updates are"):
        MaximalUpdate(MupConfig(base={"dim": 64})).rates(sized(), None)


def test_a_role_without_a_rule_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"blocks.0.up has the role 'matrices'.*did you mean 'matrix'"):
        MaximalUpdate(MupConfig(base={"dim": 64})).rates(sized(role="matrices"), "element")


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("parametrization=mup", "parametrization.base: is required"),
        ("parametrization={name='mup', base={}}", "parametrization.base: must have dim, that of the model whose rates"),
        ("parametrization={name='complete_p', base={dim=64}}", "parametrization.base: must have n_layers"),
        (
            "parametrization={name='mup', base={dim=64, dimm=64}}",
            "parametrization.base.dimm: unknown key; did you mean 'dim'",
        ),
        ("parametrization={name='mup', base={dim=30}}", "parametrization.base.n_heads: must divide dim = 30"),
        ("parametrization={name='mupp', base={dim=64}}", "Did you mean 'mup'"),
    ],
)
def test_a_base_that_is_no_model_is_refused(folder, setting, sentence):
    with pytest.raises(ConfigError) as caught:
        load_job(folder / "job.toml", [setting], catalog=discover(), world_size=1)
    assert sentence in str(caught.value)


def test_a_base_with_other_parameters_is_refused(build):
    with pytest.raises(ConfigError, match=r"nothing like blocks\.0\.attention\.q_norm"):
        build("model.qk_norm=true", "parametrization={name='mup', base={dim=64, qk_norm=false}}")
