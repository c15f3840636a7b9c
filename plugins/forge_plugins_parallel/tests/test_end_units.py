"""Embedding and head as units of FSDP: when they are gathered, freed and reduced, and whose they are."""

from contextlib import contextmanager

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from forge_core.config.sections import ParallelSection
from forge_core.contracts.loss import LossSum
from forge_core.contracts.parallel_pass import PassContext
from forge_core.distributed.mesh import build_mesh
from forge_core.train.build import materialise
from forge_core.train.executor import PlainExecutor
from forge_plugins_parallel.config import FullyShardConfig
from forge_plugins_parallel.end_units import end_units
from forge_plugins_parallel.fsdp import FullyShard
from forge_testing.module_state import build_on_meta
from forge_testing.several_ranks import on_ranks
from forge_testing.small_model import SmallModel, cross_entropy, small_job

CPU = torch.device("cpu")
V, D = 32, 16
SIZES = {V * D: "embed", V * D + D: "head", 8 * D * D + 2 * D: "block"}
"""Numbers of units of ``SmallModel``; of tied ends, those of the head's."""

COLLECTIVES = (
    {"all_gather_single": "gather", "reduce_scatter_single": "reduce"}
    if hasattr(dist, "all_gather_single")
    else {"all_gather_into_tensor": "gather", "reduce_scatter_tensor": "reduce"}  # torch 2.11
)


class TiedModel(SmallModel):
    def __init__(self):
        super().__init__()
        self.head.weight = self.embed.weight

    def parameter_roles(self):
        return {name: role for name, role in super().parameter_roles().items() if name != "head.weight"}


class EarlyExit(SmallModel):
    """Its head also reads what an earlier block gives."""

    def forward(self, tokens, targets=None, loss=None, **inputs):
        hidden, exits = self.embed(tokens), []
        visible = torch.ones(hidden.shape[1], hidden.shape[1]).tril().bool()[None, None]
        for block in self.blocks.values():
            hidden = block(hidden, visible)
            exits.append(self.head(self.norm(hidden)).float().logsumexp(-1).sum())
        summed = loss(self.norm(hidden), self.head, targets)
        return LossSum(summed.total + sum(exits), summed.count)


class TiedEarlyExit(EarlyExit, TiedModel):
    pass


class EmbeddingTwice(SmallModel):
    """It looks tokens up once more after its blocks."""

    def forward(self, tokens, targets=None, loss=None, **inputs):
        def with_tokens(hidden, head, targets):
            return loss(hidden + self.embed(tokens), head, targets)

        return super().forward(tokens, targets, with_tokens, **inputs)


def by_weight(hidden, head, targets):
    """A loss that multiplies by the head's weight without calling the head."""
    logits = (hidden @ head.weight.T).flatten(0, -2)
    return LossSum(nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum"), (targets >= 0).sum())


def in_parts(hidden, head, targets):
    """A loss that calls the head several times, and once without gradients."""
    with torch.no_grad():
        head(hidden)
    parts = [cross_entropy(hidden[:, i::2], head, targets[:, i::2]) for i in range(2)]
    return LossSum(sum(part.total for part in parts), sum(part.count for part in parts))


CASES = {
    "untied": (SmallModel, cross_entropy, {}),
    "tied": (TiedModel, cross_entropy, {}),
    "kept": (SmallModel, cross_entropy, {"reshard_after_forward": "never"}),
    "tied and kept": (TiedModel, cross_entropy, {"reshard_after_forward": "never"}),
    "ahead": (SmallModel, cross_entropy, {"prefetch": 2}),
    "by weight": (SmallModel, by_weight, {}),
    "tied by weight": (TiedModel, by_weight, {}),
    "in parts": (SmallModel, in_parts, {}),
    "tied in parts": (TiedModel, in_parts, {}),
    "early exit": (EarlyExit, cross_entropy, {}),
    "tied early exit": (TiedEarlyExit, cross_entropy, {}),
    "embedding twice": (EmbeddingTwice, cross_entropy, {}),
}


class OnTwoRanks:
    """Each case trained for two steps of two microbatches, and once in one process."""

    def rank(self):
        return {name: self.train(*case) for name, case in CASES.items()}

    def train(self, cls, loss, config):
        model, seen = sharded(cls, config), Seen()
        with seen.watching(model):
            gradients = two_steps(model, loss)
        whole = build_on_meta(cls)
        materialise(whole, CPU, seed=0)
        return seen.events, seen.tables, gradients, two_steps(whole, loss)


def sharded(cls, config):
    job = attrs.evolve(small_job(), parallel=ParallelSection(dp_shard=2))
    job = attrs.evolve(job, train=attrs.evolve(job.train, grad_accumulation=2))
    model, _ = FullyShard(FullyShardConfig(accumulate="sharded", **config)).apply(
        build_on_meta(cls), PassContext(build_mesh(job, CPU), job, CPU)
    )
    materialise(model, CPU, seed=0)
    return model


def two_steps(model, loss):
    """The gradients of each."""
    found = []
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(V, (2, 2, 8), generator=generator)
        scale = torch.tensor(0.5 if hasattr(model, "unshard") else 1.0)  # all ranks have the same batches
        PlainExecutor(model, loss).run([{"tokens": one, "targets": one} for one in tokens], scale)
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        found.append({name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()})
        for parameter in model.parameters():
            parameter.grad = None
    return found


@attrs.define
class Seen:
    """What a rank did in its last microbatch, and what it had of the embedding while blocks computed."""

    events: list[str] = attrs.field(factory=list)
    tables: list[int] = attrs.field(factory=list)

    @contextmanager
    def watching(self, model):
        storages = []

        def note(what):
            self.events.append(what)
            self.tables += [storage.size() for storage in storages]

        def begin(*_):
            for one in (self.events, self.tables, storages):
                one.clear()

        def after_norm(_, __, normed):
            normed.register_hook(lambda _: self.events.append("backward norm"))

        for name, block in model.blocks.items():
            block.attention_norm.register_forward_pre_hook(lambda *_, name=name: note(f"forward {name}"))
            block.down.register_full_backward_pre_hook(lambda *_, name=name: note(f"backward {name}"))
        model.norm.register_forward_hook(after_norm)
        model.embed.register_forward_hook(lambda embed, *_: storages.append(embed.weight.untyped_storage()))
        model.register_forward_pre_hook(begin, prepend=True)
        patch = pytest.MonkeyPatch()
        for function, what in COLLECTIVES.items():
            patch.setattr(dist, function, self.noting(what, getattr(dist, function)))
        try:
            yield
        finally:
            patch.undo()

    def noting(self, what, function):
        def noted(*args, **kwargs):
            tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
            self.events.append(f"{what} {SIZES[max(one.numel() for one in tensors)]}")
            return function(*args, **kwargs)

        return noted


@pytest.fixture(scope="module")
def ranks():
    return on_ranks(OnTwoRanks, "rank", 2)


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_process(ranks, case):
    for rank in ranks:
        *_, steps, expected = rank[case]
        for gradients, others in zip(steps, expected, strict=True):
            assert gradients.keys() == others.keys()
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, others[name], rtol=1e-5, atol=1e-6, msg=name)


