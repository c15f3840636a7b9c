from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from forge_plugins_dense.config import Llama3Scaling, MLPConfig
from forge_plugins_dense.feed_forward import MLP
from forge_plugins_dense.norm import make_norm
from forge_plugins_dense.rope import rotary_tables, rotate


def test_rotation_is_the_formula_of_the_paper_in_float64():
    x = torch.randn(2, 5, 3, 8, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 1, 2, 3, 100], [7, 0, 1, 50, 3]])

    rotated = rotate(x, *rotary_tables(positions, 8, 10_000.0))

    expected = torch.empty(x.shape, dtype=torch.float64)
    for i in range(4):
        angle = positions.double()[:, :, None] * 10_000.0 ** (-2 * i / 8)
        a, b = x[..., i].double(), x[..., i + 4].double()
        expected[..., i] = a * angle.cos() - b * angle.sin()
        expected[..., i + 4] = b * angle.cos() + a * angle.sin()
    torch.testing.assert_close(rotated.double(), expected, atol=2e-5, rtol=0)


def test_rotation_of_bf16_loses_nothing_but_the_final_rounding_even_at_far_positions():
    x = torch.randn(1, 4, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    tables = rotary_tables(torch.tensor([[4000, 30_000, 60_000, 131_071]]), 64, 500_000.0)

    rotated = rotate(x, *tables)

    assert rotated.dtype == torch.bfloat16
    assert tables[0].dtype == torch.float32
    torch.testing.assert_close(rotated, rotate(x.float(), *tables).bfloat16(), atol=0, rtol=0)


def test_scores_depend_only_on_the_distance():
    q, k = torch.randn(2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(0)).unbind(0)

    def score(query: int, key: int) -> torch.Tensor:
        turned = [rotate(x, *rotary_tables(torch.tensor([[at]]), 16, 100.0)) for x, at in ((q, query), (k, key))]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(9, 4), score(25, 20))


def test_llama3_scaling_keeps_fast_rotations_and_divides_slow_ones():
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192)
    one = torch.tensor([[1]])

    plain = torch.atan2(*reversed(rotary_tables(one, 128, 500_000.0))).flatten().double()
    scaled = torch.atan2(*reversed(rotary_tables(one, 128, 500_000.0, scaling))).flatten().double()

    turns = 8192 * plain / (2 * math.pi)
    torch.testing.assert_close(scaled[turns > 4], plain[turns > 4])
    torch.testing.assert_close(scaled[turns < 1], plain[turns < 1] / 8, rtol=1e-5, atol=0)
    between = (turns > 1) & (turns < 4)
    smooth = (turns[between] - 1) / 3
    torch.testing.assert_close(
        scaled[between], (1 - smooth) * plain[between] / 8 + smooth * plain[between], rtol=1e-5, atol=0
    )
    assert between.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_computed_in_fp32(dtype):
    x = (torch.randn(3, 7, 64, generator=torch.Generator().manual_seed(0)) * 30).to(dtype)
    exact = x.double()
    rms = make_norm("rmsnorm", 64, 1e-5).to(dtype)
    layer = make_norm("layernorm", 64, 1e-5).to(dtype)
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8

    torch.testing.assert_close(
        rms(x).double(), exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt(), rtol=tolerance, atol=1e-6
    )
    centred = exact - exact.mean(-1, keepdim=True)
    torch.testing.assert_close(
        layer(x).double(), centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt(), rtol=tolerance, atol=1e-5
    )
    assert rms(x).dtype == layer(x).dtype == dtype


@pytest.mark.parametrize(
    ("activation", "formula"),
    [
        ("silu", lambda mlp, x: F.linear(F.silu(x @ mlp.gate.weight.T) * (x @ mlp.up.weight.T), mlp.down.weight)),
        ("gelu", lambda mlp, x: F.linear(F.gelu(x @ mlp.up.weight.T), mlp.down.weight)),
        ("relu", lambda mlp, x: F.linear((x @ mlp.up.weight.T).clamp(min=0), mlp.down.weight)),
    ],
)
def test_mlp_is_its_formula(activation, formula, build):
    torch.manual_seed(0)
    mlp = MLP(MLPConfig(hidden_dim=24, activation=activation), dim=8, layer=0, n_layers=1, build=build)
    x = torch.randn(2, 3, 8)

    torch.testing.assert_close(mlp(x), formula(mlp, x))
    assert mlp.active_parameters() == (3 if activation == "silu" else 2) * 8 * 24
    assert set(mlp.parallel_plan()) == {name.removesuffix(".weight") for name in mlp.parameter_roles()}


def test_clamped_swiglu_is_its_formula_and_ends_gradients_at_the_limit(build):
    torch.manual_seed(0)
    config = MLPConfig(
        hidden_dim=24, activation="clamped_swiglu", activation_limit=0.3, activation_slope=1.3, bias=True
    )
    mlp = MLP(config, dim=8, layer=0, n_layers=1, build=build)
    x = torch.randn(2, 3, 8)

    exact, precise = copy.deepcopy(mlp).double(), x.double()
    gate, up = exact.gate(precise), exact.up(precise)
    assert (gate > 0.3).any()
    assert (gate < -0.3).any()
    assert (up.abs() > 0.3).any()
    g, u = gate.clamp(max=0.3), up.clamp(-0.3, 0.3)
    formula = exact.down((u + 1) * g / (1 + torch.exp(-1.3 * g)))

    torch.testing.assert_close(mlp(x).double(), formula, atol=1e-6, rtol=1e-5)
    found = torch.autograd.grad(mlp(x).square().sum(), [*mlp.parameters()])
    expected = torch.autograd.grad(formula.square().sum(), [*exact.parameters()])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-4)
    assert mlp.active_parameters() == 3 * 8 * 24
    assert set(mlp.parallel_plan()) == {"gate", "up", "down"}


def test_default_width_of_the_mlp_is_llamas():
    assert MLPConfig().width(4096) == 11_008
    assert MLPConfig(multiplier=1.3).width(4096) == 14_336
    assert MLPConfig(hidden_dim=100).width(4096) == 100
