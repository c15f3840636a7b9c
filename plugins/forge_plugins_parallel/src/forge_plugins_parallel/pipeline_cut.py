"""Which stage of a pipeline has what of a model."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any, NamedTuple

from torch import nn

from forge_core.errors import ConfigError, PluginError
from forge_plugins_parallel.config import too_few_blocks
from forge_plugins_parallel.units import stages_of_parts

Cut = Sequence[Sequence[str]]
"""The keys of the blocks of each stage."""

_OWN = ("embed", "blocks", "norm", "head")
_ENDS = ("first", "last")


def cut_model(model: Any, n_stages: int, seq_len: int) -> Cut:
    """The blocks of each stage, by what the model says of its work.

    Raises:
        ConfigError: there are fewer blocks than stages.
        PluginError: a further part is none, or belongs to no stage.
    """
    parts = stages_of_parts(model)
    for name, stage in parts.items():
        if name in _OWN or not hasattr(model, name) or stage not in _ENDS:
            raise PluginError(
                f"{type(model).__qualname__}.stage_of has {name!r} in the stage {stage!r}; it names attributes of the "
                'model beside embed, blocks, norm and head, each with "first" or "last"'
            )
    at_head = getattr(model, "n_predictors", 0)
    head = 6 * model.head.weight.numel() * (1 + at_head)
    if not hasattr(model, "flops_of"):
        block = (model.flops_per_token(seq_len) - head) / len(model.blocks)
        return cut_blocks(dict.fromkeys(model.blocks, block), n_stages, last=head, at_head=at_head)
    at_ends = {end: sum(model.flops_of(name) for name, stage in parts.items() if stage == end) for end in _ENDS}
    return cut_blocks(
        {name: model.flops_of(f"blocks.{name}") for name in model.blocks},
        n_stages,
        first=model.flops_of("embed") + at_ends["first"],
        last=head + at_ends["last"],
        at_head=at_head,
    )


def cut_blocks(
    costs: Mapping[str, float], n_stages: int, *, first: float = 0.0, last: float = 0.0, at_head: int = 0
) -> list[list[str]]:
    """The blocks of each stage, in order: the dearest stage is as cheap as can be, and each has at least one block.

    Of cuts of which that is true, one with even stages is taken, and of those the one that gives later stages more: the
    first ones hold the embedding, and the activations of the most microbatches.

    Args:
        costs: of each block.
        first, last: what the first stage and the last one cost besides.
        at_head: so many of the last blocks must be in the last stage.

    Raises:
        ConfigError: there are fewer blocks than stages.
    """
    names = list(costs)
    counts = _counts(tuple(costs.values()), n_stages, first, last, at_head)
    rest = iter(names)
    return [[next(rest) for _ in range(count)] for count in counts]


@functools.lru_cache(maxsize=8)  # a plan cuts one model for each of its ranks
def _counts(costs: tuple[float, ...], n_stages: int, first: float, last: float, at_head: int) -> tuple[int, ...]:
    """How many blocks each stage has, as ``cut_blocks``."""
    if problem := too_few_blocks(len(costs), n_stages, at_head):
        raise ConfigError(f"parallel.passes.pipeline: {problem}")
    exact = [Fraction(cost) for cost in (first, *costs, last)]  # sums of floats would be equal by luck
    unit = max(cost.denominator for cost in exact)
    whole = [int(cost * unit) for cost in exact]
    before = list(accumulate(whole[1:-1], initial=0))
    best = {0: _Cheapest(0, 0, ())}  # of the stages so far, by how many blocks they have
    for stage in range(n_stages):
        is_last = stage == n_stages - 1
        extra = (whole[0] if stage == 0 else 0) + (whole[-1] if is_last else 0)
        least = max(1, at_head) if is_last else 1
        ends = [len(costs)] if is_last else range(stage + 1, len(costs) - (n_stages - stage - 2) - max(1, at_head) + 1)
        best = {
            end: min(
                so_far.with_stage(before[end] - before[start] + extra, end - start)
                for start, so_far in best.items()
                if end - start >= least
            )
            for end in ends
        }
    return best[len(costs)].counts


class _Cheapest(NamedTuple):
    """Compared in this order."""

    dearest: int
    squares: int
    counts: tuple[int, ...]

    def with_stage(self, cost: int, count: int) -> _Cheapest:
        return _Cheapest(max(self.dearest, cost), self.squares + cost * cost, (*self.counts, count))


def shared_tensors(model: Any, cut: Cut, *, splits_backward: bool) -> dict[str, str]:
    """The parameters of the last stage that are the first one's, by name: a tied head's.

    Args:
        splits_backward: gradients of weights are computed by themselves. torch frees the graph after those of one
            module, and would need it again for another that has the same parameter, but in the first stage.

    Raises:
        ConfigError: other modules of different stages share a parameter, or of one stage where they may not; or one is
            in no module that a stage could have.
    """
    stage_of = {name: stage for stage in range(len(cut)) for name in _holdings(model, cut, stage)}
    seen: dict[int, tuple[str, int]] = {}
    borrowed = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        module = ".".join(name.split(".")[: 2 if name.startswith("blocks.") else 1])
        if module not in stage_of:
            raise ConfigError(
                f"parallel.passes.pipeline: {name} is neither in embed, blocks, norm nor head, nor in a part that the "
                "model has a stage for (stage_of), so that every stage would train a copy of its own; move it into one "
                "of them, or set parallel.pp = 1"
            )
        first, stage = seen.setdefault(id(parameter), (name, stage_of[module]))
        if (first, name) == ("embed.weight", "head.weight"):
            borrowed[name] = first
        elif stage != stage_of[module]:
            raise ConfigError(
                f"parallel.passes.pipeline: {name} is tied to {first}, which is in another pipeline stage and would be "
                "trained apart from it; untie them, or set parallel.pp = 1"
            )
        elif splits_backward and stage > 0 and name != first:
            raise ConfigError(
                f"parallel.passes.pipeline.schedule: {name} is tied to {first}, and a schedule that computes gradients "
                'of weights apart has them of one module after the other; untie them, or take "1F1B" or '
                '"Interleaved1F1B"'
            )
    return borrowed


def part_of(model: Any, cut: Cut, stage: int) -> nn.Module:
    """A copy of the model, on meta, without what other stages hold."""
    kept = set(_holdings(model, cut, stage))
    left = [name for name in model.blocks if f"blocks.{name}" not in kept]
    part: Any = copy.deepcopy(model, {id(model.blocks[name]): None for name in left})  # to copy them takes as long
    for name in left:
        del part.blocks[name]
    for name in ("embed", "norm", "head", *stages_of_parts(model)):
        if name not in kept:
            setattr(part, name, None)
    whole: nn.Module = part
    return whole


def held(model: Any, cut: Cut, stage: int) -> list[str]:
    """The qualified names of what a stage holds of the model."""
    names = _holdings(model, cut, stage)
    return [name for name in names if name.startswith("blocks.") or getattr(model, name) is not None]


def _holdings(model: Any, cut: Cut, stage: int) -> Iterator[str]:
    parts = stages_of_parts(model)
    if stage == 0:
        yield from ("embed", *(name for name, end in parts.items() if end == "first"))
    yield from (f"blocks.{name}" for name in cut[stage])
    if stage == len(cut) - 1:
        yield from ("norm", "head", *(name for name, end in parts.items() if end == "last"))
