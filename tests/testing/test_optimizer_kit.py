"""The optimizer kit passes an optimizer that keeps the contract, and has a sentence for each way to break it."""

import subprocess
import sys

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import zeros as distributed_zeros

import fork_server
from forge_testing.optimizer import OptimizerConformance


class Momentum(torch.optim.Optimizer):
    """Keeps the contract."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, group)

    def update(self, parameter, group):
        state = self.state[parameter]
        if not state:
            state["momentum"], state["step"] = self.empty(parameter), 0
        state["step"] += 1
        state["momentum"].mul_(0.9).add_(parameter.grad)
        parameter.sub_(group["lr"] * state["momentum"])

    def empty(self, parameter):
        return torch.zeros_like(parameter)


class TestMomentum(OptimizerConformance):
    # adamw runs it in its own tests; here it would only cost seconds
    test_updates_shards_like_whole_tensors_on_two_ranks = None

    def make(self, *, parameters):
        return Momentum([entry.parameter for entry in parameters])


class SaysElement(Momentum):
    update_size = "element"


class SaysElements(Momentum):
    update_size = "elements"


class NotAnOptimizer:
    def __init__(self, params):
        self.param_groups = [{"params": params, "lr": 0.1}]


class WithoutBiases(Momentum):
    def __init__(self, params):
        super().__init__([p for p in params if p.ndim > 1])


class WithAnExtra(Momentum):
    def __init__(self, params):
        super().__init__([*params, torch.nn.Parameter(torch.zeros(2))])


class NoRate(Momentum):
    def __init__(self, params):
        super().__init__(params, lr=float("nan"))


class LeavesOutParametersOnly(Momentum):
    leaves_out = True
    left_out = None

    def update(self, parameter, group):
        before = parameter.clone()
        super().update(parameter, group)
        if self.left_out is not None:
            parameter.copy_(torch.where(self.left_out.bool(), before, parameter))


class ScalesNothing(Momentum):
    scales_gradients = True


class EagerState(Momentum):
    def __init__(self, params):
        super().__init__(params)
        for parameter in params:
            self.state[parameter] = {"momentum": torch.zeros_like(parameter), "step": 0}


class Initialising(Momentum):
    def __init__(self, params):
        super().__init__(params)
        for parameter in params:
            torch.nn.init.zeros_(parameter)


class Climbing(Momentum):
    def update(self, parameter, group):
        super().update(parameter, {"lr": -group["lr"]})


class Upcasting(Momentum):
    def update(self, parameter, group):
        super().update(parameter, group)
        parameter.data = parameter.data.double()


class OwnRate(Momentum):
    def update(self, parameter, group):
        super().update(parameter, {"lr": 0.1})


class DividesByRate(Momentum):
    def update(self, parameter, group):
        super().update(parameter, {"lr": group["lr"] * (group["lr"] / group["lr"])})


class NanWithoutRate(Momentum):
    def update(self, parameter, group):
        rate = torch.tensor(group["lr"])
        super().update(parameter, {"lr": rate * rate / rate})


class Decaying(Momentum):
    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.mul_(0.99)
        super().step()


class FirstComeOnly(Momentum):
    @torch.no_grad()
    def step(self, closure=None):
        if not self.state:
            super().step()
            return
        for parameter, _ in list(self.state.items()):
            if parameter.grad is not None:
                self.update(parameter, self.param_groups[0])


class CountsBesideIt(Momentum):
    """Its bias correction forgets across a resume."""

    count = 0

    def step(self, closure=None):
        self.count += 1
        super().step()

    def update(self, parameter, group):
        super().update(parameter, {"lr": group["lr"] / self.count})


class Folds(Momentum):
    """Adds up gradients beside its state, and folds them in every eighth step."""

    count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        super().step()

    def update(self, parameter, group):
        kept = self.__dict__.setdefault("kept", {})
        kept[parameter] = kept.get(parameter, 0) + parameter.grad
        if self.count % 8 == 0:
            super().update(parameter, group)
            parameter.sub_(group["lr"] * kept.pop(parameter))
        else:
            parameter.sub_(group["lr"] * parameter.grad)


class Later(CountsBesideIt):
    """Its count shows every fortieth step only."""

    def update(self, parameter, group):
        Momentum.update(self, parameter, {"lr": group["lr"] * (2 if self.count % 40 == 0 else 1)})


class Idle(Momentum):
    def step(self, closure=None):
        pass


class GlobalState(Momentum):
    def step(self, closure=None):
        super().step()
        self.state["step"] = 1


class DottedState(Momentum):
    def update(self, parameter, group):
        super().update(parameter, group)
        self.state[parameter]["moment.first"] = 1


class HistoryState(Momentum):
    def update(self, parameter, group):
        super().update(parameter, group)
        self.state[parameter].setdefault("history", []).append(0)


class ShardNorm(Momentum):
    """Normalises by the norm of the gradient that this rank holds, which shows on one rank's tensors only when cut."""

    def update(self, parameter, group):
        local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        super().update(parameter, {"lr": group["lr"] / (1 + float(local.norm()))})


