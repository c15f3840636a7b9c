"""Which layers become float8, and what is refused. The numbers are in ``tests/parity``."""

from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from packaging.version import Version
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.float8.float8_linear import Float8Linear
from torchao.prototype.moe_training import mxfp8_linear
from torchao.prototype.mx_formats.config import MXFP8Dim1CastKernelChoice

from forge_core.config.sections import ParallelSection
from forge_core.contracts.parallel_pass import PassContext
from forge_core.distributed.mesh import build_mesh, join_process_group
from forge_core.errors import ConfigError
from forge_core.registry.catalog import is_importable
from forge_core.registry.discovery import discover
from forge_core.train.build import materialise
from forge_plugins_parallel.block_scaled import CAPABILITIES, BlockScaledLinear, _rounded, product_of
from forge_plugins_parallel.config import Float8Config, FullyShardConfig
from forge_plugins_parallel.float8_scales import scale_together
from forge_plugins_parallel.fp8 import Float8
from forge_plugins_parallel.fsdp import FullyShard
from forge_plugins_plan.gpus import gpu_named
from forge_testing.parallel_pass import ParallelPassConformance
from forge_testing.several_ranks import on_ranks
from forge_testing.small_model import SmallModel, small_job

CPU = torch.device("cpu")
EMULATED = {"emulate": True, "min_dim": 16}


class TestTensorwise(ParallelPassConformance):
    component = "forge-plugins-parallel:fp8"
    config = EMULATED
    # The kit looks at the worst element of each gradient, and rounding leaves little of a sum that nearly cancels: here
    # this only says that gradients arrive. How exact they are is tested on one layer below, and on ten steps elsewhere.
    tolerance = 0.5


class TestRowwise(TestTensorwise):
    config = {**EMULATED, "recipe": "rowwise"}


class TestRowwiseWithExactGradients(TestTensorwise):
    config = {**EMULATED, "recipe": "rowwise_with_gw_hp"}


@pytest.fixture
def context():
    join_process_group(CPU)
    job = small_job()
    yield PassContext(build_mesh(job, CPU), job, CPU)
    torch.distributed.destroy_process_group()


def converted(context, model=None, **config):
    if model is None:
        with torch.device("meta"):
            model = SmallModel(dim=32)
    _, touched = Float8(Float8Config(**config)).apply(model, context)
    asked = {name for name, module in model.named_modules() if getattr(module, "asked", None)}
    assert {name for name, module in model.named_modules() if isinstance(module, Float8Linear)} | asked == set(touched)
    return touched


class Stack(nn.Module):
    """Experts that know nothing of float8."""

    def __init__(self, hidden_dim=48):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.empty(4, hidden_dim, 32)), nn.Parameter(torch.empty(4, 32, hidden_dim))


class Float8Stack(Stack):
    def __init__(self, hidden_dim=48):
        super().__init__(hidden_dim)
        self.asked = []

    def multiply_in_float8(self, capability):
        if self.up.shape[1] % 16:
            raise ConfigError("it does not feel like it")
        self.asked.append(capability)


class Sparse(SmallModel):
    """With experts in the second block, of a class that a test chooses."""

    def __init__(self, stack):
        super().__init__(dim=32)
        self.blocks["1"].experts = stack

    def parallel_plan(self):
        return {**super().parallel_plan(), "blocks.*.experts": "expert"}


def sparse(stack=Float8Stack, *arguments):
    with torch.device("meta"):
        return Sparse(stack(*arguments))


def test_matrices_in_blocks_are_converted_and_the_head_is_not(context):
    layers = ("query", "key", "value", "output", "up", "down")

    assert converted(context, **EMULATED) == [f"blocks.{block}.{layer}" for block in range(3) for layer in layers]


RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_is_as_exact_as_float8_is(recipe):
    """Rounding to m bits of mantissa is off by up to 2^-(m+1), and by 2^-(m+1) / √3 · (about 0.7) in the mean square,
    for each of two factors: 0.036 for a product of e4m3 (m = 3), 0.057 with one of e5m2 (m = 2)."""
    torch.manual_seed(0)
    linear, hidden, gradient = nn.Linear(256, 128, bias=False), torch.randn(64, 256), torch.randn(64, 128)
    exact = linear(hidden)
    expected = {"output": exact.detach(), "input": gradient @ linear.weight.detach(), "weight": gradient.T @ hidden}
    convert(linear, recipe)

    hidden.requires_grad_()
    output = linear(hidden)
    output.backward(gradient)

    found = {"output": output.detach(), "input": hidden.grad, "weight": linear.weight.grad}
    errors = {name: ((found[name] - expected[name]).norm() / expected[name].norm()).item() for name in found}
    coarse = 0.06 if recipe == "tensorwise" else 0.04
    assert 0.02 < errors["output"] < 0.04
    assert 0.02 < errors["input"] < coarse
    assert errors["weight"] < 1e-5 if recipe == "rowwise_with_gw_hp" else 0.02 < errors["weight"] < coarse


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_a_large_value_costs_its_own_block_its_exactness_and_no_other(recipe):
    torch.manual_seed(0)
    linear, hidden = nn.Linear(512, 256), torch.randn(384, 512)
    hidden[0, 0] = 1e6  # small values beside it are rounded to nothing
    selected = torch.zeros(256, 512)
    selected[:, 128:] = torch.randn(256, 384)  # nothing of its block counts
    linear.weight = nn.Parameter(selected)
    exact = linear(hidden).detach()
    convert(linear, recipe)

    found = linear(hidden).detach()

    assert (found - exact).norm() / exact.norm() < 0.04


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_rows_need_not_fill_a_block(recipe):
    torch.manual_seed(0)
    linear, hidden, gradient = nn.Linear(256, 128), torch.randn(2, 100, 256), torch.randn(2, 100, 128)
    convert(linear, recipe)
    filled = [torch.cat([one.flatten(0, 1), torch.zeros(56, one.shape[-1])]) for one in (hidden, gradient)]

    found = outputs_and_gradients(linear, hidden, gradient)

    expected = outputs_and_gradients(linear, *filled)
    for got, want in zip(found, expected, strict=True):
        assert torch.allclose(got.flatten(0, -2)[:200], want[:200], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_kernels_are_given_whole_tiles_of_rows(recipe):
    linear, seen = nn.Linear(256, 128), []
    convert(linear, recipe)
    linear.product = lambda rows, weight: seen.append(len(rows)) or rows @ weight.T

    for count in (1, 100, 128, 160):
        assert linear(torch.randn(count, 256)).shape == (count, 128)
    assert seen == [128, 128, 128, 256]


@pytest.mark.parametrize(
    ("features", "emulates", "kernel"),
    [
        ((256, 128), False, "TRITON"),
        ((160, 128), False, "TORCH"),
        ((256, 96), False, "TORCH"),
        ((256, 128), True, "TORCH"),
    ],
)
def test_torchao_casts_by_triton_what_its_kernel_takes(monkeypatch, features, emulates, kernel):
    """It refuses factors whose sizes are no multiples of 128."""
    given = []
    monkeypatch.setattr(mxfp8_linear.mx_mm, "apply", lambda *arguments: given.extend(arguments))
    product = product_of("mxfp8", None if emulates else (10, 0), is_planned=False)

    product(torch.randn(128, features[0]), torch.randn(*reversed(features)))

    (choice,) = (one for one in given if isinstance(one, MXFP8Dim1CastKernelChoice))
    assert choice.name == kernel


def convert(linear, recipe):
    Float8(Float8Config(recipe=recipe, emulate=True))._conversion(None, is_planned=False)(linear)


def outputs_and_gradients(linear, hidden, gradient):
    hidden = hidden.clone().requires_grad_()
    output = linear(hidden)
    return output.detach(), *torch.autograd.grad(output, [hidden, linear.weight], gradient)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gpu_rounds_as_it_is_emulated(recipe):
    capability = torch.cuda.get_device_capability()
    if capability < CAPABILITIES.get(recipe, (8, 9)):
        pytest.skip(f"this GPU has no products for {recipe}")
    found = []
    for own in (capability, None):
        torch.manual_seed(0)
        linear = nn.Linear(512, 256, device="cuda", dtype=torch.bfloat16)
        hidden, gradient = (torch.randn(384, n, device="cuda", dtype=torch.bfloat16) for n in (512, 256))
        config = Float8Config(recipe=recipe, emulate=own is None)
        Float8(config)._conversion(own, is_planned=False)(linear)
        found.append(outputs_and_gradients(linear, hidden, gradient))

    for got, want in zip(*found, strict=True):
        assert relative(got, want) < 1e-2


class Interpreted:
    """Triton's kernels for ``blockwise``, those of a GPU of capability 10, on the CPU."""

    def distances(self) -> list[float]:
        """From what is emulated: of the output and both gradients."""
        from torchao.prototype.blockwise_fp8_training import kernels
        from triton.runtime import Autotuner, interpreter

        interpreter._convert_float = by_torch
        for kernel in vars(kernels).values():
            if isinstance(kernel, Autotuner):
                kernel.configs = kernel.configs[:1]  # it would time them on a GPU
        torch.manual_seed(0)
        linear = BlockScaledLinear(256, 384, bias=False, dtype=torch.bfloat16)
        hidden, gradient = (torch.randn(100, n, dtype=torch.bfloat16) for n in (256, 384))
        found = []
        for capability in ((10, 0), None):
            linear.product = product_of("blockwise", capability, is_planned=False)
            found.append(outputs_and_gradients(linear, hidden, gradient))
        return [relative(got, want) for got, want in zip(*found, strict=True)]


def by_torch(values: np.ndarray, given: Any, wanted: Any, mode: object) -> np.ndarray:
    """A conversion to or from float8. Triton's own interpreter has 1.9375 become 1.0, as its carry has no effect."""
    dtypes = {
        "fp8e4nv": torch.float8_e4m3fn,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp32": torch.float32,
    }
    bits = {8: torch.uint8, 16: torch.uint16, 32: torch.uint32}
    raw = torch.from_numpy(values.view(f"uint{given.primitive_bitwidth}").copy())
    converted = raw.view(dtypes[str(given)]).to(dtypes[str(wanted)])
    return converted.view(bits[wanted.primitive_bitwidth]).numpy()


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.float() - want.float()).norm() / want.float().norm()).item()


