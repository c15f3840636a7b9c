"""What a model sends from stage to stage beside hidden states, through every schedule and real ranks, against one
process: the memory of an encoder on the first stage, of other lengths in each microbatch."""

import typing

import attrs
import pytest
import torch
import torch.distributed as dist

from forge_core.config.sections import ParallelSection
from forge_core.contracts.batch import KNOWN
from forge_core.contracts.model import canonical_name
from forge_core.contracts.parallel_pass import PassContext
from forge_core.distributed.mesh import build_mesh
from forge_core.errors import PluginError
from forge_core.train.build import materialise
from forge_core.train.executor import PlainExecutor
from forge_plugins_parallel.activation_checkpointing import ActivationCheckpointing
from forge_plugins_parallel.between_stages import BetweenStages, Form
from forge_plugins_parallel.config import (
    ActivationCheckpointingConfig,
    ContextParallelConfig,
    FullyShardConfig,
    PipelineConfig,
    ScheduleName,
)
from forge_plugins_parallel.context_parallel import ContextParallel
from forge_plugins_parallel.fsdp import FullyShard
from forge_plugins_parallel.pipeline import Pipeline
from forge_testing.module_state import build_on_meta
from forge_testing.several_ranks import on_ranks
from forge_testing.small_model import cross_entropy, small_job
from forge_testing.small_tower import ENTRIES, FEATURES, SmallTower

CPU = torch.device("cpu")
SCHEDULES = typing.get_args(ScheduleName)
FROZEN = ("nothing", "encoder", "first stage")
STEPS = [
    [(2, 8, 5), (2, 12, 1), (1, 4, 7), (3, 20, 2)],
    [(1, 16, 3), (2, 4, 3), (2, 8, 9), (2, 8, 1)],
]
"""Rows, tokens and positions of the memory, of the microbatches of each step."""


def batch(step, microbatch):
    rows, length, tiles = STEPS[step][microbatch]
    generator = torch.Generator().manual_seed(10 * step + microbatch)
    tokens, targets = (torch.randint(32, (rows, length), generator=generator) for _ in range(2))
    return {
        "tokens": tokens,
        "targets": targets,
        "features": torch.randn(rows, tiles, FEATURES, generator=generator),
    }


class ForgetfulTower(SmallTower):
    """Later stages do not look at the memory, and no gradient of it comes back from them."""

    def forward(self, tokens, *args, memory=None, **inputs):
        if self.embed is not None:
            return super().forward(tokens, *args, **inputs)
        output = super().forward(tokens, *args, memory=torch.ones(len(tokens), 1, self.dim), **inputs)
        return output if self.head is not None else (output[0], {"memory": memory})


def build(frozen, model_class=SmallTower):
    model = build_on_meta(lambda: model_class(n_layers=4))
    modules = {"nothing": (), "encoder": ("memory",), "first stage": ("memory", "embed", "blocks.0")}[frozen]
    for name in modules:
        model.get_submodule(name).requires_grad_(False)
    return model


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def run(executor, parts):
    """Loss and gradients of each step, the loss of an evaluation and the logits of a prediction."""
    seen = []
    for step, shapes in enumerate(STEPS):
        batches = [batch(step, microbatch) for microbatch in range(len(shapes))]
        loss = executor.run(batches, torch.tensor(0.01))
        named = [(canonical_name(name), p.grad) for part in parts for name, p in part.named_parameters()]
        seen.append((loss.item(), {name: full(gradient).clone() for name, gradient in named if gradient is not None}))
        for part in parts:
            part.zero_grad(set_to_none=True)
    total, count = executor.evaluate(batch(0, 2))
    logits = executor.predict({name: entry for name, entry in batch(0, 3).items() if name != "targets"})
    return seen, (total.item(), count.item()), None if logits is None else logits.clone()


def one_process(frozen, model_class=SmallTower):
    model = build(frozen, model_class)
    materialise(model, CPU, seed=0)
    return run(PlainExecutor(model, cross_entropy), [model])