class LocalState(Momentum):
    def update(self, parameter, group):
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        self.state[parameter]["last"] = local.clone()
        parameter.sub_(group["lr"] * parameter.grad)


class RowsWithoutAWord(Momentum):
    """Divides by a mean of squares for each row, whose shape is not the parameter's."""

    def update(self, parameter, group):
        squares = parameter.grad.square()
        mean = self.means(squares) if parameter.ndim > 1 else squares
        row = self.state[parameter].setdefault("row", torch.zeros_like(mean))
        row.lerp_(mean, 0.1)
        parameter.sub_(group["lr"] * parameter.grad / (1 + (row.unsqueeze(-1) if parameter.ndim > 1 else row)))

    def means(self, squares):
        mean = squares.mean(-1)
        if isinstance(mean, DTensor):  # where columns are cut, a sum that is to be reduced
            mean = mean.redistribute(placements=[Replicate() if p.is_partial() else p for p in mean.placements])
        return mean


class Rows(RowsWithoutAWord):
    """Keeps the contract."""

    def empty_state(self, parameter, slot, shape, dtype):
        if not isinstance(parameter, DTensor) or parameter.ndim == 1:
            return None
        last = parameter.ndim - 1
        placements = [Replicate() if p.is_shard(last) else p for p in parameter.placements]
        return distributed_zeros(*shape, dtype=dtype, device_mesh=parameter.device_mesh, placements=placements)


class RowsSaidToBeWhole(RowsWithoutAWord):
    def empty_state(self, parameter, slot, shape, dtype):
        return torch.zeros(shape, dtype=dtype) if parameter.ndim > 1 else None


class Blocks(Momentum):
    """Keeps the largest gradient of what each rank holds: another number of them on other meshes."""

    def update(self, parameter, group):
        local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        largest = local.abs().amax().view(1)
        if isinstance(parameter, DTensor):
            largest = DTensor.from_local(largest, parameter.device_mesh, [Shard(0)])
        self.state[parameter]["largest"] = largest
        parameter.sub_(group["lr"] * parameter.grad)

    def empty_state(self, parameter, slot, shape, dtype):
        if not isinstance(parameter, DTensor):
            return torch.zeros(1)
        return distributed_zeros(parameter.device_mesh.size(), device_mesh=parameter.device_mesh, placements=[Shard(0)])


class MixedUp(Momentum):
    """Takes shards for whole tensors, which goes wrong on one rank already."""

    def update(self, parameter, group):
        super().update(parameter, {"lr": group["lr"] * (2 if isinstance(parameter, DTensor) else 1)})


class Averaging(Momentum):
    """Keeps the contract: the mean of all its steps is evaluated."""

    def __init__(self, entries):
        super().__init__([entry.parameter for entry in entries])
        self.entries = entries

    def update(self, parameter, group):
        super().update(parameter, group)
        state = self.state[parameter]
        state["sum"] = state.get("sum", torch.zeros_like(parameter)) + parameter

    def evaluation_weights(self):
        return {entry.name: self.average(entry.parameter) for entry in self.entries}

    def average(self, parameter):
        state = self.state.get(parameter)
        return state["sum"] / state["step"] if state else parameter.detach().clone()


class TestAveraging(OptimizerConformance):
    def make(self, *, parameters):
        return Averaging(parameters)


class NamesOthers(Averaging):
    def evaluation_weights(self):
        return {"weight": self.average(self.entries[0].parameter)}


class NamesThemLater(Averaging):
    def evaluation_weights(self):
        return super().evaluation_weights() if self.state else {}


class Flattens(Averaging):
    def average(self, parameter):
        return super().average(parameter).flatten()


class Replaces(Averaging):
    """Puts the averages into the parameters itself."""

    def average(self, parameter):
        parameter.data.copy_(super().average(parameter))
        return parameter.detach()


class CountsQuestions(Averaging):
    def average(self, parameter):
        if self.state:
            self.state[parameter]["sum"] += 1
        return super().average(parameter)


class MakesState(Averaging):
    def average(self, parameter):
        self.state[parameter].setdefault("sum", parameter.detach().clone())
        return self.state[parameter]["sum"]