@pytest.mark.slow
def test_kernels_of_triton_round_as_it_is_emulated(monkeypatch):
    if find_spec("triton") is None or not Version("3.7") <= Version(version("triton")) < Version("3.9"):
        pytest.skip("Triton is not installed, or is that of torch 2.11 or 2.15, which does not interpret these kernels")
    monkeypatch.setenv("TRITON_INTERPRET", "1")

    assert max(on_ranks(Interpreted, "distances", 2)[0]) < 5e-3


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_factors_may_lie_in_memory_as_they_like(recipe):
    torch.manual_seed(0)
    linear, hidden = nn.Linear(256, 128), torch.randn(128, 512)[:, ::2]
    linear.weight = nn.Parameter(torch.randn(256, 128).T)
    convert(linear, recipe)

    assert not hidden.is_contiguous()
    assert torch.equal(linear(hidden), linear(hidden.contiguous()))


def test_blocks_are_scaled_by_their_largest_value():
    """By the definition, block by block, in float64."""
    torch.manual_seed(0)
    matrix = torch.randn(256, 384) * torch.logspace(-6, 6, 384)
    for rows, columns in ((1, 128), (128, 1), (128, 128)):
        expected = torch.empty_like(matrix)
        for top in range(0, 256, rows):
            for left in range(0, 384, columns):
                block = matrix[top : top + rows, left : left + columns].double()
                scale = 448 / block.abs().max()
                rounded = (block * scale).float().to(torch.float8_e4m3fn).double() / scale
                expected[top : top + rows, left : left + columns] = rounded.float()
        assert torch.allclose(_rounded(matrix, rows, columns), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("recipe", "gpu", "least"),
    [("mxfp8", "h100", "10.0"), ("blockwise", "a100-80", "9.0"), ("rowwise", "a100-80", "8.9")],
)
def test_a_gpu_without_the_products_of_a_recipe_is_refused(context, recipe, gpu, least):
    planned = attrs.evolve(context, planned_gpu=gpu_named(gpu))

    with pytest.raises(
        ConfigError, match=rf"{gpu} does not multiply in float8.* from compute capability {least} on do"
    ):
        converted(planned, min_dim=16, recipe=recipe)


@pytest.mark.parametrize(
    ("recipe", "dim", "count"), [("blockwise", 128, 18), ("blockwise", 160, 0), ("mxfp8", 160, 18)]
)
def test_layers_that_blocks_do_not_divide_are_left_alone(context, recipe, dim, count):
    with torch.device("meta"):
        model = SmallModel(dim=dim)

    Float8(Float8Config(**EMULATED, recipe=recipe)).apply(model, context)

    assert sum(isinstance(module, BlockScaledLinear) for module in model.modules()) == count


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_a_plan_counts_products_in_float8(context, recipe):
    """It has no such GPU, nor torchao's kernels."""
    planned = attrs.evolve(context, planned_gpu=gpu_named("b200"))

    with FakeTensorMode(), CountedProducts() as products:
        linear = nn.Linear(256, 128, dtype=torch.bfloat16)
        Float8(Float8Config(recipe=recipe))._conversion(planned.planned_gpu.capability, is_planned=True)(linear)
        hidden = torch.empty(2, 100, 256, dtype=torch.bfloat16, requires_grad=True)
        output = linear(hidden)
        output.sum().backward()

    assert products.names == ["_scaled_mm"] * 3
    assert output.shape == (2, 100, 128)


