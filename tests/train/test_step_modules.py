import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core.distributed.mesh import join_process_group
from forge_core.errors import PluginError
from forge_core.train.step_modules import StepModules


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(2), persistent=False)
        self.register_buffer("bias", torch.zeros(2))

    def accumulators(self):
        return {"count": self.count}

    def before_optimizer_step(self, reduced, progress):
        self.bias += progress * reduced["count"]

    def step_metrics(self):
        return {"most": self.bias.max()}


class OneRank:
    degrees = {"pp": 1}

    def sum_over(self, value, axes):
        assert axes == ("dp_replicate", "dp_shard", "cp"), "the ranks that hold other tokens, and never other layers"
        return value


@pytest.fixture
def parts():
    return [nn.ModuleDict({"0": Counter()}), nn.ModuleDict({"1": nn.Sequential(Counter())})]


def test_modules_are_found_given_their_sums_and_zeroed(parts):
    first, second = parts[0]["0"], parts[1]["1"][0]
    first.count += torch.tensor([1.0, 2])
    second.count += torch.tensor([2.0**24 + 2, 5])

    StepModules(parts, OneRank()).before_optimizer_step(0.5)

    assert first.bias.tolist() == [0.5, 1]
    assert second.bias.tolist() == [2.0**23 + 1, 2.5]
    assert not torch.cat([first.count, second.count]).any()


@pytest.mark.parametrize(("left_out", "bias"), [(0.0, [1.0, 2.0]), (1.0, [0.0, 0.0])])
def test_a_step_that_is_left_out_changes_nothing_and_the_host_need_not_know(parts, left_out, bias):
    parts[0]["0"].count += torch.tensor([1.0, 2])

    StepModules(parts, OneRank()).before_optimizer_step(1.0, torch.tensor(left_out))

    assert parts[0]["0"].bias.tolist() == bias
    assert not parts[0]["0"].count.any()


class Exchanging(Counter):
    """Puts another tensor where its bias was."""

    def before_optimizer_step(self, reduced, progress):
        self.bias = self.bias + progress * reduced["count"]


@pytest.mark.parametrize(("left_out", "bias"), [(0.0, [1.0, 2.0]), (1.0, [0.0, 0.0])])
def test_a_step_that_is_left_out_is_taken_back_from_a_module_that_exchanges_its_buffers(left_out, bias):
    module = Exchanging()
    before = module.bias
    module.count += torch.tensor([1.0, 2])

    StepModules([nn.ModuleDict({"0": module})], OneRank()).before_optimizer_step(1.0, torch.tensor(left_out))

    assert module.bias.tolist() == bias
    assert module.bias is before, "who knows the buffer knows its value"


class Outer(Counter):
    """Has a contributor in it, and a module that is none."""

    def __init__(self):
        super().__init__()
        self.inner = Counter()
        self.part = nn.Module()
        self.part.register_buffer("scale", torch.ones(2))

    def before_optimizer_step(self, reduced, progress):
        super().before_optimizer_step(reduced, progress)
        self.part.scale += 1