class ForgetsTheAverage(Averaging):
    """It is beside its state, where a resume does not find it."""

    def update(self, parameter, group):
        super().update(parameter, group)
        kept = self.__dict__.setdefault("kept", {})
        kept[parameter] = kept.get(parameter, 0) * 0.9 + parameter

    def average(self, parameter):
        return self.__dict__.get("kept", {}).get(parameter, parameter).detach().clone()


class WholeAverages(Averaging):
    def average(self, parameter):
        average = super().average(parameter)
        return average.full_tensor() if isinstance(average, DTensor) else average


class ShardNormCase(OptimizerConformance):
    def make(self, *, parameters):
        return ShardNorm([entry.parameter for entry in parameters])


class RowsCase(OptimizerConformance):
    def make(self, *, parameters):
        return Rows([entry.parameter for entry in parameters])


class BlocksCase(OptimizerConformance):
    def make(self, *, parameters):
        return Blocks([entry.parameter for entry in parameters])


class LocalStateCase(OptimizerConformance):
    def make(self, *, parameters):
        return LocalState([entry.parameter for entry in parameters])


FP32 = (torch.float32,)
FAULTS = [
    (NotAnOptimizer, "test_takes_every_parameter_once", (), "must return a torch.optim.Optimizer, got NotAnOptimizer"),
    (WithoutBiases, "test_takes_every_parameter_once", (), "blocks.0.norm.weight is in param_groups 0 times"),
    (WithAnExtra, "test_takes_every_parameter_once", (), "parameters that were not given"),
    (NoRate, "test_states_its_base_learning_rates", (), r'must stand in param_groups\[i\]\["lr"\] .* found nan'),
    (EagerState, "test_construction_changes_nothing", (), "there is state before the first step"),
    (Initialising, "test_construction_changes_nothing", (), "the constructor changes embed.weight"),
    (Climbing, "test_lowers_a_quadratic", FP32, "20 steps on ½‖embed.weight − goal‖² in torch.float32 lead"),
    (Idle, "test_lowers_a_quadratic", FP32, "20 steps leave embed.weight where it was"),
    (Upcasting, "test_lowers_a_quadratic", FP32, "step changes embed.weight to torch.float64"),
    (OwnRate, "test_reads_the_learning_rate_at_each_step", (), "from the parameter group at each step"),
    (SaysElement, "test_updates_are_as_large_as_it_says", (), "gradients 100 times as large, .* 100 times as large"),
    (SaysElements, "test_updates_are_as_large_as_it_says", (), "update_size is 'elements', and must be one of"),
    (DividesByRate, "test_bears_a_learning_rate_of_zero", (), "step raises ZeroDivisionError"),
    (NanWithoutRate, "test_bears_a_learning_rate_of_zero", (), "leaves embed.weight with non-finite values"),
    (Decaying, "test_leaves_parameters_without_a_gradient_alone", (), "which has no gradient"),
    (FirstComeOnly, "test_leaves_parameters_without_a_gradient_alone", (), "first gradient later than others"),
    (GlobalState, "test_keeps_its_state_by_parameter", FP32, "1 keys that are no parameters"),
    (DottedState, "test_keeps_its_state_by_parameter", FP32, "the key 'moment.first'; only strings without dots"),
    (HistoryState, "test_keeps_its_state_by_parameter", FP32, "the state 'history' of embed.weight is a list"),
    (CountsBesideIt, "test_resumes_bit_identical", (), "embed.weight differs after a resume"),
    (Folds, "test_resumes_bit_identical", (), "embed.weight differs after a resume"),
    (LeavesOutParametersOnly, "test_leaves_out_a_step_if_it_says_so", (), "embed.weight is another than without it"),
    (ScalesNothing, "test_scales_gradients_if_it_says_so", (), "embed.weight is another than with gradients that are"),
    (NamesOthers, "test_evaluation_weights_are_those_of_its_parameters", (), "'weight', which is the name of no"),
    (NamesThemLater, "test_evaluation_weights_are_those_of_its_parameters", (), "had none before the first one"),
    (Flattens, "test_evaluation_weights_are_those_of_its_parameters", (), r"tensor \(66,\) for embed.weight, which is"),
    (Replaces, "test_evaluation_weights_are_those_of_its_parameters", (), "evaluation_weights changes embed.weight"),
    (CountsQuestions, "test_evaluation_weights_are_those_of_its_parameters", (), "other weights for embed.weight"),
    (MakesState, "test_evaluation_weights_are_those_of_its_parameters", (), "evaluation_weights makes state"),
    (ForgetsTheAverage, "test_resumes_bit_identical", (), "the evaluation weights of embed.weight differ after"),
    (WholeAverages, "test_updates_shards_like_whole_tensors", "folder", "a tensor whole for embed.weight, which is"),
    (MixedUp, "test_updates_shards_like_whole_tensors", "folder", "sharded over 1 ranks differs by"),
    (RowsWithoutAWord, "test_updates_shards_like_whole_tensors", "folder", "an optimizer says by empty_state how"),
    (RowsSaidToBeWhole, "test_updates_shards_like_whole_tensors", "folder", r"empty_state gives whole \(11,\)"),
]


