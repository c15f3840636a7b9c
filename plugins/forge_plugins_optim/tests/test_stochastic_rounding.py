"""``adamw`` with ``stochastic_rounding``: right on average, the same in a resume and wherever a tensor is cut."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from forge_core.contracts.optimizer import NamedParameter
from forge_plugins_optim.adamw import adamw
from forge_plugins_optim.config import AdamWConfig
from forge_plugins_optim.stochastic_rounding import noise, positions_in, rounded, seed_of
from forge_testing.several_ranks import on_ranks

N = 40_000


def bits(step: int = 1, n: int = N, name: str = "blocks.0.up.weight") -> torch.Tensor:
    return noise(torch.arange(n), seed_of(name), torch.tensor(float(step)))


@pytest.mark.parametrize("value", [1.001, -1.001, 1.0039, 3e-20, -77.3, 1e-3])
def test_rounding_is_right_on_average(value) -> None:
    found = rounded(torch.full((N,), value), bits()).double()

    distance = 2.0**-7 * 2.0 ** torch.tensor(abs(value)).log2().floor().item()
    assert len(found.unique()) == 2
    assert float((found - value).abs().max()) < distance
    assert abs(float(found.mean()) - torch.tensor(value).double()) < 4 * (distance / 2) / N**0.5  # four deviations


def test_what_bf16_can_express_stays_as_it_is() -> None:
    values = torch.tensor([0.0, -0.0, 1.0, -3.5, 2.0**-126, torch.inf, -torch.inf])

    assert torch.equal(rounded(values, bits(n=7)), values.bfloat16())
    assert rounded(torch.tensor([torch.nan]), bits(n=1)).isnan().all()


def test_each_element_of_a_tensor_has_a_position_of_its_own() -> None:
    assert torch.equal(positions_in(torch.empty(3, 4, 5)), torch.arange(60).view(3, 4, 5))


@pytest.mark.parametrize("shift", [0, 16, 32])
def test_each_16_bits_of_noise_are_uniform_and_of_their_own(shift) -> None:
    """By chi-squared over 16 classes, which exceeds 46 in one of 20,000 draws."""

    def chi_squared(numbers) -> float:
        counts = torch.bincount(numbers, minlength=16).double()
        expected = len(numbers) / 16
        return float(((counts - expected) ** 2).sum() / expected)

    here, next_step, other = (one >> shift for one in (bits(), bits(2), bits(name="head.weight")))
    for taken in (12, 0):  # the highest and the lowest of the 16
        assert chi_squared(here >> taken & 15) < 46
        assert chi_squared((here ^ next_step) >> taken & 15) < 46
        assert chi_squared((here ^ other) >> taken & 15) < 46
        assert chi_squared((here ^ here.roll(1)) >> taken & 15) < 46


def make(parameters, **keys) -> torch.optim.Optimizer:
    named = [NamedParameter(f"p{i}", one, "matrix") for i, one in enumerate(parameters)]
    return adamw(AdamWConfig(weight_decay=0.0, **keys), parameters=named)


@pytest.mark.parametrize(("stochastic", "way"), [(True, 0.01), (False, 0.0)])
def test_updates_too_small_for_bf16_count(stochastic, way) -> None:
    parameter = nn.Parameter(torch.ones(200, 50, dtype=torch.bfloat16))
    optimizer = make([parameter], lr=1e-4, stochastic_rounding=stochastic)

    for _ in range(100):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    assert 1 - float(parameter.detach().double().mean()) == pytest.approx(way, rel=0.05)
    assert parameter.dtype == torch.bfloat16


def test_in_fp32_it_is_that_of_torch() -> None:
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 60).view(6, 10)) for _ in range(2))
    optimizers = make([ours], lr=1e-2, stochastic_rounding=True), make([theirs], lr=1e-2)
    generator = torch.Generator().manual_seed(0)

    for _ in range(50):
        ours.grad = torch.randn(6, 10, generator=generator)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()

    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def trained(parameter, optimizer, first: int, last: int, lay_out=torch.clone) -> None:
    for step in range(first, last):
        gradient = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).bfloat16()
        parameter.grad = lay_out(gradient)
        optimizer.step()


def started() -> torch.Tensor:
    return torch.linspace(-1, 1, 48).view(8, 6).bfloat16()


def test_a_resume_rounds_as_without() -> None:
    straight = nn.Parameter(started())
    optimizer = make([straight], lr=1e-3, stochastic_rounding=True)
    trained(straight, optimizer, 0, 3)
    resumed = nn.Parameter(straight.detach().clone())
    fresh = make([resumed], lr=1e-3, stochastic_rounding=True)
    fresh.state[resumed] = {slot: value.clone() for slot, value in optimizer.state[straight].items()}

    trained(straight, optimizer, 3, 8)
    trained(resumed, fresh, 3, 8)

    assert torch.equal(resumed, straight)


class OnTwoRanks:
    def cut(self) -> list[bool]:
        mesh = init_device_mesh("cpu", (2,))
        whole = nn.Parameter(started())
        trained(whole, make([whole], lr=1e-3, stochastic_rounding=True), 0, 6)
        same = []
        for dim in (0, 1):
            parameter = nn.Parameter(distribute_tensor(started(), mesh, [Shard(dim)]))
            optimizer = make([parameter], lr=1e-3, stochastic_rounding=True)
            trained(parameter, optimizer, 0, 6, lambda one, dim=dim: distribute_tensor(one, mesh, [Shard(dim)]))
            same.append(torch.equal(parameter.full_tensor(), whole))
        return same


def test_parts_on_two_ranks_are_rounded_as_the_whole() -> None:
    assert on_ranks(OnTwoRanks, "cut", 2) == [[True, True]] * 2


def test_each_parameter_has_chance_of_its_own() -> None:
    assert len({seed_of(f"blocks.{layer}.weight") for layer in range(1000)}) == 1000
