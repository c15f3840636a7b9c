"""Microbatches of one step that differ in shape, through every schedule and real ranks, against one process."""

import typing

import attrs
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from forge_core.config.sections import ParallelSection
from forge_core.contracts.model import canonical_name
from forge_core.contracts.parallel_pass import PassContext
from forge_core.distributed.mesh import build_mesh
from forge_core.train.build import materialise
from forge_core.train.executor import PlainExecutor
from forge_plugins_parallel.config import ContextParallelConfig, PipelineConfig, ScheduleName
from forge_plugins_parallel.context_parallel import ContextParallel
from forge_plugins_parallel.pipeline import Pipeline
from forge_testing.module_state import build_on_meta
from forge_testing.several_ranks import on_ranks
from forge_testing.small_model import SmallBlock, SmallModel, cross_entropy, small_job

CPU = torch.device("cpu")
SCHEDULES = typing.get_args(ScheduleName)
STEPS = [
    [(2, 8), (2, 12), (1, 4), (3, 20)],
    [(1, 16), (2, 4), (2, 8), (2, 8)],
    [(2, 8)] * 4,
]
"""Rows and tokens of the microbatches of each step."""


def batch(step, microbatch):
    rows, length = STEPS[step][microbatch]
    generator = torch.Generator().manual_seed(10 * step + microbatch)
    tokens, targets = (torch.randint(32, (rows, length), generator=generator) for _ in range(2))
    made = {"tokens": tokens, "targets": targets}
    if microbatch % 2:  # an entry that not every microbatch has
        made["document"] = (torch.arange(length) >= length // 3).long().expand(rows, -1).contiguous()
    return made


def gradients(parts):
    named = [(canonical_name(name), p.grad) for part in parts for name, p in part.named_parameters()]
    return {name: gradient.clone() for name, gradient in named if gradient is not None}


def run(executor, parts):
    """Loss and gradients of each step."""
    seen = []
    for step, shapes in enumerate(STEPS):
        batches = [batch(step, microbatch) for microbatch in range(len(shapes))]
        loss = executor.run(batches, torch.tensor(0.01))
        seen.append((loss.item(), gradients(parts)))
        for part in parts:
            part.zero_grad(set_to_none=True)
    return seen


def one_process(model_class):
    model = build_on_meta(lambda: model_class(n_layers=4))
    materialise(model, CPU, seed=0)
    return run(PlainExecutor(model, cross_entropy), [model])


def assert_same(ranks, expected):
    """``ranks``: for each, what ``run`` has seen there."""
    for step, (loss, whole) in enumerate(expected):
        assert sum(seen[step][0] for seen in ranks) == pytest.approx(loss, rel=1e-5), f"step {step}"
        held = {name for seen in ranks for name in seen[step][1]}
        assert held == whole.keys()
        for seen in ranks:
            for name, gradient in seen[step][1].items():
                error = (gradient - whole[name]).abs().max() / whole[name].abs().max()
                assert error <= 1e-5, f"step {step}: {name} is off by {error:.1e}"


class EverySchedule:
    def rank(self):
        # torch's own comparison with the shapes that it has been told, and how it is run outside of here
        return {
            (schedule, level): self.of(schedule, level)
            for schedule in SCHEDULES
            for level in (dist.DebugLevel.OFF, dist.DebugLevel.DETAIL)
        }

    def of(self, schedule, level):
        dist.set_debug_level(level)
        job = attrs.evolve(small_job(), parallel=ParallelSection(pp=2))
        context = PassContext(build_mesh(job, CPU), job, CPU)
        pipeline = Pipeline(PipelineConfig(schedule=schedule))
        parts, _ = pipeline.split(build_on_meta(lambda: SmallModel(n_layers=4)), context)
        for part in parts:
            materialise(part, CPU, seed=0)
        executor = pipeline.executor(parts, cross_entropy, context)
        losses, take_loss = [], executor._take_loss
        executor._take_loss = lambda *given: losses.append(take_loss(*given)) or losses[-1]
        return run(executor, parts), [one.grad_fn is not None for one in losses]


@pytest.fixture(scope="module")
def ranks():
    return on_ranks(EverySchedule, "rank", 2)


@pytest.fixture(scope="module")
def seen_by_ranks(ranks):
    return [{case: seen for case, (seen, _) in rank.items()} for rank in ranks]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("level", [dist.DebugLevel.OFF, dist.DebugLevel.DETAIL], ids=["plain", "debug"])
def test_microbatches_of_any_shapes_have_the_loss_and_gradients_of_one_process(seen_by_ranks, schedule, level):
    assert_same([seen[schedule, level] for seen in seen_by_ranks], one_process(SmallModel))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_loss_that_a_schedule_keeps_holds_no_graph(ranks, schedule):
    (of_losses,) = [graphs for rank in ranks if (graphs := rank[schedule, dist.DebugLevel.OFF][1])]

    assert of_losses == [False] * sum(map(len, STEPS))


class Core(nn.Module):
    def forward(self, q, k, v, visible):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)


class CutBlock(SmallBlock):
    """Says where its attention is."""

    def __init__(self, dim):
        super().__init__(dim)
        self.core = Core()

    def forward(self, hidden, visible):
        normed = self.attention_norm(hidden)
        q, k, v = (part(normed)[:, None] for part in (self.query, self.key, self.value))
        hidden = hidden + self.output(self.core(q, k, v, visible)[:, 0])
        return hidden + self.down(F.gelu(self.up(self.up_norm(hidden))))


class CutModel(SmallModel):
    def __init__(self, n_layers=4):
        super().__init__(n_layers=n_layers)
        self.blocks = nn.ModuleDict({str(layer): CutBlock(self.dim) for layer in range(n_layers)})

    def context_plan(self):
        return [f"blocks.{layer}.core" for layer in self.blocks]

    def forward(self, tokens, targets=None, loss=None, document=None, mask=None, **inputs):
        hidden = tokens if self.embed is None else self.embed(tokens)
        if mask is None:
            place = torch.arange(hidden.shape[1])
            mask = (place[:, None] >= place)[None, None]
            if document is not None:
                mask = mask & (document[:, None, :, None] == document[:, None, None, :])
        for block in self.blocks.values():
            hidden = block(hidden, mask)
        if self.head is None:
            return hidden
        return loss(self.norm(hidden), self.head, targets)


class WithSequencesCut:
    def rank(self):
        job = attrs.evolve(small_job(), parallel=ParallelSection(pp=2, cp=2))
        context = PassContext(build_mesh(job, CPU), job, CPU)
        pipeline = Pipeline(PipelineConfig())
        parts, _ = pipeline.split(build_on_meta(CutModel), context)
        for part in parts:
            ContextParallel(ContextParallelConfig()).apply(part, context)
            materialise(part, CPU, seed=0)
        seen = run(pipeline.executor(parts, cross_entropy, context), parts)
        group = context.mesh.device_mesh.get_group("cp")
        for _, named in seen:  # as fsdp does, of which there is none here
            for gradient in named.values():
                dist.all_reduce(gradient, group=group)
        return seen


def test_so_have_microbatches_whose_sequences_are_cut_over_ranks():
    assert_same(on_ranks(WithSequencesCut, "rank", 4), one_process(CutModel))
