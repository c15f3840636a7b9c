"""An activation of another package in experts, in dense layers and in shared experts: formulas, layouts, a resume."""

from __future__ import annotations

import attrs
import pytest
import torch
import torch.nn.functional as F

from forge_core.config.builder import ComponentBuilder
from forge_core.contracts.component_ref import ComponentRef
from forge_core.registry.discovery import discover
from forge_core.registry.plugin_files import trust, with_files
from forge_core.train.initialisation import SeededInitializer
from forge_plugins_dense.activation_config import as_activation
from forge_plugins_moe.config import MoEConfig
from parity_matrix.cells import AC, COMPILE, EMULATED, EP2, EXPERTS, FP8_PASS, HALF, OVERLAP, TP2, TWO_NODES, pp2
from parity_matrix.launch import Launcher, Work

FILE = """
import torch

from forge_core.api import component


@component("activation", summary="x times the sigmoid of beta times x")
def swish(*, beta: float = 1.702):
    return lambda features: features * torch.sigmoid(beta * features)
"""
SWISH = 'dense={name="mlp", hidden_dim=48, activation={name="swish", beta=0.5}, gated=true}'
SPARSE = f'model.feed_forward={{name="moe", n_experts=4, hidden_dim=32, every=2, shared_experts=1, {SWISH}}}'
IN_FLOAT8 = [*EMULATED, f"{FP8_PASS}.experts=true"]
BY_DAY = {"ep2": (2, [HALF, EP2]), "tp2": (2, [TP2])}
"""Rows that travel, and features in parts; what else changes nothing about an activation."""
BY_NIGHT = {
    "fsdp2": (2, [HALF]),
    "pp2": (2, pp2("1F1B")),
    "compiled": (1, [f"{COMPILE}=true"]),
    "computed-again": (1, [f"{AC}=true"]),
    "ep2-overlap": (2, [HALF, EP2, OVERLAP, f"{EXPERTS}.chunks=2", f"{COMPILE}=true"]),
    "ep4-nodes": (4, ["train.batch_size=1", "parallel.ep=4", TWO_NODES]),
    "ep2-tp2": (4, [HALF, EP2, TP2]),
}


@attrs.frozen
class Theirs:
    activation: str | None


@pytest.fixture(scope="module")
def layer():
    """Of four experts, on the CPU."""
    trust(FILE)
    builder = ComponentBuilder(with_files(discover(), {"swish.py": FILE}))

    def made(**keys):
        use = builder.resolve("feed_forward", {"name": "moe", "n_experts": 4, "hidden_dim": 24, **keys})
        with torch.device("meta"):
            module = builder(use, dim=16, layer=0, n_layers=1)
        module.to_empty(device="cpu")
        module.init_weights(SeededInitializer(0), "", 0.3, 0.3)
        return module

    return made