class Clones(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten.clone.default
        return function(*args, **(kwargs or {}))


def test_each_buffer_that_is_saved_is_kept_once_where_contributors_are_nested():
    outer = Outer()
    for module in (outer, outer.inner):
        module.count += 1
    contributors = StepModules([nn.ModuleDict({"0": outer})], OneRank())

    with Clones() as clones:
        contributors.before_optimizer_step(1.0, torch.tensor(1.0))

    assert clones.count == 3
    assert outer.part.scale.tolist() == [1, 1]
    assert not torch.cat([outer.bias, outer.inner.bias]).any()


class Trained(Counter):
    """Has a parameter, and keeps what it reports of the last step."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("last", torch.zeros(2), persistent=False)

    def before_optimizer_step(self, reduced, progress):
        super().before_optimizer_step(reduced, progress)
        self.last.copy_(reduced["count"])


@pytest.mark.parametrize("left_out", [None, torch.tensor(0.0)], ids=["", "may be left out"])
def test_what_a_frozen_module_saves_stays_and_what_it_reports_goes_on(left_out):
    """A phase freezes and thaws by gradients alone, and so may a resume, or other phases, in any step."""
    module = Trained()
    contributors = StepModules([nn.ModuleDict({"0": module})], OneRank())
    found = []

    for count, gradient in enumerate((torch.zeros(2), None, None, torch.zeros(2)), 1):
        module.weight.grad = gradient
        module.count += count
        contributors.before_optimizer_step(1.0, left_out)
        found.append((module.bias[0].item(), module.last[0].item()))

    assert found == [(1, 1), (1, 2), (1, 3), (5, 4)]


def test_a_step_that_is_left_out_is_reported_by_what_was_measured_in_it():
    """The values of the last step that counted were logged for it, and after a resume none."""
    module = Trained()
    module.count += 3

    StepModules([nn.ModuleDict({"0": module})], OneRank()).before_optimizer_step(1.0, torch.tensor(1.0))

    assert (module.bias[0].item(), module.last[0].item()) == (0, 3)


def test_a_frozen_part_of_a_trained_module_stays_and_the_other_way_round():
    outer = Outer()
    outer.part.weight, outer.inner.weight, outer.weight = (nn.Parameter(torch.ones(1)) for _ in range(3))
    contributors = StepModules([nn.ModuleDict({"0": outer})], OneRank())

    def moved(*trained):
        before = [one.clone() for one in (outer.part.scale, outer.inner.bias, outer.bias)]
        for module in (outer.part, outer.inner, outer):
            module.weight.grad = torch.zeros(1) if module in trained else None
        for module in (outer, outer.inner):
            module.count += 1
        contributors.before_optimizer_step(1.0)
        after = (outer.part.scale, outer.inner.bias, outer.bias)
        return [not torch.equal(one, other) for one, other in zip(before, after, strict=True)]

    assert moved() == [False, False, False]
    assert moved(outer.part) == [True, False, True]
    assert moved(outer.inner) == [False, True, True]
    assert moved(outer) == [False, False, True]


def test_a_module_without_parameters_goes_by_the_nearest_one_around_it_that_has_some():
    layer = nn.ModuleDict({"router": nn.Sequential(Counter()), "experts": nn.Linear(1, 1)})
    router = layer["router"][0]
    other = nn.Linear(1, 1)
    contributors = StepModules([nn.ModuleDict({"0": layer, "1": other})], OneRank())

    other.weight.grad = torch.zeros(1, 1)
    router.count += 1
    contributors.before_optimizer_step(1.0)
    assert not router.bias.any()

    layer["experts"].bias.grad = torch.zeros(1)
    router.count += 1
    contributors.before_optimizer_step(1.0)
    assert router.bias.tolist() == [1, 1]


def test_what_a_forgotten_step_has_counted_is_thrown_away(parts):
    parts[0]["0"].count += 1
    contributors = StepModules(parts, OneRank())

    contributors.forget()
    contributors.before_optimizer_step(1.0)

    assert not parts[0]["0"].bias.any()


def test_metrics_have_the_names_of_their_modules(parts):
    parts[1]["1"][0].count += 3
    contributors = StepModules(parts, OneRank())
    contributors.before_optimizer_step(1.0)

    assert contributors.metrics(torch.device("cpu")) == {"most/0": 0.0, "most/1.0": 3.0}


class Late(Counter):
    def __init__(self):
        super().__init__()
        self.found = {}

    def step_metrics(self):
        return self.found


class FirstStage:
    """The other one reports nothing."""

    degrees = {"pp": 2}

    def gather_over(self, axis, value):
        return [value, []]

    def sum_over(self, value, axes):
        return value


def test_with_a_pipeline_a_metric_that_comes_later_is_refused():
    """It had no place in what stages exchange, and was left out in silence."""
    module, device = Late(), torch.device("cpu")
    modules = StepModules([nn.ModuleDict({"0": module})], FirstStage())
    module.found = {"a": torch.ones(())}
    assert modules.metrics(device) == {"a/0": 1.0}

    module.found = {"b": torch.ones(())}
    with pytest.raises(PluginError, match="'b/0' was not among what modules reported at the first logged step"):
        modules.metrics(device)


class Told(nn.Module):
    """Reports, and does nothing else."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def step_metrics(self):
        return {"told": self.value}


def test_what_only_reports_is_found_too():
    reported = StepModules([nn.ModuleDict({"0": Told(torch.ones(1, dtype=torch.float64))})], OneRank()).metrics("cpu")

    assert {name: (value.shape, value.dtype) for name, value in reported.items()} == {"told/0": ((), torch.float32)}


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (1.0, "the metric 'told' must be a tensor with one value, and is a float"),
        (torch.ones(8), r"the metric 'told' must be a tensor with one value, and is of the shape \(8,\)"),
    ],
)
def test_what_is_no_scalar_is_refused_by_name(value, sentence):
    with pytest.raises(PluginError, match=sentence) as refused:
        StepModules([nn.ModuleDict({"0": Told(value)})], OneRank()).metrics("cpu")

    assert refused.value.__notes__ == ["raised in step_metrics of Told (0)"]


@pytest.fixture
def one_rank():
    join_process_group(torch.device("cpu"))
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_what_follows_from_a_parameter_that_is_cut_over_ranks_is_made_whole(one_rank):
    squares = distribute_tensor(torch.tensor([1.0, 2.0]), one_rank, [Shard(0)]).square()
    reported = StepModules([nn.ModuleDict({"0": Told(squares.sum())})], OneRank()).metrics("cpu")

    assert type(reported["told/0"]) is torch.Tensor
    assert reported["told/0"] == 5


class Learning(Counter):
    """Reads a parameter after forward, as if it were whole."""

    def __init__(self, parameter):
        super().__init__()
        self.parameter = parameter

    def before_optimizer_step(self, reduced, progress):
        self.bias *= self.parameter


def test_who_takes_a_parameter_for_whole_is_told_how_to_get_it(one_rank):
    parameter = distribute_tensor(torch.ones(2), one_rank, [Shard(0)])

    with pytest.raises(RuntimeError, match="DTensor") as raised:
        StepModules([nn.ModuleDict({"0": Learning(parameter)})], OneRank()).before_optimizer_step(0.5)

    named, told = raised.value.__notes__
    assert named == "raised in before_optimizer_step of Learning (0)"
    assert "parameter.full_tensor() is the whole one" in told
