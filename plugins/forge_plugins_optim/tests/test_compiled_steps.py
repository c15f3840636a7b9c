"""``compile``: one kernel does what the operations one after another do, and is compiled once."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core.contracts.optimizer import NamedParameter
from forge_core.errors import ConfigError
from forge_plugins_optim.adamw import adamw
from forge_plugins_optim.compiled_step import _rows
from forge_plugins_optim.config import AdamWConfig, LionConfig, ScheduleFreeAdamWConfig, SGDConfig
from forge_plugins_optim.lion import Lion
from forge_plugins_optim.rounded_adamw import _correction
from forge_plugins_optim.schedule_free import ScheduleFreeAdamW
from forge_plugins_optim.sgd import SGD
from forge_testing.several_ranks import on_ranks

SPLIT = {"rounding": "split"}
CASES = {
    "adamw split": (adamw, AdamWConfig, {"lr": 1e-3, **SPLIT}, torch.bfloat16),
    "lion": (Lion, LionConfig, {"lr": 1e-4}, torch.float32),
    "lion split": (Lion, LionConfig, {"lr": 1e-4, **SPLIT}, torch.bfloat16),
    "sgd": (SGD, SGDConfig, {"lr": 1e-2}, torch.float32),
    "sgd nesterov": (
        SGD,
        SGDConfig,
        {"lr": 1e-2, "nesterov": True, "decoupled_weight_decay": False},
        torch.float32,
    ),
    "sgd without momentum": (SGD, SGDConfig, {"lr": 1e-2, "momentum": 0.0}, torch.float32),
    "schedule_free_adamw": (ScheduleFreeAdamW, ScheduleFreeAdamWConfig, {"lr": 1e-3}, torch.float32),
    "schedule_free_adamw split": (ScheduleFreeAdamW, ScheduleFreeAdamWConfig, {"lr": 1e-3, **SPLIT}, torch.bfloat16),
}
SHAPES = {"a": (40, 52), "b": (7, 9), "c": (5,), "d": (1,)}
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Of compiled kernels, of which there may be one by other lines elsewhere."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "inductor"))


def make(case: str, *, compile: bool, lay_out=torch.clone):  # noqa: A002 – as the key
    factory, config, keys, dtype = CASES[case]
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
    parameters = {name: nn.Parameter(lay_out(value)) for name, value in values.items()}
    parameters["b"].data = parameters["b"].data.t() if lay_out is torch.clone else parameters["b"].data
    named = [NamedParameter(name, one, "matrix") for name, one in parameters.items()]
    return factory(config(**keys, compile=compile), parameters=named), parameters


def trained(optimizer, parameters, first: int, last: int, lay_out=torch.clone, left_out=()) -> None:
    """With gradients clipped by powers of two, which round nothing."""
    rate = optimizer.param_groups[0]["lr"]
    for step in range(first, last):
        optimizer.param_groups[0]["lr"] = rate * (1 - step / 20)
        optimizer.left_out = torch.tensor(float(step in left_out)) if left_out else None
        scale = torch.tensor(0.5 ** (step % 2))
        optimizer.gradient_scale = scale
        for name, parameter in parameters.items():
            generator = torch.Generator().manual_seed(100 * step + ord(name))
            value = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            if not optimizer.scales_gradients:
                value *= scale
            parameter.grad = lay_out(value * torch.nan if step in left_out else value)
        optimizer.step()
    optimizer.param_groups[0]["lr"] = rate


@pytest.mark.parametrize("case", CASES)
def test_it_does_what_the_operations_do_and_is_compiled_once(case):
    compiled, ours = make(case, compile=True)
    plain, theirs = make(case, compile=False)
    before = counters["stats"]["unique_graphs"]

    trained(compiled, ours, 0, 8, left_out=(0, 3))
    trained(plain, theirs, 0, 8, left_out=(0, 3))

    assert (compiled.scales_gradients, plain.scales_gradients) == (True, False)
    assert counters["stats"]["unique_graphs"] == before
    for name in SHAPES:
        torch.testing.assert_close(*(one.exact(p) for one, p in ((compiled, ours[name]), (plain, theirs[name]))))
        error = (compiled.exact(ours[name]) - plain.exact(theirs[name])).detach().abs().max()
        assert float(error) < 1e-6
        assert {slot: value.dtype for slot, value in compiled.state[ours[name]].items()} == {
            slot: value.dtype for slot, value in plain.state[theirs[name]].items()
        }


def test_of_a_group_only_what_is_in_bf16_is_split():
    made = {}
    for compile in (True, False):  # noqa: A001 - as the key
        parameters = {"h": nn.Parameter(torch.ones(64, dtype=torch.bfloat16)), "w": nn.Parameter(torch.ones(64))}
        named = [NamedParameter(name, one, "matrix") for name, one in parameters.items()]
        optimizer = Lion(LionConfig(lr=1e-4, **SPLIT, compile=compile), parameters=named)
        trained(optimizer, parameters, 0, 4)
        made[compile] = {name: optimizer.exact(one).clone() for name, one in parameters.items()}
        assert [name for name, one in parameters.items() if "tail" in optimizer.state[one]] == ["h"]

    for name, one in made[True].items():
        torch.testing.assert_close(one, made[False][name], rtol=0, atol=1e-6)


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for the device."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket.__name__ in ("_local_scalar_dense", "is_nonzero", "equal", "nonzero")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", ["adamw split", "schedule_free_adamw", "lion", "sgd"])
def test_the_host_waits_for_nothing(case):
    optimizer, parameters = make(case, compile=True)
    trained(optimizer, parameters, 0, 2)
    optimizer.compiled._compiled = optimizer.compiled._plain  # torch compiles nothing under a mode
    optimizer.left_out = torch.tensor(1.0)

    with Reads() as reads:
        optimizer.step()

    assert reads.count == 0


def test_numbers_of_each_parameter_lie_where_no_kernel_copies_them_first():
    rows = _rows([1.0, torch.tensor(2.0), [torch.tensor(3.0), torch.tensor(4.0)]] * 3, [torch.zeros(7)] * 2)

    assert [row.tolist() for row in rows] == [[1.0, 2.0, 3.0] * 3, [1.0, 2.0, 4.0] * 3]
    assert [row.data_ptr() % 16 for row in rows] == [0, 0]


@pytest.mark.parametrize("beta", [0.0, 0.9, 0.999, 0.99999])
def test_what_moments_are_divided_by_is_exact_to_the_bits_of_fp32(beta):
    steps = torch.tensor([1.0, 2.0, 10.0, 1e3, 1e6])

    expected = 1 - beta ** steps.double()

    torch.testing.assert_close(_correction(beta, steps).double(), expected, rtol=3e-7, atol=0)


@pytest.mark.parametrize("case", ["adamw split", "schedule_free_adamw"])
def test_a_resume_goes_on_bit_for_bit(case):
    optimizer, straight = make(case, compile=True)
    trained(optimizer, straight, 0, 3)
    fresh, resumed = make(case, compile=True)
    with torch.no_grad():
        for name, parameter in straight.items():
            resumed[name].copy_(parameter)
            fresh.state[resumed[name]] = {slot: value.clone() for slot, value in optimizer.state[parameter].items()}

    trained(optimizer, straight, 3, 6)
    trained(fresh, resumed, 3, 6)

    for name in SHAPES:
        assert torch.equal(fresh.exact(resumed[name]), optimizer.exact(straight[name]))


class OnTwoRanks:
    def cut(self) -> list[float]:
        mesh = init_device_mesh("cpu", (2,))

        def lay_out(value):
            return distribute_tensor(value, mesh, [Shard(0)])

        compiled, parts = make("adamw split", compile=True, lay_out=lay_out)
        plain, others = make("adamw split", compile=False, lay_out=lay_out)
        trained(compiled, parts, 0, 4, lay_out)
        trained(plain, others, 0, 4, lay_out)
        pairs = [(compiled.exact(parts[name]), plain.exact(others[name])) for name in SHAPES]
        return [float((one - other).detach().abs().max()) if one.numel() else 0.0 for one, other in pairs]


def test_parts_on_two_ranks_are_stepped_by_it():
    for errors in on_ranks(OnTwoRanks, "cut", 2):
        assert max(errors) < 1e-6


def test_without_a_compiler_it_is_refused_before_the_first_step():
    torch._dynamo.reset()
    without = {"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}  # pytest would not undo the second

    with (
        torch._inductor.config.patch(without),
        pytest.raises(ConfigError, match=r"optimizer.compile: torch.compile cannot make a kernel here \(.+\)"),
    ):
        make("lion", compile=True)