def swish(x):
    return x / (1 + torch.exp(-0.5 * x))


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "two matrices"])
@pytest.mark.parametrize(
    ("activation", "formula"),
    [
        ({"name": "swish", "beta": 0.5}, swish),
        ("relu2", lambda x: x.clamp(min=0) ** 2),
        ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
    ],
    ids=["swish", "relu2", "gelu_tanh"],
)
@pytest.mark.parametrize(
    ("hidden_dim", "dtype", "tolerance"),
    [(24, torch.float32, 1e-5), (23, torch.float32, 1e-5), (24, torch.bfloat16, 2e-2)],
    ids=["grouped", "loop", "bf16"],
)
def test_each_row_is_the_formula_of_its_expert(layer, activation, formula, gated, hidden_dim, dtype, tolerance):
    experts = layer(activation=activation, gated=gated, hidden_dim=hidden_dim).experts.to(dtype)
    rows = torch.randn(20, 16, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    counts = [7, 0, 12, 1]
    parameters = [rows, *experts.parameters()]

    found = experts.compute(rows, torch.tensor(counts))
    exact = []
    for index, part in enumerate(rows.double().split(counts)):
        raised = part @ experts.up[index].double().T
        inner = formula(raised) if experts.gate is None else formula(part @ experts.gate[index].double().T) * raised
        exact.append(inner @ experts.down[index].double().T)
    expected = torch.cat(exact)

    assert (experts.gate is not None) is gated
    pairs = [(found, expected)]
    pairs += zip(
        torch.autograd.grad(found.float().square().sum(), parameters),
        torch.autograd.grad(expected.square().sum(), parameters),
        strict=True,
    )
    for one, other in pairs:
        assert (one - other).norm() < tolerance * other.norm()


def test_a_compiled_layer_has_no_graph_break(layer):
    experts = layer(activation="swish").experts
    rows, counts = torch.randn(20, 16), torch.tensor([7, 0, 12, 1])

    compiled = torch.compile(experts.compute, fullgraph=True, backend="aot_eager")

    torch.testing.assert_close(compiled(rows, counts), experts.compute(rows, counts))


@pytest.mark.parametrize(
    ("keys", "is_gated"),
    [
        ({}, True),
        ({"gated": False}, False),
        ({"activation": "relu2"}, False),
        ({"activation": "relu2", "gated": True}, True),
        ({"dense": {"name": "mlp", "activation": "gelu_tanh", "gated": True}}, True),
        ({"dense": {"name": "mlp", "activation": "silu", "gated": False}}, False),
        ({"dense": {"name": "mlp", "activation": "relu", "gated": True}, "gated": False}, False),
        ({"dense": {"name": "mlp", "activation": "relu", "gated": True}, "activation": "swish"}, False),
    ],
)
def test_experts_have_a_gate_where_they_say_so_or_as_their_dense_layer(layer, keys, is_gated):
    made, x = layer(shared_experts=1, **keys), torch.linspace(-3, 3, 9)

    assert (made.experts.gate is not None) is (made.shared.gate is not None) is is_gated
    assert torch.equal(made.shared.activate(x), made.experts.activate(x))


def test_the_activation_of_a_dense_layer_of_another_package_is_followed_if_it_is_known():
    def config(activation):
        dense = ComponentRef(
            kind="feed_forward", name="theirs", provider="acme", factory="acme:layer", config=Theirs(activation)
        )
        return MoEConfig(n_experts=4, router=dense, dense=dense)

    assert config("relu2").expert.activation == as_activation("relu2")
    assert config(None).expert.is_gated
    with pytest.raises(ValueError, match="must be given, as that of the dense layer, 'tanh' is none of silu, "):
        config("tanh")


def launched(folder, layouts, *settings):
    file = folder / "swish.py"
    file.write_text(FILE, encoding="utf-8")
    common = [
        SPARSE,
        f"plugins.files=['{file}']",
        "train.steps=4",
        "checkpoint.interval=2",
        "eval.interval=4",
        *settings,
    ]
    launcher = Launcher(folder, settings=common)
    works = [Work("alone", 1), *(Work(name, ranks, own) for name, (ranks, own) in layouts.items())]
    again = [Work("again", 2, BY_DAY["ep2"][1], resumes="ep2", resumes_at=2)] if "ep2" in layouts else []
    launcher.launch([*works, *again], timeout=900)
    assert not launcher.failures, "\n".join(launcher.failures.values())
    return launcher


def losses(launcher, name):
    return [line["loss"] for line in launcher.metrics(name) if "loss" in line]


@pytest.mark.slow
def test_it_trains_in_experts_in_every_layout_as_in_one_process_and_resumes(tmp_path):
    launcher = launched(tmp_path, BY_DAY)

    expected = losses(launcher, "alone")
    assert expected[-1] < expected[0]
    for name in BY_DAY:
        assert losses(launcher, name) == pytest.approx(expected, rel=1e-5)
    assert losses(launcher, "again") == losses(launcher, "ep2")[2:]


@pytest.mark.nightly  # by day, one of each way to cut it
def test_it_trains_the_same_in_further_layouts(tmp_path):
    launcher = launched(tmp_path, BY_NIGHT)

    for name in BY_NIGHT:
        assert losses(launcher, name) == pytest.approx(losses(launcher, "alone"), rel=1e-5), name


@pytest.mark.nightly  # by day, products of experts in float8 have their own tests
def test_it_trains_between_products_in_float8(tmp_path):
    launcher = launched(tmp_path, {"ep2": BY_DAY["ep2"]}, *IN_FLOAT8, "train.precision=bf16")

    assert losses(launcher, "ep2") == pytest.approx(losses(launcher, "alone"), rel=1e-2)
