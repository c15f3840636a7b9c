"""``activation_norms`` against a forward by hand in float64, and where blocks are compiled or computed again."""

from typing import ClassVar

import attrs
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from forge_core.contracts.callback import StepContext
from forge_core.train.initialisation import SeededInitializer
from forge_plugins_monitor.activation_norms import ActivationNorms
from forge_plugins_monitor.config import ActivationNormsConfig
from forge_testing.callback import CallbackConformance
from forge_testing.small_model import SEQ_LEN, SmallModel, cross_entropy

# dynamo looks at the gradients of what it traces
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class TestActivationNorms(CallbackConformance):
    component = "forge-plugins-monitor:activation_norms"
    config: ClassVar = {"interval": 1}

    def test_reports_the_first_step_as_a_forward_in_float64_has_it(self, tmp_path) -> None:
        _, run = self.start(tmp_path)

        run.go()

        tokens = torch.randint(32, (2, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))[:, :-1]
        expected = by_hand([tokens])
        first = {name: value.item() for values in run.reports[:2] for name, value in values.items()}
        assert first == pytest.approx(expected, rel=1e-5)
        assert len(first) == 2 * len(run.model.blocks)


def small_model():
    model = SmallModel()
    model.init_weights(SeededInitializer(0))
    return model


def by_hand(microbatches):
    """The values of ``small_model`` in float64, its blocks called one after the other."""
    model = small_model().double()
    outputs = {name: [] for name in model.blocks}
    for tokens in microbatches:
        hidden, visible = model.embed(tokens), torch.ones(SEQ_LEN, SEQ_LEN, dtype=torch.bool).tril()
        for name, block in model.blocks.items():
            hidden = block(hidden, visible)
            outputs[name].append(hidden.detach().flatten())
    whole = {name: torch.cat(parts) for name, parts in outputs.items()}
    rms = {f"activation_rms/blocks.{name}": one.square().mean().sqrt().item() for name, one in whole.items()}
    return rms | {f"activation_max/blocks.{name}": one.abs().max().item() for name, one in whole.items()}


class Steps:
    """Steps of a model with the callback and nothing else; the parameters stay as they are."""

    def __init__(self, callback, small_run, model, pp=1):
        self.callback, self.model, self.reports = callback, model, {}
        job = small_run.run.job
        metrics = attrs.evolve(job.metrics, interval=1)
        mesh = type("Mesh", (), {"degrees": {"pp": pp}, "sum_over": lambda self, value, axes: value})()
        self.run = attrs.evolve(
            small_run.run,
            job=attrs.evolve(job, metrics=metrics),
            parts=[model],
            mesh=mesh,
            report=lambda values: self.reports.update(values),
            total_steps=100,
        )
        callback.run_start(self.run)

    def go(self, step, microbatches):
        self.reports.clear()
        self.callback.step_start(self.run, step)
        for tokens in microbatches:
            self.model(tokens, targets=tokens, loss=cross_entropy).total.backward()
        self.callback.before_optimizer_step(self.run, StepContext(step, 0, {}, logged=True))
        return {name: value.item() for name, value in self.reports.items()}

    def evaluate(self, tokens):
        with torch.no_grad():
            self.model.eval()(tokens, targets=tokens, loss=cross_entropy)
        self.model.train()


@pytest.fixture
def steps(tmp_path):
    def make(model, interval=1, pp=1):
        callback = ActivationNorms(ActivationNormsConfig(interval=interval))
        _, small_run = TestActivationNorms().start(tmp_path)
        return Steps(callback, small_run, model, pp)

    return make


@pytest.fixture
def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(32, (2, SEQ_LEN), generator=generator) for _ in range(3)]


def test_microbatches_count_alike_and_evaluation_does_not(steps, batches):
    running = steps(small_model(), interval=2)

    first = running.go(1, batches)
    running.evaluate(batches[0])
    between = running.go(3, batches[:1])
    running.evaluate(batches[0])
    due = running.go(4, batches[1:])

    assert first == pytest.approx(by_hand(batches), rel=1e-5)
    assert between == {}
    assert due == pytest.approx(by_hand(batches[1:]), rel=1e-5)


def test_no_hook_is_left_in_steps_that_are_not_reported(steps, batches):
    model = small_model()
    running = steps(model, interval=50)

    running.go(1, batches)

    assert not any(module._forward_hooks for module in model.modules())


class Recomputed(nn.Module):
    """A block that is computed again on the way back, as a wrapper does it."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, hidden, visible):
        return checkpoint(self.block, hidden, visible, use_reentrant=False)


@pytest.mark.parametrize(
    ("compiled", "recomputed"), [("nothing", True), ("blocks", False), ("blocks", True), ("model", True)]
)
def test_compiled_and_recomputed_blocks_are_the_same_and_have_no_further_graph(steps, batches, compiled, recomputed):
    torch.compiler.reset()
    counters.clear()
    model = small_model()
    if recomputed:
        for name, block in model.blocks.items():
            model.blocks[name] = Recomputed(block)
    for module in {"nothing": [], "blocks": model.blocks.values(), "model": [model]}[compiled]:
        module.compile(backend="aot_eager", fullgraph=True)
    running = steps(model, interval=2)

    values = [running.go(step, batches) for step in (1, 2, 3, 4)]

    expected = pytest.approx(by_hand(batches), rel=1e-5)
    assert values == [expected, expected, {}, expected]
    assert counters["stats"]["unique_graphs"] == (compiled != "nothing")
    assert not counters["graph_break"]
    torch.compiler.reset()


def test_with_a_pipeline_the_names_are_there_in_every_logged_step(steps, batches):
    running = steps(small_model(), interval=4, pp=2)

    assert running.go(3, batches).keys() == by_hand(batches).keys()
    assert all(value != value for value in running.go(3, batches).values())
    assert running.go(4, batches) == pytest.approx(by_hand(batches), rel=1e-5)


def test_a_block_that_gives_more_than_hidden_states_is_measured_by_them(steps):
    class Two(nn.Module):
        def forward(self, hidden):
            return hidden, torch.full((4,), 9.0)

    model = small_model()
    model.blocks = nn.ModuleDict({"0": Two()})
    running = steps(model)
    running.callback.step_start(running.run, 1)
    model.blocks["0"](torch.tensor([3.0, -4.0]))
    running.callback.before_optimizer_step(running.run, StepContext(1, 0, {}, logged=True))

    assert running.reports["activation_rms/blocks.0"].item() == pytest.approx(12.5**0.5)
    assert running.reports["activation_max/blocks.0"].item() == 4
