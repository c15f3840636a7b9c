"""Experts that multiply in float8. What the pass ``fp8`` asks of them is tested with it; ten steps of training, in
``tests/parity``."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from forge_core.errors import ConfigError
from forge_core.job import ConfigProblems, load_job
from forge_core.registry.catalog import Catalog
from forge_core.registry.discovery import discover
from forge_plugins_dense.activation import FUNCTIONS
from forge_plugins_moe.dispatch import Assignments
from forge_plugins_moe.experts import Experts
from forge_plugins_moe.feed_forward import MoE
from forge_plugins_moe.float8_product import emulated_float8_product, float8_product

K, N = 64, 48
HOPPER = (9, 0)
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != HOPPER, reason="needs an H100 or H200"
)


def factors(dtype: torch.dtype, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, of experts one of which has none, and two beyond them; weights; counts; and a gradient."""
    generator = torch.Generator().manual_seed(0)
    rows, weight, gradient = (
        torch.randn(shape, generator=generator).to(device, dtype) for shape in ((100, K), (4, N, K), (98, N))
    )
    return rows.requires_grad_(), weight.requires_grad_(), torch.tensor([33, 0, 1, 64], device=device), gradient


def multiplied(product, rows, weight, counts, gradient) -> list[torch.Tensor]:
    """The output of rows that belong to an expert, and the gradients of these and of weights."""
    output = product(counts, weight)(rows, weight)[: len(gradient)]
    of_rows, of_weight = torch.autograd.grad(output, [rows, weight], gradient)
    return [output.detach(), of_rows[: len(gradient)], of_weight]


def in_float64(rows, weight, counts, gradient) -> list[torch.Tensor]:
    """The same, of an expert at a time."""
    wide_rows, wide_weight = (one.detach().double().requires_grad_() for one in (rows, weight))
    parts = wide_rows[: len(gradient)].split(counts.tolist())
    output = torch.cat([part @ one.T for part, one in zip(parts, wide_weight, strict=True)])
    of_rows, of_weight = torch.autograd.grad(output, [wide_rows, wide_weight], gradient.double())
    return [output.detach(), of_rows[: len(gradient)], of_weight]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_products_are_as_exact_as_float8_and_gradients_of_weights_as_their_dtype(dtype):
    """Rounding to m = 3 bits of mantissa is off by 2^-(m+1) / √3 · (about 0.7) in the mean square, for each of two
    factors: 0.036. For the product of bf16 (m = 7) and its output, 0.002."""
    given = factors(dtype)

    output, of_rows, of_weight = multiplied(emulated_float8_product, *given)

    expected = in_float64(*given)
    assert 0.03 < error(output, expected[0]) < 0.042
    assert 0.03 < error(of_rows, expected[1]) < 0.042
    assert error(of_weight, expected[2]) < (1e-6 if dtype == torch.float32 else 4e-3)
    assert output.dtype == of_rows.dtype == of_weight.dtype == dtype


def test_an_expert_without_rows_learns_nothing_and_rows_of_no_expert_do_not_matter():
    rows, weight, counts, gradient = factors(torch.bfloat16)
    other = rows.detach().clone()
    other[98:] = 1e4

    found = multiplied(emulated_float8_product, rows, weight, counts, gradient)
    with_other = multiplied(emulated_float8_product, other.requires_grad_(), weight, counts, gradient)

    assert not found[2][1].any()
    for one, same in zip(found, with_other, strict=True):
        assert torch.equal(one, same)
        assert torch.isfinite(one).all()


@pytest.mark.parametrize("counts", [[0, 0, 0, 0], [0, 100, 0, 0]])
def test_most_experts_may_have_nothing_to_do(counts):
    rows, weight, *_ = factors(torch.bfloat16)

    output = emulated_float8_product(torch.tensor(counts), weight)(rows, weight)
    of_weight = torch.autograd.grad(output[: sum(counts)].sum(), weight)[0]

    assert torch.isfinite(output[: sum(counts)]).all()
    assert torch.isfinite(of_weight).all()
    assert of_weight.any(dim=(1, 2)).tolist() == [count > 0 for count in counts]


def test_there_may_be_no_rows_at_all():
    """A rank of ``ep`` whose experts nobody chose."""
    _, weight, *_ = factors(torch.bfloat16)
    rows = torch.empty(0, K, dtype=torch.bfloat16, requires_grad=True)

    output = emulated_float8_product(torch.zeros(4, dtype=torch.int64), weight)(rows, weight)
    of_rows, of_weight = torch.autograd.grad(output.sum(), [rows, weight])

    assert output.shape == (0, N)
    assert of_rows.shape == (0, K)
    assert not of_weight.any()


