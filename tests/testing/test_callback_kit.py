"""The callback kit passes a callback that keeps the contract, and has a sentence for each way to break it."""

import pytest
import torch
import torch.distributed as dist

from forge_core.contracts.callback import Callback
from forge_testing.callback import CallbackConformance


class Watch(Callback):
    """Remembers the largest loss of the logged steps."""

    def __init__(self):
        self.largest = 0.0

    def step_end(self, run, context):
        if context.logged:
            self.largest = max(self.largest, context.metrics["loss"].item())

    def run_failed(self, error):
        self.error = error

    def state(self):
        return {"largest": self.largest}

    def load_state(self, state, version):
        self.largest = state["largest"]


class Case(CallbackConformance):
    callback = Watch

    def make(self):
        return self.callback()


class TestWatch(Case):
    pass


class TestNothing(Case):
    callback = Callback
    test_two_ranks_go_through_a_run_together = None  # another one has shown that nothing is nothing


def faulty(**methods):
    return type("Faulty", (Watch,), methods)


def missing_metric(self, context):
    assert context.metrics["accuracy"] > 0.5


def careless(self, error):
    raise RuntimeError("in the handler")


class Averaging(Callback):
    """Keeps the contract: the mean of what the weights were after each update is evaluated."""

    def run_start(self, run):
        self.parameters = run.parameters
        self.sums = {name: one.detach().clone() for name, one in run.parameters.items()}
        self.count = torch.ones(())

    def before_optimizer_step(self, run, context):
        if context.logged:
            run.report({"norm": context.metrics["grad_norm"]})

    def step_end(self, run, context):
        counts = 1 - context.left_out
        for name, one in self.parameters.items():
            self.sums[name] += one.detach() * counts
        self.count += counts

    def tensors(self):
        return {"count": self.count, **self.sums}

    def evaluation_weights(self):
        return {name: one / self.count for name, one in self.sums.items()}


class TestAveraging(Case):
    callback = Averaging


def averaging(**methods):
    return type("Faulty", (Averaging,), methods)


def sums_from_the_first_step_on(self, run, context):
    self.sums.setdefault("later", torch.zeros(()))


def into_the_parameters(self):
    for one in self.parameters.values():
        one.data.zero_()
    return {}


class Lonely(Watch):
    """Asks the other ranks on the first one alone."""

    def step_end(self, run, context):
        if run.rank == 0 and context.step == 2:
            dist.all_reduce(context.metrics["loss"].clone())


class LonelyCase(CallbackConformance):
    patience = 3.0

    def make(self):
        return Lonely()


def test_a_collective_that_one_rank_calls_alone_is_found_and_told():
    with pytest.raises(AssertionError, match=r"rank 0 waited 3 s for another one: in step_end; what talks to other"):
        LonelyCase().test_two_ranks_go_through_a_run_together()


async def waits_for_another(self):
    pass


FAULTS = [
    (dict, "test_is_a_callback", AssertionError, "must return a forge_core.contracts.callback.Callback, got dict"),
    (
        faulty(steps_end=lambda self: None),
        "test_methods_are_events",
        pytest.fail.Exception,
        "nothing calls steps_end; did you mean 'step_end'",
    ),
    (
        faulty(step_end=lambda self, trainer: None),
        "test_methods_are_events",
        pytest.fail.Exception,
        "(?s)an event cannot be called: .*trainer",
    ),
    (
        faulty(step_end=waits_for_another),
        "test_methods_are_events",
        pytest.fail.Exception,
        "an event cannot be called: callback: step_end is async",
    ),
    (faulty(step_end=missing_metric), "test_goes_through_a_run", KeyError, "accuracy"),
    (faulty(run_failed=careless), "test_goes_through_a_failing_run", RuntimeError, "in the handler"),
    (
        faulty(step_end=lambda self, context: float(context.metrics["loss"])),
        "test_does_not_wait_for_the_device_in_steps_that_are_not_logged",
        AssertionError,
        "a device tensor is read on the host in step_end of a step that is not logged",
    ),
    (faulty(state_version="1"), "test_state_survives", AssertionError, "state_version must be an int, got str"),
    (
        faulty(state=lambda self: {"watch": self}),
        "test_state_survives",
        pytest.fail.Exception,
        "state must be made of finite JSON values",
    ),
    (
        averaging(step_end=sums_from_the_first_step_on),
        "test_tensors_survive",
        AssertionError,
        "(?s)at the end of run_start, where the engine fills them, and .*, later at the end of a run",
    ),
    (
        averaging(tensors=lambda self: {"count": self.count.clone(), **self.sums}),
        "test_tensors_survive",
        AssertionError,
        "tensors gives a copy of 'count'; it must give the tensor itself",
    ),
    (
        averaging(tensors=lambda self: self.sums),
        "test_tensors_survive",
        AssertionError,
        "the evaluation weights of .* differ after a resume: something is neither in state nor in tensors",
    ),
    (
        averaging(evaluation_weights=lambda self: {"weight": self.count}),
        "test_evaluation_weights_are_those_of_parameters",
        AssertionError,
        "evaluation_weights has 'weight', which is the name of no parameter",
    ),
    (
        averaging(evaluation_weights=lambda self: {name: one.sum() for name, one in self.sums.items()}),
        "test_evaluation_weights_are_those_of_parameters",
        AssertionError,
        r"evaluation_weights has a tensor \(\) for ",
    ),
    (
        averaging(evaluation_weights=into_the_parameters),
        "test_evaluation_weights_are_those_of_parameters",
        AssertionError,
        "evaluation_weights changes ",
    ),
    (
        averaging(evaluation_weight=lambda self: {}),
        "test_methods_are_events",
        pytest.fail.Exception,
        "nothing calls evaluation_weight; did you mean 'evaluation_weights'",
    ),
    (
        faulty(load_state=Callback.load_state),
        "test_state_survives",
        AssertionError,
        "a callback that loads the state .* has the state {'largest': 0.0}",
    ),
]


@pytest.mark.parametrize(("callback", "check", "error", "sentence"), FAULTS)
def test_a_fault_is_found_and_told(tmp_path, callback, check, error, sentence):
    case = Case()
    case.callback = callback
    given = () if check in ("test_is_a_callback", "test_methods_are_events") else (tmp_path,)

    with pytest.raises(error, match=sentence):
        getattr(case, check)(*given)


def test_every_check_has_a_fault_that_it_finds():
    checks = {name for name in vars(CallbackConformance) if name.startswith("test_")}

    assert {check for _, check, *_ in FAULTS} | {"test_two_ranks_go_through_a_run_together"} == checks
