"""What is one, and what the host learns of it."""

from types import SimpleNamespace

import attrs
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core.checkpoint.contents import SampleRange
from forge_core.config.sections import AXES, AnomaliesSection
from forge_core.contracts.callback import Requests
from forge_core.contracts.observer import Origin
from forge_core.data.loader import BatchLoader
from forge_core.data.stream import SampleStream
from forge_core.distributed.consensus import Consensus
from forge_core.distributed.mesh import Mesh, join_process_group
from forge_core.train.gradients import Gradients
from forge_core.train.step_guard import StepGuard, can_skip_on_device
from saboteur.config import NumberedConfig
from saboteur.numbered import numbered

CPU = torch.device("cpu")


class Run:
    """As much of one as ``StepGuard`` needs: four samples a step."""

    def __init__(self, mesh, saved=None, **keys):
        stream = SampleStream(numbered(NumberedConfig(), seq_len=8, split="train", build=None), seed=0, shuffle=False)
        cut = {"batch_size": 2, "grad_accumulation": 2, "dp_rank": 0, "dp_size": 1}
        self.loader = BatchLoader(stream, position=0, **cut, workers=0, prefetch=1, pin_memory=False)
        self.mesh, self.said, self.events, self.step = mesh, [], [], 0
        self.consensus = Consensus(Requests(), CPU)
        train = SimpleNamespace(precision=keys.pop("precision", "fp32"))
        examine = keys.pop("examine", lambda start: None)
        self.job, self.device, self.directory = (
            SimpleNamespace(anomalies=AnomaliesSection(**keys), train=train),
            CPU,
            self,
        )
        self.anomalies = StepGuard(self, saved, examine=examine)

    def log(self, line):
        self.said.append(line)

    def write_event(self, event, **facts):
        self.events.append({"event": event, **facts})

    def train(self, loss=1.0, gradient=1.0, **inputs):
        """One step; returns whether its update is left out."""
        next(self.loader)
        return self.judge(loss, gradient, **inputs)

    def judge(self, loss=1.0, gradient=1.0, **inputs):
        """The same of a step whose samples have been read, by the host."""
        self.step += 1
        parameters = {name: nn.Parameter(torch.zeros(n)) for name, n in (("first", 3), ("second", 2))}
        parameters["first"].grad, parameters["second"].grad = torch.ones(3), torch.tensor([0.0, gradient])
        gradients = Gradients(parameters, self.mesh, CPU)
        batch = {"tokens": torch.zeros(2, 8, dtype=torch.int64), **inputs}
        verdict = self.anomalies.check(self.step, torch.tensor(loss), gradients, [batch, batch])
        self.anomalies.count()
        return verdict


@pytest.fixture(scope="module")
def mesh():
    join_process_group(CPU)
    yield Mesh(init_device_mesh("cpu", (1,) * len(AXES), mesh_dim_names=AXES), dict.fromkeys(AXES, 1))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["loss", "gradient", "pixels"])
def test_one_value_that_is_not_finite_is_enough(mesh, where, value):
    run = Run(mesh)
    pixels = torch.tensor([0.5, value if where == "pixels" else 0.5])
    values = {where: value} if where != "pixels" else {}

    assert run.train(pixels=torch.ones(2)) == 0
    assert run.train(**values, pixels=pixels) == 1
    assert run.train() == 0
    run.anomalies.sync()

    (event,) = run.events
    (found,) = event["found"]
    assert (event["step"], event["reason"], event["samples"]) == (2, "not finite", [[4, 7]])
    assert found["loss"] is (where == "loss")
    assert found["inputs"] == (["pixels"] if where == "pixels" else [])
    assert found["gradients"] == (["second"] if where == "gradient" else [])
    whose = {"loss": "the loss", "gradient": "the gradient of second", "pixels": "the input pixels"}[where]
    assert run.said == [f"step 2: {whose} is not finite; its update is left out (samples 4 to 7)"]


def test_an_input_of_any_microbatch_counts(mesh):
    run = Run(mesh)
    next(run.loader)
    gradients = Gradients({}, mesh, CPU)
    batches = [{"pixels": torch.tensor([value])} for value in (float("nan"), 0.5)]

    assert run.anomalies.check(1, torch.tensor(1.0), gradients, batches) == 1


def test_steps_are_skipped_on_the_device_by_optimizers_that_can_and_where_all_parameters_are_there():
    here, elsewhere = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, device="meta"))
    says_so = torch.optim.SGD([here, elsewhere])
    says_so.leaves_out = True

    assert can_skip_on_device(torch.optim.AdamW([here], fused=True), CPU)
    assert not can_skip_on_device(torch.optim.AdamW([here]), CPU)
    assert not can_skip_on_device(torch.optim.SGD([here], fused=True, momentum=0.9), CPU), "its momentum is not filled"
    assert not can_skip_on_device(says_so, CPU)
    del says_so.param_groups[0]["params"][1]
    assert can_skip_on_device(says_so, CPU)


