"""What is recomputed, what it saves, and what it must not change."""

from unittest import mock

import attrs
import pytest
import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from forge_core.config.sections import ParallelSection
from forge_core.contracts.model import canonical_name
from forge_core.contracts.parallel_pass import PassContext
from forge_core.distributed.mesh import build_mesh, join_process_group
from forge_core.errors import ConfigError
from forge_core.ops.accumulate import accumulate
from forge_core.train.build import materialise
from forge_plugins_parallel import recompute_choice
from forge_plugins_parallel.activation_checkpointing import ActivationCheckpointing
from forge_plugins_parallel.activations import measure_activations
from forge_plugins_parallel.config import ActivationCheckpointingConfig
from forge_plugins_parallel.kept_operations import KeptOperations
from forge_testing.component_case import builder
from forge_testing.parallel_pass import ParallelPassConformance
from forge_testing.several_ranks import on_ranks
from forge_testing.small_model import SmallModel, small_job

CPU = torch.device("cpu")
BATCH, LENGTH = 2, 8  # those of small_job


class TestFull(ParallelPassConformance):
    component = "forge-plugins-parallel:activation_checkpointing"


class TestEverySecond(ParallelPassConformance):
    component = "forge-plugins-parallel:activation_checkpointing"
    config = {"every": 2}


class TestSelective(ParallelPassConformance):
    component = "forge-plugins-parallel:activation_checkpointing"
    config = {"mode": "selective"}


class TestEverySecondProduct(ParallelPassConformance):
    component = "forge-plugins-parallel:activation_checkpointing"
    config = {"mode": "selective", "products_every": 2}


class TestNone(ParallelPassConformance):
    component = "forge-plugins-parallel:activation_checkpointing"
    config = {"mode": "none"}


@pytest.fixture
def context():
    join_process_group(CPU)
    job = attrs.evolve(small_job(), loss=builder().resolve("loss", "cross_entropy"))
    yield PassContext(build_mesh(job, CPU), job, CPU)
    torch.distributed.destroy_process_group()


def applied(context, model_class=SmallModel, **config):
    with torch.device("meta"):
        model = model_class()
    config = builder().resolve("parallel_pass", {"name": "activation_checkpointing", **config}).config
    model, touched = ActivationCheckpointing(config).apply(model, context)
    materialise(model, CPU, seed=0)
    return model, touched