@pytest.mark.parametrize("size", [0.0, 1e-20, 1e-6, 1.0, 1e6, 1e30])
def test_rows_of_all_sizes_keep_their_bits(size):
    """A scale a row: one tensor has rows that differ by more than float8 has numbers for."""
    rows, weight, counts, gradient = factors(torch.bfloat16)
    sized = torch.cat([rows[:1] * size, rows[1:]]).detach().requires_grad_()

    output = multiplied(emulated_float8_product, sized, weight, counts, gradient)[0]

    expected = in_float64(sized, weight, counts, gradient)[0]
    assert (output[0].double() - expected[0]).norm() <= 0.06 * expected[0].norm() + 1e-12
    assert error(output[1:], expected[1:]) < 0.042


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(value):
    """Whoever watches for it must see it; e4m3 has no infinity, and would have made it 448."""
    rows, weight, counts, _ = factors(torch.bfloat16)
    broken = rows.detach().clone()
    broken[5, 7] = value

    output = emulated_float8_product(counts, weight)(broken, weight)

    assert not torch.isfinite(output[5]).any()
    assert torch.isfinite(output[:5]).all()
    assert torch.isfinite(output[6:98]).all()


def test_scales_are_those_of_torchao():
    """Oracle: the values of its recipe ``rowwise``."""
    utils = pytest.importorskip("torchao.float8.float8_utils")
    granularity = pytest.importorskip("torchao.float8.config").ScalingGranularity.AXISWISE
    rows = factors(torch.float32)[0].detach() * torch.logspace(-4, 4, 100)[:, None]
    scale = utils.tensor_to_scale(
        rows,
        torch.float8_e4m3fn,
        scaling_granularity=granularity,
        axiswise_dim=-1,
        round_scales_to_power_of_2=True,
    )
    expected = utils.to_fp8_saturated(rows * scale, torch.float8_e4m3fn).float() / scale
    identity = torch.eye(K).repeat(1, 1, 1)

    product = emulated_float8_product(torch.tensor([100]), identity)(rows, identity)

    assert torch.equal(product, expected)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile's own doing
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # an import of torch's
@pytest.mark.slow
def test_it_compiles_to_one_graph_that_gives_the_same():
    given = factors(torch.bfloat16)

    def compiled(counts, like):
        return torch.compile(lambda rows, weight: emulated_float8_product(counts, like)(rows, weight), fullgraph=True)

    found = multiplied(compiled, *given)

    for one, expected in zip(found, multiplied(emulated_float8_product, *given), strict=True):
        assert torch.equal(one, expected)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile's own doing
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_kernel_is_given_what_it_takes(compiled):
    """By torch's own checks of layouts, scales and offsets, which it makes on meta too."""
    rows, weight, counts, gradient = factors(torch.bfloat16)
    given = [one.detach().to("meta").requires_grad_(one.requires_grad) for one in (rows, weight, counts, gradient)]

    def product(counts, like):
        multiply = float8_product(counts, like)
        return torch.compile(multiply, fullgraph=True, backend="aot_eager") if compiled else multiply

    output, of_rows, of_weight = multiplied(product, *given)

    assert (output.shape, of_rows.shape, of_weight.shape) == ((98, N), (98, K), (4, N, K))
    assert output.dtype == of_rows.dtype == of_weight.dtype == torch.bfloat16


@pytest.mark.gpu
@needs_hopper
def test_the_kernel_gives_what_the_emulation_gives():
    """Both multiply the same float8 values. What is left is the output's rounding to bf16, and the bits of sums that
    tensor cores leave out, most in forward."""
    given = factors(torch.bfloat16, "cuda")

    found, expected = (multiplied(product, *given) for product in (float8_product, emulated_float8_product))

    for one, other in zip(found, expected, strict=True):
        assert error(one, other.double()) < 4e-3


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile's own doing
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # an import of torch's
@pytest.mark.gpu
@needs_hopper
def test_the_kernel_compiles_to_one_graph_that_gives_the_same():
    given = factors(torch.bfloat16, "cuda")

    def compiled(counts, like):
        return torch.compile(lambda rows, weight: float8_product(counts, like)(rows, weight), fullgraph=True)

    for one, expected in zip(multiplied(compiled, *given), multiplied(float8_product, *given), strict=True):
        assert error(one, expected.double()) < 4e-3


def experts(*, in_float8: bool, hidden_dim: int = 32, dim: int = 16, activation: str = "silu") -> Experts:
    layer = Experts(4, dim, hidden_dim, FUNCTIONS[activation], gated=activation == "silu")
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    if in_float8:
        layer.multiply_in_float8(None)
    return layer


