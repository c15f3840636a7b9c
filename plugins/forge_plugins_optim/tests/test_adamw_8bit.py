"""``adamw_8bit``: its quantiser against the published map, its steps against AdamW in fp32, and its memory."""

import pytest
import torch
from torch import nn
from torchao.optim.quant_utils import create_dynamic_map, dequant_with_qmap, quantize_8bit_with_qmap, scale_tensor

from forge_core.contracts.optimizer import NamedParameter
from forge_plugins_optim.adamw_8bit import AdamW8bit
from forge_plugins_optim.blocks import Blocks, DynamicMap
from forge_plugins_optim.config import AdamW8bitConfig

MAPS = {signed: DynamicMap(torch.device("cpu"), signed=signed) for signed in (True, False)}


def drawn(*shape, seed=0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_is_the_published_one(signed) -> None:
    torch.testing.assert_close(MAPS[signed].values, torch.tensor(create_dynamic_map(signed)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("signed", [True, False])
def test_rounding_is_the_published_one(signed) -> None:
    values = drawn(12, 1024) * 10 ** drawn(12, 1024, seed=1)
    values = values if signed else values.square()
    published_map = torch.tensor(create_dynamic_map(signed))
    relative, published_scales = scale_tensor(values, 256)
    published = dequant_with_qmap(quantize_8bit_with_qmap(relative, published_map), published_map, published_scales)

    blocks = Blocks(1024, 0, 1024)
    scales = blocks.scales(values)
    found = blocks.dequantised(blocks.quantised(values, scales, MAPS[signed]), scales, MAPS[signed])

    assert torch.equal(scales.flatten(), published_scales)
    smallest = 3.25e-7 * blocks.of_each(scales) * (not signed)  # a second moment that is published as 0
    assert bool((((found - published).abs() <= 1e-6 * found.abs()) | (found <= 1.01 * smallest)).all())


@pytest.mark.parametrize(("signed", "worst"), [(True, 0.0071), (False, 0.0036)])
def test_the_error_is_as_stated_and_no_less(signed, worst) -> None:
    blocks = Blocks(256, 0, 256)
    largest = 0.0
    for decade in range(7):
        values = torch.linspace(10.0**-decade, 10.0 ** -(decade + 1), 256 * 255)[:-255].reshape(-1, 255).contiguous()
        values = torch.cat([values, torch.ones(len(values), 1)], 1)  # the scale is 1
        values[:, ::2] *= -1 if signed else 1
        scales = blocks.scales(values)
        found = blocks.dequantised(blocks.quantised(values, scales, MAPS[signed]), scales, MAPS[signed])
        error = float((found - values)[:, :-1].abs().max())

        assert error <= 0.45 * 10.0**-decade / 2 ** (6 - decade + (not signed)) * 1.001
        largest = max(largest, error)
    assert 0.97 * worst <= largest <= worst


def test_elements_of_a_part_have_the_scales_of_their_blocks() -> None:
    scales = torch.tensor([[1.0, 2.0, 3.0]])

    of_part, of_whole = Blocks(600, 300, 250).of_each(scales), Blocks(600, 0, 600).of_each(scales)

    assert torch.equal(of_part, of_whole[:, 300:550])


def test_second_moments_are_never_rounded_to_zero_and_zero_stays_zero() -> None:
    blocks = Blocks(4, 0, 4)
    values = torch.tensor([[1.0, 1e-30, 1e-8, 0.0]])
    scales = blocks.scales(values)

    found = blocks.dequantised(blocks.quantised(values, scales, MAPS[False]), scales, MAPS[False])

    torch.testing.assert_close(found, torch.tensor([[1.0, 3.25e-7, 3.25e-7, 0.0]]), rtol=1e-6, atol=0)


def test_blocks_are_those_of_the_whole_wherever_it_is_cut() -> None:
    values = drawn(3, 700)
    whole = Blocks(700, 0, 700)
    scales = whole.scales(values)
    codes = whole.quantised(values, scales, MAPS[True])

    cuts = [Blocks(700, 0, 300), Blocks(700, 300, 0), Blocks(700, 300, 212), Blocks(700, 512, 188)]
    parts = values.split([one.held for one in cuts], -1)
    together = torch.stack([one.scales(part) for one, part in zip(cuts, parts, strict=True)]).amax(0)

    assert torch.equal(together, scales)
    held = [one.quantised(part, scales, MAPS[True]) for one, part in zip(cuts, parts, strict=True)]
    assert torch.equal(torch.cat(held, -1), codes)


def trained(make, steps=50, pull=1.0) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    parameters = [nn.Parameter(drawn(24, 512)), nn.Parameter(drawn(512, 300, seed=1)), nn.Parameter(drawn(40, seed=2))]
    optimizer = make(parameters)
    for step in range(steps):
        for index, parameter in enumerate(parameters):
            parameter.grad = 0.3 * drawn(*parameter.shape, seed=10 * step + index) + pull * parameter.detach()
        for group in optimizer.param_groups:
            group["lr"] *= 1 if step % 10 else 0.9
        optimizer.step()
    return parameters, optimizer


def eight_bit(parameters, role="matrix", **keys) -> AdamW8bit:
    named = [NamedParameter(f"p{i}", parameter, role) for i, parameter in enumerate(parameters)]
    return AdamW8bit(AdamW8bitConfig(lr=1e-2, weight_decay=0.3, **keys), parameters=named)


def full(parameters) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.3)


@torch.no_grad()
@pytest.mark.parametrize("given", [{"role": "embedding", "decay_embeddings": True}, {"min_elements": 10**6}])
def test_embeddings_and_small_tensors_are_updated_as_by_adamw(given) -> None:
    ours, optimizer = trained(lambda parameters: eight_bit(parameters, **given), pull=0.0)
    theirs, _ = trained(full, pull=0.0)

    assert {value.dtype for state in optimizer.state.values() for value in state.values()} == {torch.float32}
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("min_elements", [0, 1, 2])
def test_a_scalar_has_its_moments_in_fp32(min_elements) -> None:
    ours, theirs = (nn.Parameter(torch.tensor(1.0)) for _ in range(2))
    optimizers = eight_bit([ours], min_elements=min_elements), full([theirs])

    for step in range(5):
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = torch.tensor(0.5 - step)
            optimizer.step()

    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("saved", "now"), [(0, 10**6), (10**6, 0)])
def test_moments_of_a_run_that_is_resumed_stay_what_they_are(saved, now) -> None:
    parameter = nn.Parameter(drawn(4, 300))
    before, after = (eight_bit([parameter], min_elements=least) for least in (saved, now))
    parameter.grad = drawn(4, 300, seed=1)
    before.step()
    kinds = {slot: value.dtype for slot, value in before.state[parameter].items()}

    after.state[parameter] = before.state[parameter]
    after.step()

    assert {slot: value.dtype for slot, value in after.state[parameter].items()} == kinds
    assert after.state[parameter]["step"] == 2


@torch.no_grad()
def test_after_fifty_steps_it_is_near_adamw_in_fp32() -> None:
    ours, _ = trained(eight_bit)
    theirs, _ = trained(full)
    starts, _ = trained(full, steps=0)

    off = [
        float((one - other).norm() / (other - start).norm())
        for one, other, start in zip(ours, theirs, starts, strict=True)
    ]
    assert max(off) <= 0.03
    assert min(off[:2]) > 1e-3, "they are not in 8 bits"


def test_its_state_takes_two_bytes_a_parameter() -> None:
    (matrix, other, _), optimizer = trained(eight_bit, steps=1)

    def bytes_of(parameter) -> float:
        held = [value for slot, value in optimizer.state[parameter].items() if slot != "step"]
        return sum(value.nbytes for value in held) / parameter.numel()

    assert bytes_of(matrix) == 2 + 8 / 256
    assert bytes_of(other) <= 2.1


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_those_of_a_search_among_all_midpoints(signed):
    table = DynamicMap(torch.device("cpu"), signed=signed)
    midpoints = (table.values[1:] + table.values[:-1]) / 2
    up, down = midpoints.nextafter(torch.tensor(9.0)), midpoints.nextafter(torch.tensor(-9.0))
    spread = torch.rand(100_000) * 10.0 ** (-8 * torch.rand(100_000))
    values = torch.cat([midpoints, up, down, table.values, spread, torch.tensor([0.0, -0.0, 1e-30, 1e-42])])
    values = torch.cat([values, -values]) if signed else values

    assert torch.equal(table.encode(values).int(), torch.bucketize(values, midpoints, out_int32=True))
    assert torch.equal(table.decode(table.encode(table.values)), table.values)