def assert_same(ranks, expected, tolerance=3e-6):
    """``ranks``: for each, what ``run`` has seen there."""
    steps, (total, count), logits = expected
    for step, (loss, whole) in enumerate(steps):
        assert sum(seen[step][0] for seen, *_ in ranks) == pytest.approx(loss, rel=tolerance), f"step {step}"
        assert {name for seen, *_ in ranks for name in seen[step][1]} == whole.keys()
        for seen, *_ in ranks:
            for name, gradient in seen[step][1].items():
                error = (gradient - whole[name]).abs().max() / whole[name].abs().max()
                assert error <= tolerance, f"step {step}: {name} is off by {error:.1e}"
    assert sum(one[0] for _, one, _ in ranks) == pytest.approx(total, rel=tolerance)
    assert sum(one[1] for _, one, _ in ranks) == count
    (found,) = [one for _, _, one in ranks if one is not None]
    torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-6)


def split(model, context, **keys):
    pipeline = Pipeline(PipelineConfig(**keys))
    parts, _ = pipeline.split(model, context)
    return pipeline, parts


class EverySchedule:
    def rank(self):
        job = attrs.evolve(small_job(), parallel=ParallelSection(pp=2))
        context = PassContext(build_mesh(job, CPU), job, CPU)
        seen = {}
        for schedule in SCHEDULES:
            for frozen in FROZEN:
                dist.set_debug_level(dist.DebugLevel.OFF if frozen == "nothing" else dist.DebugLevel.DETAIL)
                seen[schedule, frozen] = self.of(context, schedule, frozen)
        return seen

    def of(self, context, schedule, frozen):
        pipeline, parts = split(build(frozen), context, schedule=schedule)
        for part in parts:
            materialise(part, CPU, seed=0)
        return run(pipeline.executor(parts, cross_entropy, context), parts)


@pytest.fixture(scope="module")
def seen_by_ranks():
    return on_ranks(EverySchedule, "rank", 2)


@pytest.fixture(scope="module")
def expected():
    return {frozen: one_process(frozen) for frozen in FROZEN}


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_memory_that_travels_has_the_loss_and_gradients_of_one_process(seen_by_ranks, expected, schedule, frozen):
    assert_same([seen[schedule, frozen] for seen in seen_by_ranks], expected[frozen])


class InOtherLayouts:
    """With sharding, recomputation and units; and with sequences cut over ranks."""

    def rank(self):
        return {
            "sharded": self.sharded("1F1B"),
            "sharded, in a V": self.sharded("ZBVZeroBubble"),
            "cut": self.cut(),
            "forgotten": self.forgotten(),
        }

    def context(self, **degrees):
        job = attrs.evolve(small_job(), parallel=ParallelSection(**degrees))
        entries = {**{name: KNOWN[name] for name in ("tokens", "targets")}, **ENTRIES}
        return PassContext(build_mesh(job, CPU), job, CPU, entries=entries)

    def sharded(self, schedule):
        context = self.context(pp=2, dp_shard=2)
        pipeline, parts = split(build("nothing"), context, schedule=schedule)
        touched = []
        for part in parts:
            ActivationCheckpointing(ActivationCheckpointingConfig(mode="full")).apply(part, context)
            touched += FullyShard(FullyShardConfig(prefetch=1)).apply(part, context)[1]
            materialise(part, CPU, seed=0)
        return touched, run(pipeline.executor(parts, cross_entropy, context), parts)

    def cut(self):
        context = self.context(pp=2, cp=2)
        pipeline, parts = split(build("nothing"), context)
        for part in parts:
            ContextParallel(ContextParallelConfig()).apply(part, context)
            materialise(part, CPU, seed=0)
        seen, evaluated, logits = run(pipeline.executor(parts, cross_entropy, context), parts)
        group = context.mesh.device_mesh.get_group("cp")
        for _, named in seen:  # as fsdp does, of which there is none here
            for gradient in named.values():
                dist.all_reduce(gradient, group=group)
        return seen, evaluated, logits if dist.get_rank(group) == 0 else None

    def forgotten(self):
        context = self.context(pp=4)
        pipeline, parts = split(build("nothing", ForgetfulTower), context)
        for part in parts:
            materialise(part, CPU, seed=0)
        return run(pipeline.executor(parts, cross_entropy, context), parts)