def test_large_finite_values_of_an_input_are_none(mesh):
    assert Run(mesh).train(pixels=torch.full((4,), 3e38)) == 0


def test_a_row_is_counted_across_looks_and_ended_by_a_good_step(mesh):
    run = Run(mesh, roll_back_after=3)
    for losses in ([1.0, float("nan")], [float("nan"), 1.0, float("nan")], [float("nan")]):
        for loss in losses:
            run.train(loss)
        run.anomalies.sync()
        assert run.anomalies.to_leave_out is None
    assert run.anomalies.in_a_row == 2

    run.train(float("nan"))
    run.anomalies.sync()

    stretch = run.anomalies.to_leave_out
    assert (stretch.first_step, stretch.steps, stretch.start, stretch.stop) == (5, 3, 16, 28)
    assert run.anomalies.skipped == 5


def test_a_run_goes_back_for_the_first_of_several_rows(mesh):
    run = Run(mesh, roll_back_after=2)
    for loss in (*[float("nan")] * 3, 1.0, *[float("nan")] * 4):
        run.train(loss)
    run.anomalies.sync()

    assert run.anomalies.to_leave_out == SampleRange(first_step=1, start=0, stop=12, steps=3)


@pytest.mark.parametrize("where", ["here", "on another rank"])
def test_a_step_that_has_made_parameters_not_finite_is_gone_back_for_by_all_ranks(mesh, where):
    run = Run(mesh)
    if where != "here":
        run.consensus = SimpleNamespace(any_rank=lambda flag: True, reduce=lambda flag: flag)
    run.train()
    assert where != "here" or run.anomalies.parameters_are_finite([torch.ones(2)], 1)
    run.train()

    parameters = [torch.ones(2), torch.tensor([float("nan") if where == "here" else 1.0])]

    assert not run.anomalies.parameters_are_finite(parameters, 2)
    assert run.anomalies.to_leave_out == SampleRange(first_step=2, start=4, stop=8, steps=1)
    assert run.said == ["step 2: its update has made parameters that are not finite; they are not saved"]


def test_a_step_of_which_another_replica_says_so_is_left_out(mesh):
    run = Run(mesh)
    run.anomalies = StepGuard(run, any_replica=torch.ones_like)

    assert run.train() == 1
    run.anomalies.sync()
    assert run.said == ["step 1: an input of another replica is not finite; its update is left out (samples 0 to 3)"]


def test_metrics_that_come_after_a_look_at_their_step_leave_its_row(mesh):
    run = Run(mesh)
    run.train(float("nan"))
    run.anomalies.sync()

    run.anomalies.learn(1.0, step=1)

    assert run.anomalies.in_a_row == 1


def test_metrics_that_tell_of_nothing_end_a_row_without_a_look(mesh):
    run = Run(mesh)
    run.train(float("nan"))
    run.anomalies.sync()
    run.train()

    run.anomalies.learn(1.0, step=2)

    assert run.anomalies.in_a_row == 0
    assert len(run.events) == 1


def test_what_was_known_is_known_after_a_resume(mesh):
    keys = {"roll_back_after": 3, "spike_factor": 3.0, "spike_window": 2}
    run = Run(mesh, **keys)
    for gradient in (1.0, 2.0, float("nan"), float("inf")):
        run.train(gradient=gradient)
    run.anomalies.sync()

    resumed = Run(mesh, run.anomalies.state(), **keys)

    assert resumed.anomalies.state() == run.anomalies.state()
    assert resumed.anomalies.state()["skipped"] == resumed.anomalies.skipped == 2
    assert resumed.train(gradient=30.0) == 1, "a spike, by the mean from before"
    resumed.anomalies.sync()
    assert resumed.anomalies.to_leave_out.first_step == 3


def test_a_spike_does_not_move_the_mean(mesh):
    run = Run(mesh, spike_factor=2.0, spike_window=3)

    found = [bool(run.train(gradient=gradient)) for gradient in (50.0, 1.0, 1.0, 100.0, 1.0, 100.0, 30.0, 20.0)]

    assert found == [False, False, False, True, False, True, True, False]
    assert run.anomalies.state()["mean_norm"][1] == 5, "the good ones"


