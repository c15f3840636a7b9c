"""A model and an optimizer whose state has other names than when the checkpoint was saved."""

import json

import pytest
import torch

from forge_core.cli import main
from forge_core.contracts.state import StateChanges
from forge_plugins_dense.transformer import Transformer


class OptimizerThen(torch.optim.Optimizer):
    """Momentum, under the name ``velocity``."""

    slot = "velocity"

    def __init__(self, config, /, *, parameters, **_):
        super().__init__([one.parameter for one in parameters], {"lr": config.lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state[self.slot] = torch.zeros_like(parameter)
                    state[self.slot].mul_(0.9).add_(parameter.grad)
                    parameter.add_(state[self.slot], alpha=-group["lr"])


class OptimizerNow(OptimizerThen):
    slot = "momentum"
    state_version = 2

    def load_state(self, version):
        assert version == 1
        for state in self.state.values():
            state["momentum"] = state.pop("velocity")


class Renamed(OptimizerThen):
    slot = "momentum"  # and says nothing of it


class ModelThen(Transformer):
    names = ("scale", "unused")

    def __init__(self, *arguments, **given):
        super().__init__(*arguments, **given)
        for name in self.names:
            self.register_buffer(name, torch.empty(3))

    def init_weights(self, rng):
        super().init_weights(rng)
        for place, name in enumerate(self.names):
            rng.fill(name, getattr(self, name), lambda full, generator, place=place: full.fill_(5.0 + place))


class ModelNow(ModelThen):
    names = ("factor", "fresh")
    state_version = 3

    def load_state(self, version):
        assert version == 1
        return StateChanges(renamed={"scale": "factor"}, dropped=["unused"], added=["fresh"])

    def init_weights(self, rng):
        super().init_weights(rng)
        with torch.no_grad():
            self.factor.fill_(-1)  # what is read must replace it


@pytest.fixture
def run(tiny, monkeypatch, capfd):
    """A function that runs the job to a step with these classes in the place of ours; returns exit code and output."""

    def run(optimizer, model, *settings):
        monkeypatch.setattr("forge_plugins_optim.adamw.adamw", optimizer)
        monkeypatch.setattr("forge_plugins_dense.transformer.Transformer", model)
        code = main(["run", str(tiny.config), "scheduler=constant", "checkpoint.interval=2", *settings])
        return code, "".join(capfd.readouterr())

    run.path, run.metrics = tiny.path, tiny.metrics
    return run


def losses(run, name):
    return [line["loss"] for line in run.metrics(name)]


def test_a_run_goes_on_exactly_with_components_that_have_renamed_their_state(run, capfd):
    assert run(OptimizerThen, ModelThen, "train.steps=4", "run.name=whole")[0] == 0
    assert run(OptimizerThen, ModelThen, "train.steps=2", "run.name=cut")[0] == 0

    code, printed = run(OptimizerNow, ModelNow, "train.steps=4", "run.name=cut")

    assert code == 0, printed
    assert losses(run, "cut") == losses(run, "whole")
    state = json.loads((run.path("cut") / "checkpoints/step_00000004/state.json").read_text())
    assert (state["modules"], state["optimizer"]["version"]) == ({"": 3}, 2)
    for step in (2, 4):  # of then, and of now
        checkpoint = str(run.path("cut") / f"checkpoints/step_{step:08d}")
        assert main(["generate", checkpoint, "--max-new-tokens", "1", "--temperature", "0"]) == 0
    assert main(["checkpoint", "show", str(run.path("cut"))]) == 0
    assert "model: 27 tensors" in capfd.readouterr().out


def test_a_component_that_does_not_take_the_state_of_then_is_refused_with_both_versions(run):
    assert run(OptimizerNow, ModelNow, "train.steps=2")[0] == 0

    code, printed = run(OptimizerThen, ModelNow, "train.steps=4")
    assert code == 2
    assert "the optimizer's state (" in printed
    assert "was saved with state_version 2, and has 1 here; no load_state takes it" in printed

    code, printed = run(OptimizerNow, Transformer, "train.steps=4")
    assert code == 2
    assert "the module of the model was saved with state_version 3, and has none here" in printed

    ModelNow.state_version = 4
    try:
        code, printed = run(OptimizerNow, ModelNow, "train.steps=4")
    finally:
        ModelNow.state_version = 3
    assert code == 2
    assert "was saved with state_version 3, and has 4 here; its load_state does not take it (AssertionError" in printed


def test_versions_of_then_and_now_are_told_with_what_fails_right_after_a_resume(run, rewrite_job):
    assert run(OptimizerThen, Transformer, "train.steps=2")[0] == 0
    checkpoint = run.path() / "checkpoints/step_00000002"
    rewrite_job(checkpoint, "[run]", "[run]", **{"forge-plugins-optim": "0.0.1", "click": "0.1"})

    code, printed = run(Renamed, Transformer, "train.steps=4")

    assert code == 1
    assert "resuming with other versions than step_00000002 was saved with: forge-plugins-optim 0.0.1 (now " in printed
    assert "KeyError: 'momentum'" in printed
    assert "step_00000002 was saved with forge-plugins-optim 0.0.1 (now " in printed.rpartition("KeyError")[2]
    assert "click 0.1" not in printed  # which the job does not use