class CountedProducts(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names += [name for name in ("_scaled_mm", "mm", "addmm") if func is getattr(torch.ops.aten, name).default]
        return func(*args, **(kwargs or {}))


def test_small_layers_are_left_alone(context):
    assert converted(context, emulate=True, min_dim=33) == []
    assert converted(context, emulate=True) == []


def test_layers_can_be_named_to_be_left_alone(context):
    touched = converted(context, **EMULATED, exclude=("blocks.0.*", "*.down"))

    assert touched == [
        f"blocks.{block}.{layer}" for block in (1, 2) for layer in ("query", "key", "value", "output", "up")
    ]


def test_a_pattern_that_fits_no_layer_is_refused(context):
    with pytest.raises(ConfigError, match=r"'blocks\.99\.\*' fits no linear layer; there are blocks\.0\.query"):
        converted(context, **EMULATED, exclude=("blocks.99.*",))


@pytest.mark.parametrize("role", ["replicate", "router"])
def test_what_decides_where_tokens_go_is_left_alone(context, role):
    """Every rank along tp decides alike, and rounding would send tokens elsewhere."""

    class Routed(SmallModel):
        def parallel_plan(self):
            return {**super().parallel_plan(), "blocks.*.up": role}

    with torch.device("meta"):
        model = Routed(dim=32)

    assert not any(name.endswith(".up") for name in converted(context, model, **EMULATED))


def test_hooks_and_classes_of_earlier_passes_stay(context):
    class Mixed:
        def forward(self, hidden):
            return super().forward(hidden) + 1

    with torch.device("meta"):
        model = SmallModel(dim=32)
    up = model.blocks["0"].up
    up.register_forward_hook(lambda *_: None)
    up.__class__ = type("MixedLinear", (Mixed, nn.Linear), {})

    converted(context, model, **EMULATED)

    assert isinstance(up, Mixed)
    assert isinstance(up, Float8Linear)
    assert len(up._forward_hooks) == 1


def test_a_layer_that_multiplies_in_a_way_of_its_own_is_left_alone(context):
    class Doubled(nn.Linear):
        def forward(self, hidden):
            return 2 * super().forward(hidden)

    with torch.device("meta"):
        model = SmallModel(dim=32)
    model.blocks["0"].up.__class__ = Doubled

    assert "blocks.0.up" not in converted(context, model, **EMULATED)


def test_a_device_without_float8_is_told_how_to_try(context):
    with pytest.raises(ConfigError, match=r"cpu does not multiply in float8 .* set emulate = true"):
        converted(context, min_dim=16)


def test_experts_are_left_alone_unless_they_are_asked_for(context):
    model = sparse()

    touched = converted(context, model, **EMULATED)

    assert model.blocks["1"].experts.asked == []
    assert "blocks.1.experts" not in touched


def test_experts_are_asked_to_multiply_in_float8(context):
    model = sparse()

    touched = converted(context, model, **EMULATED, experts=True)

    assert model.blocks["1"].experts.asked == [None], "emulated"
    assert touched == [*converted(context, **EMULATED), "blocks.1.experts"]


def test_experts_are_told_the_gpu(context):
    model = sparse()
    planned = attrs.evolve(context, planned_gpu=gpu_named("h100"))

    converted(planned, model, min_dim=16, experts=True)

    assert model.blocks["1"].experts.asked == [(9, 0)]


@pytest.mark.parametrize(
    ("make", "config", "sentence"),
    [
        (lambda: sparse(nn.Identity), {}, "blocks.1.experts cannot multiply in float8 (it has no multiply_in_float8)"),
        (lambda: sparse(Stack), {}, "blocks.1.experts cannot multiply in float8 (it has no multiply_in_float8)"),
        (lambda: None, {}, "the model has no experts; set it to false"),
        (sparse, {"min_dim": 33}, "exclude or min_dim = 33 leaves all experts alone, blocks.1.experts among them"),
        (sparse, {"exclude": ("*.experts",)}, "exclude or min_dim = 16 leaves all experts alone, blocks.1.experts"),
        (lambda: sparse(Float8Stack, 40), {}, "blocks.1.experts: it does not feel like it; set experts = false"),
    ],
)
def test_experts_in_float8_are_refused_where_there_can_be_none(context, make, config, sentence):
    with pytest.raises(ConfigError) as caught:
        converted(context, make(), **{**EMULATED, **config}, experts=True)

    assert str(caught.value).startswith("parallel.passes.fp8.experts: ")
    assert sentence in str(caught.value)


def test_some_experts_can_be_left_alone(context):
    model = sparse()
    with torch.device("meta"):
        model.blocks["0"].experts, model.blocks["2"].experts = Float8Stack(), Stack()

    touched = converted(context, model, **EMULATED, exclude=("blocks.0.experts",), experts=True)

    assert [name for name in touched if name.endswith("experts")] == ["blocks.1.experts"]
    assert model.blocks["0"].experts.asked == []


def test_a_pattern_for_experts_fits_nothing_if_they_are_not_asked_for(context):
    with pytest.raises(ConfigError, match=r"'\*\.experts' fits no linear layer; there are"):
        converted(context, sparse(), **EMULATED, exclude=("*.experts",))


def test_float8_is_gathered_with_tensorwise_scales_only():
    gathered = Float8Config(all_gather=True, recipe="rowwise", emulate=True)

    ((key, sentence),) = gathered.check(small_job())

    assert key == "all_gather"
    assert "tensorwise scales only" in sentence


def test_without_torchao_validation_says_so(monkeypatch):
    monkeypatch.setattr(
        "forge_core.registry.catalog.is_importable", lambda name: name != "torchao" and is_importable(name)
    )

    with pytest.raises(ConfigError, match=r"'fp8' .* needs 'torchao', which cannot be imported"):
        discover().lookup("parallel_pass", "fp8")


class CountedExchanges(TorchDispatchMode):
    """How often ranks compare numbers."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:  # what is made of it comes by here again
            return NotImplemented
        self.count += func is torch.ops._c10d_functional.all_reduce.default
        return func(*args, **(kwargs or {}))


def gathered(context, **config):
    with torch.device("meta"):
        model = SmallModel(dim=32)
    Float8(Float8Config(**EMULATED, **config)).apply(model, context)
    return model


class GatheredOnTwoRanks:
    """Exchanges of a forward and backward, with scales of all weights and with each by itself; and outputs of both,
    after weights have changed in ways of which a tensor keeps no count."""

    def rank(self):
        job = attrs.evolve(small_job(), parallel=ParallelSection(dp_shard=2))
        job = attrs.evolve(job, train=attrs.evolve(job.train, precision="bf16"))
        context = PassContext(build_mesh(job, CPU), job, CPU)
        model = gathered(context, all_gather=True)
        FullyShard(FullyShardConfig(reshard_after_forward="always", prefetch=1)).apply(model, context)
        materialise(model, CPU, seed=0)
        together = [self.step(model) for change in (lambda _: None, by_data, by_a_fused_optimizer) if not change(model)]
        alone = self.step(without_hook(model))
        return together, alone

    def step(self, model):
        with CountedExchanges() as exchanges:
            output = model(torch.arange(8).reshape(1, 8))
            output.float().sum().backward()
        return exchanges.count, output.detach()


def by_data(model):
    for weight in model.parameters():
        weight.data.mul_(1.7)


def by_a_fused_optimizer(model):
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()


def without_hook(model):
    """So that torchao computes the scale of each weight as it is gathered."""
    model._forward_pre_hooks.popitem(last=False)
    for layer in model.modules():
        if isinstance(layer, Float8Linear):
            layer.weight._local_tensor._precomputed_scale = None
    return model


def test_one_exchange_per_forward_scales_all_weights_as_one_each_does():
    for together, (alone, expected) in on_ranks(GatheredOnTwoRanks, "rank", 2):
        assert [count for count, _ in together] == [1, 1, 1]
        assert alone == 2 * 18, "of each layer, in forward and again in backward"
        outputs = [output for _, output in together]
        assert torch.equal(outputs[-1], expected)
        assert not torch.equal(outputs[0], outputs[1])
        assert not torch.equal(outputs[1], outputs[2])


def test_weights_that_ranks_cannot_share_evenly_are_not_gathered_in_float8(context):
    model = gathered(context, all_gather=True)

    with pytest.raises(ConfigError, match=r"fp8\.all_gather: blocks\.0\.query\.weight has 32 rows, which 3 ranks"):
        scale_together(model, ranks=3)


def test_weights_that_every_rank_has_may_have_any_rows(context):
    model = gathered(context, all_gather=True)

    scale_together(model, 3, whole=[layer.weight for layer in model.modules() if isinstance(layer, Float8Linear)])

    assert len(model._forward_pre_hooks) == 0


def test_weights_that_are_gathered_in_bf16_need_no_scales(context):
    model = gathered(context)

    scale_together(model, ranks=3)

    assert len(model._forward_pre_hooks) == 0