def test_the_mean_follows_norms_that_have_changed_within_a_few_windows(mesh):
    run = Run(mesh, spike_factor=100.0, spike_window=2)

    for gradient in (1.0, *[13.0] * 20):  # the other gradients have a square of 3
        run.train(gradient=gradient)

    mean, seen = run.anomalies.state()["mean_norm"]
    assert mean == pytest.approx(172**0.5, rel=1e-5)
    assert seen == 21


def test_the_module_at_fault_is_looked_for_once_and_not_where_the_data_of_a_rank_is(mesh, monkeypatch):
    looked = []

    def examine(start):
        looked.append(start)
        return Origin("block", "Block", [0, 1])

    run = Run(mesh, examine=examine)
    nan = float("nan")
    monkeypatch.setattr("forge_core.train.step_guard.gather", lambda own: [own, attrs.evolve(own, rank=1, inputs=[])])
    run.train(loss=nan, pixels=torch.tensor([nan]))
    run.train(loss=nan)
    run.train(loss=nan)
    run.anomalies.sync()

    assert looked == [4]
    assert [event["origin"] is not None for event in run.events] == [False, True, False]


@pytest.mark.parametrize("where", ["loss", "inputs", "gradients"])
def test_samples_at_fault_are_those_of_ranks_with_a_bad_loss_or_input_and_for_a_gradient_all(mesh, where, monkeypatch):
    run = Run(mesh)

    def gather(own):
        good = attrs.evolve(own, loss=False, inputs=[], gradients=[])
        faults = {"loss": True, "inputs": ["pixels"], "gradients": ["first"]}
        bad = attrs.evolve(good, rank=1, numbers=[1, 3], **{where: faults[where]})
        return [attrs.evolve(good, numbers=[0, 2]), bad]

    monkeypatch.setattr("forge_core.train.step_guard.gather", gather)
    run.train(float("nan"))
    run.anomalies.sync()

    assert run.events[0]["samples"] == ([[0, 3]] if where == "gradients" else [[1, 1], [3, 3]])


def test_judging_does_not_wait_for_the_device(mesh):
    waited = []

    class Waits(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.overloadpacket.__name__ in ("_local_scalar_dense", "is_nonzero", "equal", "nonzero"):
                waited.append(str(function))
            return function(*args, **(kwargs or {}))

    for precision in ("fp32", "fp16"):
        run = Run(mesh, precision=precision, spike_factor=2.0)
        for step in ({"pixels": torch.ones(2)}, {"loss": float("nan")}, {"gradient": float("inf")}):
            next(run.loader)
            with Waits():
                run.judge(**step)

    assert waited == []


def test_an_overflow_in_fp16_is_left_out_and_is_no_fault_of_the_step(mesh):
    run = Run(mesh, precision="fp16", spike_factor=3.0, spike_window=2)

    found = [run.train(gradient=gradient).item() for gradient in (1.0, float("inf"), float("nan"), 1.0, 1.0, 30.0)]
    run.anomalies.sync()

    assert found == [0, 1, 1, 0, 0, 1]
    assert [(event["step"], event["reason"]) for event in run.events] == [(6, "spike")]
    assert run.anomalies.skipped == 1
    assert run.anomalies.state()["loss_scale"] == [2.0**14, 2, 2]


@pytest.mark.parametrize("where", ["loss", "pixels"])
def test_in_fp16_a_loss_or_an_input_that_is_not_finite_is_a_fault_and_the_loss_scale_stays(mesh, where):
    run = Run(mesh, precision="fp16")
    nan = float("nan")
    values = {"loss": nan} if where == "loss" else {"pixels": torch.tensor([nan])}

    assert run.train(gradient=nan, **values) == 1
    run.anomalies.sync()

    assert [event["step"] for event in run.events] == [1]
    assert run.anomalies.state()["loss_scale"] == [2.0**16, 0, 0]


def test_gradients_that_overflow_without_a_loss_scale_are_a_fault(mesh):
    run = Run(mesh, precision="fp16", roll_back_after=2)

    for _ in range(18):
        assert run.train(gradient=float("inf")) == 1
    run.anomalies.sync()

    assert run.anomalies.state()["loss_scale"] == [1, 0, 16]
    assert [event["step"] for event in run.events] == [17, 18]
    assert run.anomalies.has_failed


def test_the_loss_scale_is_known_after_a_resume_and_other_precisions_have_none(mesh):
    run = Run(mesh, precision="fp16")
    for gradient in (float("inf"), 1.0, 1.0):
        run.train(gradient=gradient)

    resumed = Run(mesh, run.anomalies.state(), precision="fp16")

    assert resumed.anomalies.state() == run.anomalies.state()
    assert resumed.anomalies.loss_scale.factor == 2.0**15
    assert "loss_scale" not in Run(mesh).anomalies.state()