def forward(model):
    tokens = torch.randint(32, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    return model(tokens, targets=tokens, loss=LOSS).total


LOSS = builder()(builder().resolve("loss", "cross_entropy"))
KEPT = KeptOperations(frozenset({"aten.mm"}))


def measured(model_class=SmallModel, kept=KEPT):
    with torch.device("meta"):
        model = model_class()
    return measure_activations(model, LOSS, (BATCH, LENGTH), CPU, torch.float32, kept)


def saved_bytes(model, forward=forward):
    """What autograd holds after forward outside of recomputed blocks, without parameters, each storage once."""
    parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward(model)
    return sum(storage.nbytes() for address, storage in saved.items() if address not in parameters)


class Live(TorchDispatchMode):
    """Bytes of all results of operations that are still there."""

    def __init__(self):
        super().__init__()
        self._made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._made.append((StorageWeakRef(storage), storage.nbytes()))
        return result

    def bytes(self):
        return sum({ref.cdata: size for ref, size in self._made if not ref.expired()}.values())


def live_bytes(model):
    with Live() as live:
        total = forward(model)
        held = live.bytes()
    total.backward()
    return held


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # an import of torch's
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo's, which would hide it
def test_what_flex_attention_keeps_is_measured():
    """It is what has windows on a GPU."""
    build, device = builder(), torch.device("cuda")
    sizes = {"dim": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 128, "window": 32}
    with torch.device("meta"):
        model = build(build.resolve("model", {"name": "transformer", **sizes}), vocab_size=100)
    tokens = torch.randint(100, (2, 128), device=device)
    kept = KeptOperations(frozenset({"higher_order.flex_attention"}))

    expected = measure_activations(model, LOSS, tuple(tokens.shape), device, torch.float32, kept)
    materialise(model, device, seed=0)
    saved = saved_bytes(model, lambda model: model(tokens, targets=tokens, loss=LOSS).total)

    blocks = expected.blocks.values()
    assert sum(block.whole for block in blocks) + expected.outside == pytest.approx(saved, rel=0.05)
    assert all(block.selective - block.inputs >= tokens.numel() * (64 + 4) * 4 for block in blocks)  # outputs and sums


def test_what_autograd_saves_is_what_was_measured_ahead_without_memory(context):
    model, _ = applied(context, mode="none")

    expected = measured()

    assert saved_bytes(model) == sum(block.whole for block in expected.blocks.values()) + expected.outside


class Made(TorchDispatchMode):
    """Counts operations, by default matrix products with and without a bias."""

    def __init__(self, *names):
        super().__init__()
        self.count, self._names = 0, names or ("aten::mm", "aten::addmm")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name in self._names
        return func(*args, **(kwargs or {}))


def naming(product):
    """A model with biases in half of its layers, of which it calls one of the two products dear."""

    class Naming(SmallModel):
        def __init__(self):
            super().__init__()
            for block in self.blocks.values():
                block.up = nn.Linear(self.dim, 2 * self.dim)
                block.query = nn.Linear(self.dim, self.dim)

        def recompute_plan(self):
            return {product: "keep"}

    return Naming


@pytest.mark.parametrize("product", ["aten.mm", "aten.addmm"])
def test_a_model_that_keeps_products_keeps_them_with_and_without_a_bias(context, product):
    """Tensor parallelism takes the bias off a layer: what is kept may not depend on that."""
    counts = []
    for mode in ("none", "selective", "full"):
        model, _ = applied(context, naming(product), mode=mode)
        with Made() as products:
            forward(model).backward()
        counts.append(products.count)

    none, selective, full = counts
    assert none == selective < full


def test_every_second_product_of_a_block_is_computed_again(context):
    made, gradients = [], []
    for config in ({"mode": "none"}, {"mode": "selective", "products_every": 2}):
        model, _ = applied(context, **config)
        with Made() as products:
            forward(model).backward()
        made.append(products.count)
        gradients.append([parameter.grad for parameter in model.parameters()])

    none, some = made
    # of six products in each of three blocks the first, third and fifth are kept; the last one's result is not needed
    assert some - none == 3 * 2
    assert all(map(torch.equal, *gradients))


def test_what_is_kept_of_every_second_product_is_counted_ahead(context):
    expected = measured(kept=KeptOperations(KEPT.names, products_every=2)).blocks.values()

    some, full = (
        live_bytes(applied(context, **config)[0])
        for config in ({"mode": "selective", "products_every": 2}, {"mode": "full"})
    )

    assert some - full == pytest.approx(sum(block.selective - block.inputs for block in expected), rel=0.1)
    assert 0 < some - full < sum(block.selective - block.inputs for block in measured().blocks.values())


@pytest.mark.parametrize(
    ("keep", "products_again", "norms_again"),
    [(["aten.mm"], 0, 6), (["aten.*rsqrt*"], 15, 0), (["*.mm", "*rsqrt"], 0, 0)],
)
def test_what_is_kept_is_chosen_by_patterns(context, keep, products_again, norms_again):
    counts = []
    for config in ({"mode": "none"}, {"mode": "selective", "keep": keep}):
        model, _ = applied(context, **config)
        with Made() as products, Made("aten::rsqrt") as norms:
            forward(model).backward()
        counts.append((products.count, norms.count))

    (products_once, norms_once), (products, norms) = counts
    assert (products - products_once, norms - norms_once) == (products_again, norms_again)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            {"keep": ["aten.mmm"]},
            r"keep: \"aten.mmm\" fits no operation .*did you mean 'aten.mm'",
        ),
        ({"keep": ["*fused_atention*"]}, r'"\*fused_atention\*" fits no operation'),
        (
            {"keep": ["*rms_norm*"], "products_every": 2},
            "products_every: no product of matrices is among the operations",
        ),
    ],
)
def test_patterns_that_keep_nothing_are_refused(context, config, sentence):
    with pytest.raises(ConfigError, match=sentence):
        applied(context, mode="selective", **config)


