"""``run.report``: what callbacks report of a step stands in its line, in every layout."""

import math

import pytest
import torch

from forge_core.errors import PluginError
from forge_core.train.run import Reports

NORMS = [
    *("callbacks=[{name='layer_norms'}, {name='activation_norms', interval=4}]", "train.steps=5"),
    *("metrics.interval=2", "train.batch_size=4"),
]
NORM = """
from forge_core.api import component
from forge_core.contracts.callback import Callback


@component("callback")
class EmbedNorm(Callback):
    \"\"\"The norm of the embedding.\"\"\"

    def before_optimizer_step(self, run, context):
        if context.logged:
            run.report({"norm/embed": run.parameters["embed.weight"].norm()})
"""
LAYOUTS = {
    "fsdp": ["--nproc", "2", "train.batch_size=2"],
    "pp": ["--nproc", "2", "parallel.pp=2", "train.batch_size=2", "train.grad_accumulation=2"],
    "tp": ["--nproc", "2", "parallel.tp=2"],
    "cp": ["--nproc", "2", "parallel.cp=2"],
}


def norms(line):
    return {key: value for key, value in line.items() if key.startswith(("gradient_norm/", "weight_norm/", "update_"))}


def activations(line):
    return {key: value for key, value in line.items() if key.startswith("activation_")}


@pytest.fixture(scope="module")
def alone(shared_tiny):
    return shared_tiny.completed(*NORMS, "run.name=alone")


def test_a_logged_step_has_what_is_reported_of_it(alone):
    assert [line["step"] for line in alone] == [1, 2, 4, 5]
    layers = {"embed", "blocks.0", "blocks.1", "norm", "head"}
    for line in alone:
        assert norms(line).keys() == {
            f"{what}/{layer}" for what in ("gradient_norm", "weight_norm", "update_ratio") for layer in layers
        }
        squares = sum(value**2 for key, value in line.items() if key.startswith("gradient_norm/"))
        assert squares == pytest.approx(line["grad_norm"] ** 2, rel=1e-5)
    first, last = norms(alone[0]), norms(alone[-1])
    assert all(first[key] != last[key] for key in first), "each line has its own step's"
    of_blocks = {f"activation_{what}/blocks.{layer}" for what in ("rms", "max") for layer in (0, 1)}
    assert [activations(line).keys() for line in alone] == [of_blocks, set(), of_blocks, of_blocks]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_is_the_same_in_every_layout(shared_tiny, alone, layout):
    lines = shared_tiny.completed(*NORMS, f"run.name={layout}", *LAYOUTS[layout])

    for line, expected in zip(lines, alone, strict=True):
        assert norms(line) == pytest.approx(norms(expected), rel=1e-3)
        measured = {key: value for key, value in activations(line).items() if value is not None}
        assert measured == pytest.approx(activations(expected), rel=1e-4)
    assert ("activation_rms/blocks.0" in lines[1]) == (layout == "pp"), "with a pipeline, what is not measured is null"


def test_a_layer_that_is_frozen_at_first_has_no_gradient_and_is_reported_all_the_same(shared_tiny):
    """With a pipeline, all that is ever reported must be there in the first logged step."""
    phases = 'phases=[{at=1, train=["blocks.1.*", "head.*"]}, {at=3}]'
    lines = shared_tiny.completed(*NORMS, "run.name=frozen", phases, *LAYOUTS["pp"])

    of_first = [line["gradient_norm/blocks.0"] for line in lines]
    assert of_first[:2] == [0, 0]
    assert of_first[2] > 0


class Mesh:
    """One stage of two, of which the other one has reported nothing."""

    degrees = {"pp": 2}

    def gather_over(self, axis, value):
        return [value, []]

    def sum_over(self, value, axes):
        return value


def test_a_value_that_is_no_scalar_is_refused():
    with pytest.raises(PluginError, match=r"'x' is a tensor of the shape \(2,\)"):
        Reports().add({"x": torch.zeros(2)})
    with pytest.raises(PluginError, match=r"'x' is 1\.0"):
        Reports().add({"x": 1.0})


@pytest.mark.parametrize("layout", [[], ["--nproc", "2"]], ids=["alone", "fsdp"])
def test_what_follows_from_a_parameter_is_made_whole(tiny, tmp_path, layout):
    """A parameter is a ``DTensor``, and so is its norm: a run that reported one ended with an error of torch."""
    (tmp_path / "norm.py").write_text(NORM, encoding="utf-8")
    file = f"plugins.files=['{tmp_path / 'norm.py'}']"
    lines = tiny.completed(*NORMS, file, "callbacks=[{name='layer_norms'}, {name='embed_norm'}]", *layout)

    for line in lines:
        assert line["norm/embed"] == pytest.approx(line["weight_norm/embed"], rel=1e-5)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_scalar_of_the_host_goes_to_the_device(stages):
    mesh, reports = Mesh(), Reports()
    mesh.degrees = {"pp": stages}
    reports.add({"a": torch.ones(())})

    assert reports.take(mesh, torch.device("meta"))["a"].is_meta


def test_with_a_pipeline_a_name_that_comes_later_is_refused():
    reports = Reports()
    reports.add({"a": torch.ones(())})
    assert reports.take(Mesh(), torch.device("cpu")) == {"a": torch.ones(())}

    reports.add({"b": torch.ones(())})
    with pytest.raises(PluginError, match="'b' was not among what callbacks reported at the first logged step"):
        reports.take(Mesh(), torch.device("cpu"))


def test_what_a_step_has_itself_is_no_callbacks_to_report(tiny, monkeypatch):
    from forge_plugins_monitor.layer_norms import LayerNorms

    monkeypatch.setattr(LayerNorms, "step_end", lambda self, run, context: run.report({"loss": torch.ones(())}))

    with pytest.raises(PluginError, match="a callback reports 'loss', which the step has itself"):
        tiny.completed(*NORMS)


def test_evaluations_have_their_events(tiny, monkeypatch):
    from forge_plugins_monitor.layer_norms import LayerNorms

    heard = []
    monkeypatch.setattr(LayerNorms, "eval_start", lambda self, step: heard.append(("start", step)), raising=False)
    monkeypatch.setattr(
        LayerNorms,
        "eval_batch",
        lambda self, run, step, batch: heard.append((step, tuple(batch["tokens"].shape), run.parts[0].training)),
        raising=False,
    )
    monkeypatch.setattr(LayerNorms, "eval_end", lambda self, step: heard.append(("end", step)), raising=False)

    tiny.completed(*NORMS, "eval.interval=5", "eval.batches=2")

    assert heard == [("start", 5), (5, (4, 32), False), (5, (4, 32), False), ("end", 5)]


def test_minus_infinity_that_a_callback_reports_is_logged(tiny, monkeypatch):
    from forge_plugins_monitor.layer_norms import LayerNorms

    low = torch.tensor(-math.inf)
    monkeypatch.setattr(LayerNorms, "step_end", lambda self, run, context: run.report({"lowest": low}))

    assert all("lowest" in line for line in tiny.completed(*NORMS) if "loss" in line)
