"""Which layers become float8, and what is refused. The numbers are in ``tests/parity``."""

import contextlib

import attrs
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.float8.float8_linear import Float8Linear

from forge_core.config.sections import ParallelSection
from forge_core.contracts.parallel_pass import PassContext
from forge_core.distributed.mesh import build_mesh, join_process_group
from forge_core.errors import ConfigError
from forge_core.registry.catalog import is_importable
from forge_core.registry.discovery import discover
from forge_core.train.build import materialise
from forge_plugins_parallel.block_scaled import BlockScaledLinear
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

    said = pytest.raises(ConfigError, match=f"recipe = '{recipe}' .* leaves all linear layers of blocks alone")
    with contextlib.nullcontext() if count else said:
        Float8(Float8Config(**EMULATED, recipe=recipe)).apply(model, context)

    assert sum(isinstance(module, BlockScaledLinear) for module in model.modules()) == count


@pytest.mark.parametrize("config", [{"min_dim": 33}, {"min_dim": 1024}, {"min_dim": 16, "exclude": ("*",)}])
def test_where_all_layers_are_left_alone_what_leaves_them_is_named(context, config):
    said = f"min_dim = {config['min_dim']} leaves all linear layers of blocks alone; change these, or take the pass out"
    with pytest.raises(ConfigError, match=said):
        converted(context, emulate=True, **config)


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