def test_a_result_that_the_block_changes_in_place_cannot_be_kept(context):
    """The norm adds to its mean."""
    model, _ = applied(context, mode="selective", keep=["*"])

    with pytest.raises(ConfigError, match=r"keep: a block changes a result in place that is to be kept; name fewer"):
        forward(model).backward()


def test_a_recomputed_block_saves_nothing_but_its_inputs(context):
    model, _ = applied(context, mode="full")

    expected = measured()

    assert saved_bytes(model) == sum(block.inputs for block in expected.blocks.values()) + expected.outside


def test_less_is_kept_the_more_is_recomputed(context):
    expected = measured().blocks.values()
    none, selective, half, full = (
        live_bytes(applied(context, **config)[0])
        for config in ({"mode": "none"}, {"mode": "selective"}, {"mode": "full", "every": 2}, {"mode": "full"})
    )

    assert none > selective > full
    assert none > half > full
    assert none - full == pytest.approx(sum(block.whole - block.inputs for block in expected), rel=0.1)
    assert selective - full == pytest.approx(sum(block.selective - block.inputs for block in expected), rel=0.1)


def test_only_every_nth_block_is_touched(context):
    _, touched = applied(context, every=2)

    assert touched == ["blocks.0", "blocks.2"]


def test_names_of_parameters_stay(context):
    model, _ = applied(context)

    assert {canonical_name(name) for name, _ in model.named_parameters()} == {
        name for name, _ in SmallModel().named_parameters()
    }