def routed(layer: Experts, hidden: torch.Tensor) -> torch.Tensor:
    """Each token to two experts of the first three."""
    n_tokens = hidden.shape[0] * hidden.shape[1]
    expert = torch.stack([torch.arange(n_tokens) % 3, (torch.arange(n_tokens) + 1) % 3], dim=1).flatten()
    token = torch.arange(n_tokens).repeat_interleave(2)
    return layer(hidden, Assignments(token, expert, torch.full((2 * n_tokens,), 0.5), 2))


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_experts_multiply_in_float8_from_then_on(activation):
    hidden = torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    layer, exact = (experts(in_float8=on, activation=activation) for on in (True, False))

    output, expected = routed(layer, hidden), routed(exact, hidden)

    assert 0.02 < error(output, expected.double()) < 0.08, "two or three products after each other"
    found = torch.autograd.grad(output.square().sum(), [*layer.parameters()])
    for one, other in zip(found, torch.autograd.grad(expected.square().sum(), [*exact.parameters()]), strict=True):
        assert 0.01 < error(one, other.double()) < 0.12
        assert not one[3].any(), "it has no tokens"
    assert {name: p.dtype for name, p in layer.named_parameters()} == {
        name: p.dtype for name, p in exact.named_parameters()
    }


KEPT = {name for name, choice in MoE.recompute_plan(None).items() if choice == "keep"}


def test_what_selective_checkpointing_keeps_is_not_multiplied_again(counting):
    hidden = torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    layer = experts(in_float8=True)
    keep = [torch.ops.forge_moe.grouped_product.default]
    assert "forge_moe.grouped_product" in KEPT

    with counting() as plain:
        expected = torch.autograd.grad(routed(layer, hidden).square().sum(), [hidden, *layer.parameters()])
    with counting() as checkpointed:
        context = functools.partial(create_selective_checkpoint_contexts, keep)
        output = checkpoint(routed, layer, hidden, use_reentrant=False, context_fn=context)
        found = torch.autograd.grad(output.square().sum(), [hidden, *layer.parameters()])

    assert plain.computed["forge_moe.grouped_product"] == 6, "three in forward, and for gradients of rows"
    assert checkpointed.computed["forge_moe.grouped_product"] == 6
    assert checkpointed.computed["aten.silu"] == 2 * plain.computed["aten.silu"], "the rest is computed again"
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_selective_checkpointing_keeps_what_the_kernel_gives(counting):
    with torch.device("meta"):
        layer = Experts(4, 16, 32, F.silu, gated=True).bfloat16()
        rows, counts = torch.empty(100, 16, dtype=torch.bfloat16), torch.empty(4, dtype=torch.int64)
    layer.multiply_in_float8(HOPPER)

    with counting() as forward:
        layer.compute(rows, counts)

    assert {name: count for name, count in forward.computed.items() if "mm" in name} == {"aten._scaled_grouped_mm": 3}
    assert "aten._scaled_grouped_mm" in KEPT


@pytest.mark.parametrize(("hidden_dim", "dim"), [(24, 16), (32, 8)])
def test_features_that_float8_does_not_take_are_refused(hidden_dim, dim):
    layer = Experts(2, dim, hidden_dim, F.silu, gated=True)

    with pytest.raises(ConfigError, match=f"of {hidden_dim} features on a rank and {dim} of a token, one is no mult"):
        layer.multiply_in_float8(None)


@pytest.mark.parametrize("capability", [(8, 9), (10, 0), (12, 0)])
def test_gpus_for_which_torch_has_no_kernel_are_refused(capability):
    layer = Experts(2, 16, 32, F.silu, gated=True)

    with pytest.raises(ConfigError, match=rf"9\.0 \(H100, H200\), and on none with {capability[0]}\.{capability[1]}"):
        layer.multiply_in_float8(capability)
    layer.multiply_in_float8(HOPPER)


JOB = """
[model]
name = "transformer"
dim = 32
n_layers = 2
n_heads = 4

[model.feed_forward]
name = "moe"
n_experts = 4
hidden_dim = {hidden_dim}

[data]
name = "text_files"
path = "."

[train]
steps = 2
seq_len = 16
batch_size = 1

[optimizer]
name = "adamw"
lr = 1e-3

[parallel.passes.fp8]
emulate = true
min_dim = 16
experts = {experts}
"""


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return discover()


@pytest.mark.parametrize(("hidden_dim", "tp", "features"), [(24, 1, 24), (48, 2, 24)])
def test_features_that_float8_does_not_take_are_refused_at_validation(tmp_path, catalog, hidden_dim, tp, features):
    pytest.importorskip("torchao")
    file = tmp_path / "job.toml"
    file.write_text(JOB.format(hidden_dim=hidden_dim, experts="true"))

    with pytest.raises(ConfigProblems, match=f"{features} features on a rank are no multiple of 16"):
        load_job(file, [f"parallel.tp={tp}"], catalog=catalog, world_size=tp)


@pytest.mark.parametrize(("hidden_dim", "on"), [(24, "false"), (32, "true")])
def test_features_that_need_not_or_can_be_multiplied_are_valid(tmp_path, catalog, hidden_dim, on):
    pytest.importorskip("torchao")
    file = tmp_path / "job.toml"
    file.write_text(JOB.format(hidden_dim=hidden_dim, experts=on))

    assert "fp8" in load_job(file, catalog=catalog, world_size=1).parallel.passes
