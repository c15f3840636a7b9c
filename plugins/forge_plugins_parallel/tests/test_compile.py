"""How many graphs are compiled, and what is said when there are more."""

import logging

import attrs
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.torch_version import TorchVersion

from forge_core.config.sections import ParallelSection
from forge_core.contracts.parallel_pass import PassContext
from forge_core.distributed.mesh import build_mesh, join_process_group
from forge_core.errors import ConfigError
from forge_core.train.build import materialise
from forge_testing.component_case import builder
from forge_testing.small_model import SmallModel, cross_entropy, small_job

CPU = torch.device("cpu")
COMPILE = {"name": "compile"}
FSDP = {"name": "fsdp"}

# dynamo looks at the gradients of what it traces
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture
def context(monkeypatch):
    """Graphs are traced as ever and then run as they are: C++ for them would take minutes and count the same."""
    compiled = nn.Module.compile
    monkeypatch.setattr(
        nn.Module,
        "compile",
        lambda self, *, backend, mode, fullgraph: compiled(self, backend="aot_eager", fullgraph=fullgraph),
    )
    torch.compiler.reset()
    counters.clear()
    join_process_group(CPU)
    job = small_job()
    yield PassContext(build_mesh(job, CPU), job, CPU)
    torch.distributed.destroy_process_group()
    torch.compiler.reset()


def passed_through(context, *tables, model_class=SmallModel):
    with torch.device("meta"):
        model = model_class()
    for table in tables:
        model, touched = builder()(builder().resolve("parallel_pass", table)).apply(model, context)
    materialise(model, CPU, seed=0)
    return model, touched


def train(model, batch=2, length=8):
    tokens = torch.zeros(batch, length, dtype=torch.int64)
    model.train()(tokens, targets=tokens, loss=cross_entropy).total.backward()


def graphs():
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_all_blocks_share_one_graph(context, mode, sharded):
    recompute = {"name": "activation_checkpointing", "mode": mode}
    model, _ = passed_through(context, recompute, COMPILE, *([FSDP] if sharded else []))

    for _ in range(3):
        train(model)

    assert graphs() == 1


def test_the_whole_model_is_one_graph(context):
    model, touched = passed_through(context, {**COMPILE, "whole_model": True})

    for _ in range(2):
        train(model)

    assert touched == [""]
    assert graphs() == 1


def test_another_shape_in_training_is_reported_with_the_guard_that_failed(context, caplog):
    model, _ = passed_through(context, COMPILE)
    train(model)

    with caplog.at_level(logging.WARNING, logger="forge_plugins_parallel.compile"):
        train(model, length=6)

    assert "blocks.0 was compiled again during training" in caplog.text
    assert "size mismatch at index 1. expected 8, actual 6" in caplog.text


def test_it_is_an_error_where_that_is_asked_for(context):
    model, _ = passed_through(context, {**COMPILE, "on_recompile": "error"})
    train(model)

    with pytest.raises(ConfigError, match=r"(?s)blocks.0 was compiled again .* expected 2, actual 3"):
        train(model, batch=3)


def test_evaluation_may_compile(context):
    model, _ = passed_through(context, {**COMPILE, "on_recompile": "error"})
    train(model)

    tokens = torch.zeros(2, 8, dtype=torch.int64)
    with torch.no_grad():
        model.eval()(tokens, targets=tokens, loss=cross_entropy)
    train(model)

    assert graphs() == 2


def test_nothing_is_said_where_that_is_asked_for(context, caplog):
    model, _ = passed_through(context, {**COMPILE, "on_recompile": "ignore"})
    train(model)

    train(model, length=6)

    assert "compiled again" not in caplog.text


def test_blocks_of_other_shapes_are_no_recompilation(context):
    class Uneven(SmallModel):
        def __init__(self):
            super().__init__()
            self.blocks["1"].up, self.blocks["1"].down = (
                nn.Linear(16, 64, bias=False),
                nn.Linear(64, 16, bias=False),
            )

    model, _ = passed_through(context, {**COMPILE, "on_recompile": "error"}, model_class=Uneven)

    for _ in range(2):
        train(model)

    assert graphs() == 2


@pytest.mark.parametrize(
    ("degrees", "other", "cannot"),
    [
        (
            {"tp": 2},
            {"name": "activation_checkpointing"},
            "compile blocks that are recomputed under tensor parallelism",
        ),
        (
            {"pp": 2},
            {"name": "pipeline", "schedule": "ZBVZeroBubble"},
            "compute gradients of a compiled block's weights",
        ),
    ],
)
def test_an_old_torch_is_refused_where_it_cannot_compile_a_job(context, monkeypatch, degrees, other, cannot):
    passes = {other["name"]: builder().resolve("parallel_pass", other)}
    job = attrs.evolve(context.job, parallel=ParallelSection(**degrees, passes=passes))
    asked = PassContext(context.mesh, job, CPU)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0+cu130"))
    passed_through(asked, COMPILE)

    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu130"))

    with pytest.raises(
        ConfigError, match=rf"parallel\.passes\.compile: torch 2\.11\.0\+cu130 cannot {cannot}.*2\.13 can"
    ):
        passed_through(asked, COMPILE)
    passed_through(context, COMPILE)