FORWARD = ["gather block", "forward 0", "gather block", "forward 1", "gather block", "gather head", "forward 2"]
BACKWARD = ["backward 2", "reduce block", "gather block", "backward 1", "reduce block", "backward 0", "reduce block"]


@pytest.mark.parametrize("case", ["untied", "by weight", "in parts"])
def test_the_head_is_gathered_in_the_last_block_and_reduced_before_that_blocks_backward(ranks, case):
    for rank in ranks:
        events, *_ = rank[case]
        at_turn = ["gather block", "backward norm", "gather block", "reduce head"]
        assert events == ["gather embed", *FORWARD, *at_turn, *BACKWARD, "reduce embed"]


@pytest.mark.parametrize("case", ["tied", "tied by weight", "tied in parts"])
def test_tied_ends_are_gathered_at_both_and_reduced_once(ranks, case):
    for rank in ranks:
        events, *_ = rank[case]
        at_turn = ["gather block", "backward norm", "gather block"]
        assert events == ["gather head", *FORWARD, *at_turn, *BACKWARD, "reduce head"]


@pytest.mark.parametrize("case", ["untied", "tied", "ahead", "by weight", "tied by weight", "early exit"])
def test_no_whole_embedding_is_there_while_blocks_compute(ranks, case):
    for rank in ranks:
        _, tables, *_ = rank[case]
        assert tables == [0] * 6


@pytest.mark.parametrize("case", ["kept", "tied and kept"])
def test_an_embedding_is_kept_where_blocks_are(ranks, case):
    for rank in ranks:
        events, tables, *_ = rank[case]
        assert tables == [4 * V * D] * 6
        assert events.count("gather head") == 1


def test_a_head_that_is_used_earlier_is_reduced_at_the_end(ranks):
    for rank in ranks:
        events, *_ = rank["early exit"]
        assert events.index("gather head") < events.index("forward 1")
        assert events[-1] == "reduce head"


def test_an_embedding_that_is_used_later_is_gathered_again(ranks):
    for rank in ranks:
        events, *_ = rank["embedding twice"]
        assert events.count("gather embed") == 2


def test_units_that_are_gathered_ahead_come_after_the_embedding(ranks):
    for rank in ranks:
        events, *_ = rank["ahead"]
        assert events[:4] == ["gather embed", "gather block", "gather block", "gather block"]
        assert events.index("gather head") == events.index("forward 0") + 1


class Scaled(nn.Embedding):
    def forward(self, tokens):
        return nn.functional.embedding(tokens, self.weight / self.weight.norm())


def changed(**parts):
    """A model with other parts."""
    model = build_on_meta(SmallModel)
    for name, part in parts.items():
        setattr(model, name, part)
    return model


def with_positions():
    model = build_on_meta(SmallModel)
    model.embed.positions = nn.Embedding(8, D)
    return model


def shared_with_a_tower():
    model = build_on_meta(SmallModel)
    model.tower = nn.Embedding(V, D)
    model.tower.weight = model.embed.weight
    return model


EMBED, HEAD = ["embed"], ["norm", "head"]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (SmallModel, [EMBED, HEAD]),
        (TiedModel, [[*EMBED, *HEAD]]),
        (with_positions, [EMBED, HEAD]),
        (shared_with_a_tower, [HEAD]),
        (lambda: changed(embed=Scaled(V, D)), [HEAD]),
        (lambda: changed(embed=nn.Linear(V, D)), [HEAD]),
        (lambda: changed(embed=None), [HEAD]),
        (lambda: changed(norm=None), [EMBED, ["head"]]),
        (lambda: changed(head=None), [EMBED]),
        (lambda: changed(head=None, norm=None, embed=None), []),
        (lambda: changed(head=nn.ModuleDict({"0": nn.Linear(D, V)})), [EMBED]),
        (lambda: changed(blocks=nn.ModuleDict()), []),
        (lambda: changed(n_predictors=1), [EMBED, HEAD]),
        (lambda: changed(n_predictors=3), []),
    ],
)
def test_what_is_of_one_end_alone_is_a_unit(make, expected):
    assert [list(end.modules) for end in end_units(build_on_meta(make))] == expected


def test_blocks_that_predict_further_tokens_come_after_the_head():
    model = changed(n_predictors=1)

    assert [end.last for end in end_units(model)] == [model.blocks["1"]] * 2
