"""``rounding``: with "split", bf16 parameters whose lower halves are state are trained as fp32 ones are, bit for bit;
with "stochastic", those that are rounded by chance are so on average."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from forge_core.contracts.optimizer import HasEvaluationWeights, NamedParameter
from forge_plugins_optim import foreach, stochastic_rounding
from forge_plugins_optim.adafactor import Adafactor
from forge_plugins_optim.adamw import adamw
from forge_plugins_optim.adamw_8bit import AdamW8bit
from forge_plugins_optim.config import (
    AdafactorConfig,
    AdamW8bitConfig,
    AdamWConfig,
    LionConfig,
    MuonConfig,
    ScheduleFreeAdamWConfig,
    SGDConfig,
)
from forge_plugins_optim.lion import Lion
from forge_plugins_optim.muon import Muon
from forge_plugins_optim.schedule_free import ScheduleFreeAdamW
from forge_plugins_optim.sgd import SGD
from forge_plugins_optim.split_weights import joined, split
from forge_testing.several_ranks import on_ranks

OPTIMIZERS = {
    "adamw": (adamw, AdamWConfig, {"lr": 1e-3}),
    "adamw_8bit": (AdamW8bit, AdamW8bitConfig, {"lr": 1e-3, "min_elements": 100}),
    "lion": (Lion, LionConfig, {"lr": 1e-4}),
    "sgd": (SGD, SGDConfig, {"lr": 1e-2, "nesterov": True, "decoupled_weight_decay": False}),
    "schedule_free_adamw": (ScheduleFreeAdamW, ScheduleFreeAdamWConfig, {"lr": 1e-3}),
    "muon": (Muon, MuonConfig, {"lr": 1e-3, "dtype": "fp32"}),
}
ROUNDED = {**OPTIMIZERS, "adafactor": (Adafactor, AdafactorConfig, {"lr": 1e-3, "beta1": 0.5})}
"""Those that round by chance."""
SHAPES = {"a": (257, 263), "b": (8, 6)}
"""The first is cut into two pieces, neither of them of a multiple of what a CPU does at once."""


def every_kind_of_number() -> torch.Tensor:
    """Each upper half, with tails around nothing, halfway and everything, and some of any."""
    upper = torch.arange(2**16, dtype=torch.int64).view(-1, 1) << 16
    tails = torch.tensor([0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])
    some = torch.randint(2**16, (7,), generator=torch.Generator().manual_seed(0))
    return (upper + torch.cat([tails, some])).flatten().to(torch.int32).view(torch.float32)


def test_both_halves_make_every_bit_of_a_number_again():
    values = every_kind_of_number()
    values = values[~values.isnan()]

    assert torch.equal(joined(*split(values)).view(torch.int32), values.view(torch.int32))


def test_the_upper_half_is_what_a_cast_gives_but_for_halves_of_ties():
    values = every_kind_of_number()
    values = values[~values.isnan()]
    upper, cast = split(values)[0], values.bfloat16()

    is_tie = (values.view(torch.int32) & 0xFFFF) == 0x8000
    differ = upper.view(torch.int16) != cast.view(torch.int16)
    assert torch.equal(upper[~is_tie], cast[~is_tie])
    assert 0 < int(differ.sum()) <= int(is_tie.sum()) / 2
    distance, of_cast = ((one.double() - values.double()).abs() for one in (upper, cast))
    assert torch.equal(distance[upper.isfinite()], of_cast[upper.isfinite()])


def test_the_largest_numbers_are_infinite_above_and_themselves_together():
    values = torch.tensor([3.4028235e38, -3.4028235e38, torch.inf, -torch.inf, 3.38e38])
    upper, tails = split(values)

    assert upper.tolist() == [torch.inf, -torch.inf, torch.inf, -torch.inf, pytest.approx(3.38e38, rel=4e-3)]
    assert torch.equal(joined(upper, tails), values)


def test_nan_stays_nan_in_both():
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000], dtype=torch.int32)
    upper, tails = split(bits.view(torch.float32))

    assert upper.isnan().all()
    assert joined(upper, tails).isnan().all()


def test_a_weight_without_a_tail_is_itself():
    weights = torch.linspace(-3, 3, 50).bfloat16()

    assert torch.equal(joined(weights, torch.zeros(50, dtype=torch.int16)), weights.float())


def started(name: str) -> torch.Tensor:
    """What bf16 can express, as a run in it begins."""
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(len(name))).bfloat16()


def gradient(name: str, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + ord(name))
    return torch.randn(SHAPES[name], generator=generator).bfloat16()


def make(kind: str, dtype=torch.bfloat16, lay_out=torch.clone, **keys):
    """An optimizer, and its parameters."""
    factory, config, given = ROUNDED[kind]
    parameters = {name: nn.Parameter(lay_out(started(name).to(dtype))) for name in SHAPES}
    named = [NamedParameter(name, one, "matrix") for name, one in parameters.items()]
    return factory(config(**{**given, **keys}), parameters=named), parameters


def trained(optimizer, parameters, first: int, last: int, lay_out=torch.clone, left_out=()) -> None:
    rates = [group["lr"] for group in optimizer.param_groups]
    for step in range(first, last):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - step / 20)
        if left_out:
            optimizer.left_out = torch.tensor(float(step in left_out))
        for name, parameter in parameters.items():
            value = gradient(name, step).to(parameter.dtype)
            parameter.grad = lay_out(value * torch.nan if step in left_out else value)
        optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def exact(optimizer, parameter) -> torch.Tensor:
    upper, lower = parameter.detach(), optimizer.state[parameter].get("tail")
    if lower is None:
        return upper.full_tensor() if isinstance(upper, DTensor) else upper
    if isinstance(parameter, DTensor):  # no collective has int16
        upper, lower = upper.full_tensor(), lower.int().full_tensor().short()
    return joined(upper, lower)


@pytest.mark.parametrize("left_out", [(), (0, 3)], ids=["", "steps left out"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_it_is_trained_as_a_parameter_in_fp32_bit_for_bit(kind, left_out):
    torch.set_num_threads(1)
    optimizer, parameters = make(kind, rounding="split")
    judge, in_fp32 = make(kind, torch.float32)
    for step in range(12):
        if step not in left_out:
            trained(judge, in_fp32, step, step + 1)

    trained(optimizer, parameters, 0, 12, left_out=left_out)

    for name, parameter in parameters.items():
        assert torch.equal(exact(optimizer, parameter), in_fp32[name]), name
        assert torch.equal(parameter, split(in_fp32[name].detach())[0])
        assert not torch.equal(parameter.float(), in_fp32[name])
        if isinstance(optimizer, HasEvaluationWeights):
            assert torch.equal(optimizer.evaluation_weights()[name], judge.evaluation_weights()[name])


EACH = [*((kind, "split") for kind in OPTIMIZERS), *((kind, "stochastic") for kind in ROUNDED)]


@pytest.mark.parametrize("elements", [2**26, 100])
@pytest.mark.parametrize(("kind", "rounding"), EACH)
def test_parameters_that_are_stepped_together_as_on_a_gpu_are_as_each_alone(kind, rounding, elements, monkeypatch):
    alone, expected = make(kind, rounding=rounding)
    trained(alone, expected, 0, 5, left_out=(0, 3))
    monkeypatch.setattr(foreach, "_fits_a_cache", lambda _: False)
    monkeypatch.setattr(foreach, "_BUCKET", elements)
    together, parameters = make(kind, rounding=rounding)
    trained(together, parameters, 0, 5, left_out=(0, 3))

    for name in SHAPES:
        assert_close(rounding, exact(together, parameters[name]), exact(alone, expected[name]))


@pytest.mark.parametrize("elements", [2**26, 100])
@pytest.mark.parametrize("kind", ["adafactor", "lion", "muon", "schedule_free_adamw", "sgd"])
def test_parameters_in_fp32_that_are_stepped_together_are_as_each_alone(kind, elements, monkeypatch):
    alone, expected = make(kind, torch.float32)
    trained(alone, expected, 0, 5, left_out=(0, 3))
    monkeypatch.setattr(foreach, "_fits_a_cache", lambda _: False)
    monkeypatch.setattr(foreach, "_BUCKET", elements)
    together, parameters = make(kind, torch.float32)
    trained(together, parameters, 0, 5, left_out=(0, 3))

    for name in SHAPES:
        torch.testing.assert_close(parameters[name], expected[name], rtol=0, atol=1e-6)


def test_on_a_gpu_no_more_are_stepped_together_than_temporaries_may_take(monkeypatch):
    monkeypatch.setattr(foreach, "_fits_a_cache", lambda _: False)
    monkeypatch.setattr(foreach, "_BUCKET", 100)
    lion, parameters = make("lion", torch.float32)
    assert [len(one) for one in lion.buckets([*parameters.values(), parameters["b"]])] == [1, 2]


def assert_close(rounding: str, values: torch.Tensor, expected: torch.Tensor) -> None:
    """The last bit of a sum may decide how chance rounds one value of a thousand."""
    error = (values - expected).abs()
    assert float(error.max()) <= (1e-6 if rounding == "split" else 2.0**-6)
    assert float((error > 1e-6).double().mean()) <= 1e-3


@pytest.mark.parametrize("rounding", ["stochastic", "split"])
def test_moments_have_the_dtype_that_their_own_parameter_asks_for(rounding, monkeypatch):
    monkeypatch.setattr(foreach, "_fits_a_cache", lambda _: False)
    made = [nn.Parameter(torch.ones(4, 4, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32, torch.bfloat16)]
    named = [NamedParameter(str(number), one, "matrix") for number, one in enumerate(made)]
    optimizer = adamw(AdamWConfig(lr=1e-3, rounding=rounding), parameters=named)
    for one in made:
        one.grad = torch.ones_like(one)
    optimizer.step()

    of_bf16 = torch.bfloat16 if rounding == "stochastic" else torch.float32
    assert [optimizer.state[one]["exp_avg_sq"].dtype for one in made] == [of_bf16, torch.float32, of_bf16]


@pytest.mark.parametrize(("kind", "rounding"), EACH)
def test_a_resume_goes_on_bit_for_bit(kind, rounding):
    optimizer, straight = make(kind, rounding=rounding)
    trained(optimizer, straight, 0, 4)
    fresh, resumed = make(kind, rounding=rounding)
    read(optimizer, straight, fresh, resumed)

    trained(optimizer, straight, 4, 8)
    trained(fresh, resumed, 4, 8)

    for name in SHAPES:
        assert torch.equal(exact(fresh, resumed[name]), exact(optimizer, straight[name]))


def read(optimizer, before, fresh, after) -> None:
    with torch.no_grad():
        for name, parameter in before.items():
            after[name].copy_(parameter)
            fresh.state[after[name]] = {
                slot: value.clone() if torch.is_tensor(value) else value
                for slot, value in optimizer.state[parameter].items()
            }


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_run_that_was_rounded_to_the_nearest_goes_on_split_and_back(kind):
    rounded, before = make(kind)
    trained(rounded, before, 0, 3)
    optimizer, parameters = make(kind, rounding="split")
    read(rounded, before, optimizer, parameters)
    trained(optimizer, parameters, 3, 6)
    tails = [optimizer.state[parameter]["tail"] for parameter in parameters.values()]
    again, after = make(kind)
    read(optimizer, parameters, again, after)
    trained(again, after, 6, 8)

    assert all(int(tail.count_nonzero()) > 0.9 * tail.numel() for tail in tails)
    for name in SHAPES:
        assert "tail" not in again.state[after[name]]
        assert {*again.state[after[name]]} == {*rounded.state[before[name]]}
        for slot, value in rounded.state[before[name]].items():
            assert again.state[after[name]][slot].dtype == value.dtype, slot
        assert not torch.equal(after[name], parameters[name])


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_run_that_was_rounded_by_chance_goes_on_split_and_back(kind):
    rounded, before = make(kind, rounding="stochastic")
    trained(rounded, before, 0, 3)
    optimizer, parameters = make(kind, rounding="split")
    read(rounded, before, optimizer, parameters)
    trained(optimizer, parameters, 3, 6)
    straight, others = make(kind, rounding="split")
    trained(straight, others, 0, 1)
    again, after = make(kind, rounding="stochastic")
    read(optimizer, parameters, again, after)
    trained(again, after, 6, 8)

    for name in SHAPES:
        assert dtypes(optimizer, parameters[name]) == dtypes(straight, others[name])
        assert dtypes(again, after[name]) == dtypes(rounded, before[name])


def dtypes(optimizer, parameter) -> dict[str, torch.dtype]:
    return {slot: value.dtype for slot, value in optimizer.state[parameter].items()}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_what_is_rounded_by_chance_is_all_in_bf16_beside_counts_and_codes(kind):
    optimizer, parameters = make(kind, rounding="stochastic")
    trained(optimizer, parameters, 0, 1)
    own = {"adamw_8bit": torch.uint8}.get(kind, torch.bfloat16)

    states = {slot: value for slot, value in optimizer.state[parameters["a"]].items() if value.shape == SHAPES["a"]}
    assert {value.dtype for value in states.values()} == {own}


@pytest.mark.parametrize("kind", ROUNDED)
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_by_chance_weights_go_the_way_of_fp32_ones_that_the_nearest_lose(kind, rounding):
    """Of the way of fp32 weights with steps of 1e-4, chance goes all, with the noise of 67,591 roundings a step."""
    small = {"lr": 3e-3 if kind == "muon" else 1e-4, "weight_decay": 0.0}
    (optimizer, parameters), (judge, in_fp32) = (
        make(kind, **small, **({} if dtype == torch.float32 else {"rounding": rounding}), dtype=dtype)
        for dtype in (torch.bfloat16, torch.float32)
    )
    for _ in range(12):
        for name in SHAPES:
            parameters[name].grad = gradient(name, 0)
            in_fp32[name].grad = gradient(name, 0).float()
        optimizer.step()
        judge.step()

    way, gone = (one["a"].detach().double() - started("a").double() for one in (in_fp32, parameters))
    part = float((gone * way).sum() / (way * way).sum())
    assert (part == pytest.approx(1, abs=0.2)) if rounding == "stochastic" else part < 0.7


@pytest.mark.parametrize("kind", ROUNDED)
def test_a_weight_and_each_of_its_states_have_chance_of_their_own(kind, monkeypatch):
    seen = []

    def rounded(values, bits):
        seen.append(tuple((bits & 0xFFFF).flatten()[:40].tolist()))
        return original(values, bits)

    original = stochastic_rounding.rounded
    for module in (foreach, stochastic_rounding):
        monkeypatch.setattr(module, "rounded", rounded)
    optimizer, parameters = make(kind, rounding="stochastic")
    trained(optimizer, parameters, 0, 2)

    assert len(seen) >= 4  # two parameters in two steps
    assert len({*seen}) == len(seen)


def test_moments_by_chance_are_those_in_fp32_on_average():
    optimizer, parameters = make("lion", rounding="stochastic")
    judge, in_fp32 = make("lion", torch.float32)
    trained(optimizer, parameters, 0, 12)
    trained(judge, in_fp32, 0, 12)

    momentum, expected = optimizer.state[parameters["a"]]["momentum"].double(), judge.state[in_fp32["a"]]["momentum"]
    part = float((momentum * expected).sum() / (expected * expected).sum())
    assert part == pytest.approx(1, abs=1e-3)
    assert not torch.equal(momentum, expected.bfloat16().double())


def test_a_run_that_was_rounded_by_chance_goes_on_to_the_nearest_without_a_count():
    for kind in ("lion", "sgd", "muon"):
        rounded, before = make(kind, rounding="stochastic")
        trained(rounded, before, 0, 2)
        plain, after = make(kind)
        read(rounded, before, plain, after)
        trained(plain, after, 2, 3)

        assert rounded.state[before["a"]]["step"] == 2
        assert "step" not in plain.state[after["a"]]


def test_moments_in_bf16_are_rounded_by_chance_and_near_those_in_fp32():
    optimizer, parameters = make("adamw", rounding="split", moments="bf16")
    judge, in_fp32 = make("adamw", torch.float32)

    trained(optimizer, parameters, 0, 12)
    trained(judge, in_fp32, 0, 12)

    parameter = parameters["a"]
    assert {name: one.itemsize for name, one in optimizer.state[parameter].items()} == {
        "step": 4,
        "tail": 2,
        "exp_avg": 2,
        "exp_avg_sq": 2,
    }
    way, error = in_fp32["a"].detach() - started("a").float(), exact(optimizer, parameter) - in_fp32["a"].detach()
    assert 0 < float(error.norm()) < 0.01 * float(way.norm())
    of_moments = optimizer.state[parameter]["exp_avg_sq"].float() / judge.state[in_fp32["a"]]["exp_avg_sq"] - 1
    assert abs(float(of_moments.mean())) < 1e-4
    assert float(of_moments.abs().max()) > 1e-3


def test_updates_too_small_for_bf16_count():
    optimizer, parameters = make("adamw", rounding="split", lr=1e-5, weight_decay=0.0)
    for _ in range(50):
        for parameter in parameters.values():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    for name, parameter in parameters.items():
        way = started(name).double() - exact(optimizer, parameter).double()
        assert float(way.mean()) == pytest.approx(50e-5, rel=0.01)


class OnTwoRanks:
    def cut(self) -> None:
        torch.set_num_threads(1)
        mesh = init_device_mesh("cpu", (2,))
        for kind, rounding in EACH:
            optimizer, parameters = make(kind, rounding=rounding)
            trained(optimizer, parameters, 0, 5)

            def lay_out(value):
                return distribute_tensor(value, mesh, [Shard(0)])

            sharded, parts = make(kind, lay_out=lay_out, rounding=rounding)
            trained(sharded, parts, 0, 5, lay_out)
            for name in SHAPES:
                if rounding == "split":
                    assert sharded.state[parts[name]]["tail"].placements == parts[name].placements
                assert_close(rounding, exact(sharded, parts[name]), exact(optimizer, parameters[name]))


def test_parts_on_two_ranks_are_trained_as_the_whole():
    on_ranks(OnTwoRanks, "cut", 2)