@pytest.fixture(scope="module")
def seen_in_layouts():
    return on_ranks(InOtherLayouts, "rank", 4)


@pytest.mark.parametrize("schedule", ["sharded", "sharded, in a V"])
def test_so_has_one_whose_encoder_is_sharded_and_recomputed_by_its_layers(seen_in_layouts, expected, schedule):
    touched = [seen[schedule][0] for seen in seen_in_layouts]
    units = [f"memory.layers.{layer}" for layer in (0, 1)]
    assert [names[:2] == units for names in touched] == [True, True, False, False], "the first stage alone has it"

    for shard in (0, 1):  # both read the same, and gradients are sums over them
        ranks = [seen[schedule][1] for seen in seen_in_layouts[shard::2]]
        for steps, *_ in ranks:
            for _, gradients in steps:
                for gradient in gradients.values():
                    gradient.div_(2)
        assert_same(ranks, expected["nothing"])


def test_so_has_one_beside_sequences_that_are_cut_over_ranks(seen_in_layouts, expected):
    assert_same([seen["cut"] for seen in seen_in_layouts], expected["nothing"])


def test_a_memory_that_nothing_reads_has_a_gradient_of_zero_from_there(seen_in_layouts):
    """The first stage has a block that reads it, so that its encoder learns all the same."""
    (first, *_), *_ = [seen["forgotten"] for seen in seen_in_layouts]

    assert all(gradients["memory.read.weight"].abs().sum() > 0 for _, gradients in first)


def between(travels):
    class Sender:
        def __init__(self):
            self.travels = travels

    return BetweenStages(
        Sender(), words="Sender", width=16, dtype=torch.bfloat16, sequence_parts=2, position_dims={"picture": None}
    )


TOKENS = {"tokens": torch.zeros(3, 8), "picture": torch.zeros(3, 4, 2), "slots": torch.zeros(3, 8)}


def test_a_model_is_told_the_shapes_that_its_forward_sees():
    told = []

    forms = between(lambda shapes: told.append(shapes) or {"seen": ((3, 4, 16), torch.float32)}).forms(TOKENS)

    assert told == [{"tokens": (3, 4), "picture": (3, 4, 2), "slots": (3, 4)}]
    assert forms == {"hidden states": Form((3, 4, 16), torch.bfloat16), "seen": Form((3, 4, 16), torch.float32)}


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        (torch.zeros(3, 4, 16), "names hidden states, seen, and a stage without head gives hidden states"),
        ((torch.zeros(3, 4, 16), {"sene": torch.zeros(1)}), "and a stage without head gives hidden states, sene"),
        ((torch.zeros(3, 4, 16), {"seen": torch.zeros(1)}), r"gives seen of the shape \(1,\), and the next one waits"),
        ((torch.zeros(3, 8, 16), {"seen": torch.zeros(2, 3)}), r"hidden states of the shape \(3, 8, 16\)"),
    ],
)
def test_a_stage_that_gives_other_things_than_the_model_has_said_is_told(output, sentence):
    sender = between(lambda shapes: {"seen": ((2, 3), None)})

    with pytest.raises(PluginError, match=sentence):
        sender.tensors(output, sender.forms(TOKENS))


def test_what_has_no_gradient_does_not_travel():
    with pytest.raises(PluginError, match=r"says that ids is torch\.int64; gradients go back for all that travels"):
        between(lambda shapes: {"ids": ((2, 3), torch.int64)}).forms(TOKENS)


def test_names_do_not_depend_on_the_batch():
    sender = between(lambda shapes: {"seen": ((2, 3), None)} if "picture" in shapes else {})
    sender.forms(TOKENS)

    with pytest.raises(PluginError, match="names hidden states, and before hidden states, seen"):
        sender.forms({"tokens": TOKENS["tokens"]})