class Counting(nn.Module):
    """A step contributor, as routers are: it counts what it sees."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, hidden):
        with torch.no_grad():
            self.seen.add_(hidden.shape[0] * hidden.shape[1])
        return hidden * 1

    def accumulators(self):
        return {"seen": self.seen}

    def before_optimizer_step(self, reduced):
        pass


class CountedLater(Counting):
    """Something else counts for it, as for a predictor of further tokens."""

    def forward(self, hidden):
        return hidden * 1


class CountingModel(SmallModel):
    counting = Counting

    def __init__(self):
        super().__init__()
        for block in self.blocks.values():
            block.attention_norm = nn.Sequential(block.attention_norm, self.counting())

    def init_weights(self, rng):
        super().init_weights(rng)
        for name, buffer in self.named_buffers():
            rng.fill(name, buffer, lambda full, _: full.zero_())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
def test_what_forward_counts_is_counted_once(context, mode, compiled):
    model, _ = applied(context, CountingModel, mode=mode)
    if compiled:
        torch.compiler.reset()
        for block in model.blocks.values():
            block.compile(backend="aot_eager", fullgraph=True)

    for _ in range(2):
        forward(model).backward()

    counted = [module.seen.item() for module in model.modules() if isinstance(module, Counting)]
    assert counted == [2 * BATCH * LENGTH] * 3


def test_a_recomputation_leaves_sums_for_which_other_forwards_wait(context):
    """In a pipeline with several microbatches on their way."""
    model, _ = applied(context, type("Predicting", (CountingModel,), {"counting": CountedLater}), mode="full")
    seen = next(module.seen for module in model.modules() if isinstance(module, CountedLater))

    losses = [accumulate(forward(model), seen, torch.ones(())) for _ in range(2)]
    for loss in losses:
        loss.backward()

    assert seen.item() == 2


@pytest.fixture
def of_a_split_backward(context):
    schedule = builder().resolve("parallel_pass", {"name": "pipeline", "schedule": "ZBVZeroBubble"})
    return attrs.evolve(
        context, job=attrs.evolve(context.job, parallel=ParallelSection(pp=2, passes={"pipeline": schedule}))
    )


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_backward_for_inputs_and_another_for_parameters_recompute_each(of_a_split_backward, mode):
    """As zero-bubble schedules do, also where a block counts something."""
    plain, model = (applied(of_a_split_backward, CountingModel, mode=mode)[0] for mode in ("none", mode))
    gradients, made = [], []
    for one in (plain, model):
        loss, (first, *others) = forward(one), one.parameters()
        with Made() as products:
            gradients.append(torch.autograd.grad(loss, [first], retain_graph=True) + torch.autograd.grad(loss, others))
        made.append(products.count)

    for found, expected in zip(*reversed(gradients), strict=True):
        torch.testing.assert_close(found, expected)
    assert (made[0] == made[1]) is (mode == "selective")
    assert [module.seen.item() for module in model.modules() if isinstance(module, Counting)] == [BATCH * LENGTH] * 3


def test_auto_recomputes_as_little_as_fits(context):
    """The ladder of ``choose``, from too little memory up to enough to recompute nothing."""
    ladder = []
    for memory in range(150_000, 230_000, 4_000):
        try:
            model, touched = applied(context, mode="auto", memory_gib=memory / 2**30)
        except ConfigError as error:
            assert "with every block recomputed" in str(error)  # noqa: PT017  # only the tightest are to fail
            choice = "no way"
        else:
            choice = (len(touched) if touched != [""] else 0, live_bytes(model))
        if choice not in ladder:
            ladder.append(choice)

    assert ladder[0] == "no way"
    held = [bytes_held for _, bytes_held in ladder[1:]]
    assert held == sorted(held), "more memory may never lead to more recomputation"
    assert ladder[-1][0] == 0
    assert len(held) >= 4


def test_auto_on_this_device_needs_a_number(context):
    with pytest.raises(ConfigError, match=r"memory_gib: mode = \"auto\" needs to know how much memory"):
        applied(context, mode="auto")


def test_selective_needs_operations_to_keep(context):
    class Silent(SmallModel):
        def recompute_plan(self):
            return {}

    with pytest.raises(ConfigError, match="Silent names no operation to keep"):
        applied(context, Silent, mode="selective")


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"mode": "auto", "every": 2}, 'goes with mode = "full" or "selective"'),
        ({"mode": "budget"}, 'must be given with mode = "budget"'),
        ({"mode": "full", "budget": 0.5}, 'goes with mode = "budget"'),
        ({"mode": "full", "memory_gib": 3.0}, 'goes with mode = "auto"'),
        ({"mode": "full", "keep": ("aten.mm",)}, 'goes with mode = "selective" or "auto"'),
        ({"mode": "full", "products_every": 2}, 'goes with mode = "selective" or "auto"'),
        ({"mode": "selective", "keep": ("aten::mm",)}, r'names of operations as in "aten.mm", .* got \'aten::mm\''),
        ({"mode": "selective", "keep": ("mm",)}, "got 'mm'"),
    ],
)
def test_keys_of_another_mode_are_refused(config, sentence):
    with pytest.raises(ValueError, match=sentence):
        ActivationCheckpointingConfig(**config)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # an import of torch's
def test_a_budget_bounds_what_compiled_blocks_keep(context):
    held = []
    for budget in (1.0, 0.0):
        with functorch_config.patch(activation_memory_budget=1.0):
            model, touched = applied(context, mode="budget", budget=budget)
            torch.compiler.reset()
            for block in model.blocks.values():
                block.compile(backend="aot_eager_decomp_partition", fullgraph=True)
            held.append(saved_bytes(model))

    assert touched == ["blocks.0", "blocks.1", "blocks.2"]
    assert held[1] < held[0]


class UnequalVocabularies:
    """Ranks of which the second one needs more memory, for words that the first one has not."""

    def rank(self):
        job = attrs.evolve(
            small_job(),
            loss=builder().resolve("loss", "cross_entropy"),
            parallel=ParallelSection(dp_replicate=2, dp_shard=1),
        )
        context = PassContext(build_mesh(job, CPU), job, CPU)
        with torch.device("meta"):
            model = SmallModel(vocab_size=32 + 4 * torch.distributed.get_rank())
        with mock.patch.object(recompute_choice, "_most", float):
            alone = recompute_choice.choose(model, context, KEPT, MEMORY_OF_THE_FIRST)
        return alone, recompute_choice.choose(model, context, KEPT, MEMORY_OF_THE_FIRST)


MEMORY_OF_THE_FIRST = 212_000 / 2**30


def test_ranks_that_need_different_amounts_recompute_the_same_blocks():
    (alone, together), (alone_of_second, together_of_second) = on_ranks(UnequalVocabularies, "rank", 2)

    assert len(alone) < len(alone_of_second), "or there is nothing to agree upon"
    assert together == together_of_second == alone_of_second