@pytest.mark.parametrize(("optimizer", "check", "given", "sentence"), FAULTS)
def test_a_fault_is_found_and_told(optimizer, check, given, sentence, tmp_path):
    class Case(OptimizerConformance):
        def make(self, *, parameters):
            averages = issubclass(optimizer, Averaging)
            return optimizer(parameters if averages else [entry.parameter for entry in parameters])

    with pytest.raises(AssertionError, match=sentence):
        getattr(Case(), check)(*((tmp_path,) if given == "folder" else given))


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        (ShardNormCase, "on two ranks: embed.weight sharded over 2 ranks differs by"),
        (LocalStateCase, "on two ranks: the state 'last' of embed.weight is a plain tensor"),
        (BlocksCase, r"'largest' of embed.weight has the shape \(2,\) .* empty_state gives \(1,\)"),
    ],
)
def test_a_fault_on_two_ranks_is_found_and_told(case, sentence):
    with pytest.raises(AssertionError, match=sentence):
        case().test_updates_shards_like_whole_tensors_on_two_ranks()


def test_state_of_another_shape_is_resumed_on_another_layout():
    RowsCase().test_updates_shards_like_whole_tensors_on_two_ranks()


def test_a_period_is_gone_through_whatever_its_length():
    class Case(OptimizerConformance):
        period = 40

        def make(self, *, parameters):
            return Later([entry.parameter for entry in parameters])

    with pytest.raises(AssertionError, match=r"embed\.weight differs after a resume"):
        Case().test_resumes_bit_identical()
    Case.period = 1
    Case().test_resumes_bit_identical()


def test_an_optimizer_of_some_roles_is_given_no_others():
    seen = set()

    class Case(OptimizerConformance):
        roles = ("matrix", "expert")

        def make(self, *, parameters):
            seen.update(entry.role for entry in parameters)
            return Momentum([entry.parameter for entry in parameters])

    Case().test_takes_every_parameter_once()
    Case().test_resumes_bit_identical()

    assert seen == {"matrix", "expert"}


class OfWholeMatrices(Momentum):
    """Made before ``map_whole``: what it states has no meaning any more."""

    compute_layout = "full_matrix"

    def update(self, parameter, group):
        super().update(parameter, group)
        parameter.sub_(group["lr"] * parameter.grad / torch.linalg.vector_norm(parameter.grad))


def test_an_optimizer_that_states_a_layout_goes_on_working(tmp_path):
    class Case(OptimizerConformance):
        def make(self, *, parameters):
            return OfWholeMatrices([entry.parameter for entry in parameters])

    Case().test_updates_shards_like_whole_tensors(tmp_path)


def test_every_check_has_a_fault_that_it_finds():
    checks = {name for name in vars(OptimizerConformance) if name.startswith("test_")}

    found = {check for _, check, _, _ in FAULTS} | {"test_updates_shards_like_whole_tensors_on_two_ranks"}
    assert found == checks


AFTER_ANOTHER_GROUP = """
import pathlib, sys
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from forge_testing.optimizer import OptimizerConformance
from torch.optim import Adagrad

class TestAdagrad(OptimizerConformance):
    def make(self, *, parameters):
        return Adagrad([entry.parameter for entry in parameters], lr=0.1)

folder = pathlib.Path(sys.argv[1])
dist.distributed_c10d._world.group_count = 1  # so that this group has a name that the next one has not
dist.init_process_group("gloo", init_method=(folder / "another").as_uri(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))
case = TestAdagrad()
for entry in case._parameters():
    for placement in (Shard(0), Shard(entry.parameter.ndim - 1)):
        nn.Parameter(distribute_tensor(entry.parameter.detach(), mesh, [placement]))
dist.destroy_process_group()
case.test_updates_shards_like_whole_tensors(folder)
"""


def test_groups_that_a_process_has_had_before_do_not_matter(tmp_path):
    """torch remembers their meshes, and gives them to tensors on meshes that are equal."""
    (tmp_path / "script.py").write_text(AFTER_ANOTHER_GROUP)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path)]
    done = fork_server.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200)
    assert done.returncode == 0, done.stdout
