"""Blocks that come again and again: a few are simulated, and what the others do to memory follows from these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import attrs
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_iter

from forge_plugins_plan.alike import alike, by_block
from forge_plugins_plan.timeline import Change, Repeat, Tally, Timeline
from forge_plugins_plan.work import Microbatch, Work

_FIRST, _LAST = 3, 2
"""Turns that are simulated, of the first ones and of the last. All but the first and the last must do the same."""
_LONGEST = 8
"""Blocks of different kinds that may take turns."""
_NONE: Mapping[int, int] = MappingProxyType({})


class NotRepeatedError(Exception):
    """What is left out does not follow from what has been simulated."""


@attrs.frozen(eq=False)
class Repetition:
    """A stretch of a model in which blocks are alike, or blocks of different kinds take turns evenly."""

    part: Any
    """The model, or a stage of a pipeline."""
    kept: Sequence[Sequence[str]]
    """The names of the blocks that are simulated, by turn."""
    left_out: Sequence[Sequence[str]]
    """The names of the others, by turn."""

    def stand_ins(self) -> Iterator[tuple[nn.Module, nn.Module]]:
        """Each block that is left out, with one that is simulated."""
        for turn in self.left_out:
            for name, other in zip(turn, self.kept[0], strict=True):
                yield self.part.blocks[name], self.part.blocks[other]


class _Mark(NamedTuple):
    """In a log: here a turn of a repetition begins."""

    repetition: int
    phase: str
    turn: int


def repetitions(part: Any, *, seen: bool = False) -> list[Repetition]:
    """Those of a model's ``blocks`` that are long enough to leave some out; none where there is no telling.

    Args:
        seen: that turns do the same has been seen: one less is simulated.
    """
    n_first = _FIRST - seen
    blocks = getattr(part, "blocks", None)
    if not isinstance(blocks, nn.ModuleDict):
        return []
    names, found, first = list(blocks), [], 0
    kinds = _kinds(part)
    while first < len(names):
        turns, period = max((_turns(kinds, first, period), period) for period in _periods(len(names) - first))
        is_long = turns > _FIRST + _LAST
        if is_long:
            each = [names[first + turn * period : first + (turn + 1) * period] for turn in range(turns)]
            last = turns - _LAST
            found.append(Repetition(part, [*each[:n_first], *each[last:]], each[n_first:last]))
        first += turns * period if is_long else 1
    return found


def _kinds(part: Any) -> list[int]:
    """A number for each block, equal for blocks that are alike."""
    of_model = by_block(part)
    known: list[tuple[str, Any]] = []
    kinds = []
    for name, block in part.blocks.items():
        held = block, [value[name] for value in of_model]
        latest = reversed([*enumerate(known)])  # the first block is often the only one of its kind
        same = (i for i, (other, of_it) in latest if alike(held, of_it, ([f"blocks.{name}"], [f"blocks.{other}"])))
        kind = len(known) if len(known) > _LONGEST else next(same, len(known))
        if kind == len(known):
            known.append((name, held))
        kinds.append(kind)
    return kinds


def _periods(length: int) -> range:
    return range(min(_LONGEST, length), 0, -1)


def _turns(kinds: Sequence[int], first: int, period: int) -> int:
    end = first + period
    while end < len(kinds) and kinds[end] == kinds[end - period]:
        end += 1
    return (end - first) // period


@contextmanager
def shortened(found: Sequence[Repetition], log: list[Any]) -> Iterator[None]:
    """Models are without the blocks that are left out, and the ones that are kept leave marks in ``log``."""
    whole = [(part, dict(part.blocks)) for part in {id(one.part): one.part for one in found}.values()]
    with ExitStack() as stack:
        for number, one in enumerate(found):
            for name in (name for turn in one.left_out for name in turn):
                del one.part.blocks[name]
            for turn, (first, *_) in enumerate(one.kept):
                for end in _marking(one.part.blocks[first], log, number, turn):
                    stack.callback(end)
        try:
            yield
        finally:
            for part, blocks in whole:
                part.blocks.clear()
                part.blocks.update(blocks)


def _marking(block: nn.Module, log: list[Any], number: int, turn: int) -> Iterator[Callable[[], None]]:
    """Begin to mark, and give what ends it."""

    def mark(phase: str) -> None:
        log.append(_Mark(number, phase, turn))

    def leave(_: nn.Module, __: Any, output: Any) -> None:
        for one in tree_iter(output):
            if isinstance(one, torch.Tensor) and one.requires_grad:
                one.register_hook(lambda _: mark("backward"))  # type: ignore[no-untyped-call]  # torch's
                return

    yield block.register_forward_pre_hook(lambda *_: mark("forward"), prepend=True).remove
    yield block.register_forward_hook(leave).remove
    if isinstance(block, FSDPModule):
        yield _marking_reduction(block, lambda: mark("reduction"))


def _marking_reduction(block: Any, mark: Callable[[], None]) -> Callable[[], None]:
    """A pipeline's schedule has each unit reduce its gradients when all backwards are done, and so in none of them."""
    state = block._get_fsdp_state()
    group: Any = next(iter(getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]))  # torch 2.11: one
    if group is None:
        return lambda: None
    reduce = group.post_backward

    def marked(*args: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            mark()
        reduce(*args)

    group.post_backward = marked
    return lambda: delattr(group, "post_backward")


def lengthened(
    log: Sequence[Any], found: Sequence[Repetition], gradients: int, freed: Mapping[int, int] = _NONE
) -> Timeline:
    """The log of the whole model, from that of a model that was ``shortened``.

    Args:
        gradients: bytes that it is known to have made of them in the end, for a check.
        freed: places in the log where storages are freed, by the places where they have been made.

    Raises:
        NotRepeatedError: turns are unlike each other, or what they add up to cannot be.
    """
    places = [i for i, one in enumerate(log) if isinstance(one, _Mark)]
    timeline: list[Change | Work | Microbatch | Repeat] = []
    added: list[Counter[str]] = [Counter() for _ in found]
    late: dict[int, tuple[int, Repeat]] = {}
    done = 0
    while places:
        kept = len(found[log[places[0]].repetition].kept)
        own, places = places[:kept], places[kept:]
        number = _one_pass([log[i] for i in own], kept)
        turns = [list(log[start + 1 : end]) for start, end in pairwise(own[1:-1])]
        if any(turn != turns[0] for turn in turns):
            raise NotRepeatedError("blocks that are alike do not do the same")
        times = len(turns) + len(found[number].left_out)
        timeline += _as_logged(log, done, own[1], late)
        timeline.append(Repeat(turns[0], times))
        added[number].update(_net(turns[0]))
        if (frees := _freed_late(log, own, freed)) is not None:
            late[frees[0]] = frees[1], Repeat(log[frees[0] : frees[0] + frees[2]], times + 1)
            added[number].update(_net(late[frees[0]][1].changes))
        done = own[-2]
    timeline += _as_logged(log, done, len(log), late)
    _check(log, timeline, found, added, gradients)
    return timeline


def _freed_late(log: Sequence[Any], own: Sequence[int], freed: Mapping[int, int]) -> tuple[int, int, int] | None:
    """Where all turns but the first and the last free, one after the other, what each has held until all were done, and
    how much of it is one turn's. FSDP does so with what ranks sum that hold the same shards.

    Args:
        own: where turns begin.
    """
    spans = [*pairwise(own[1:])]
    held = [made - own[1] for made in range(*spans[0]) if freed.get(made, 0) > own[-1]]
    by_turn = sorted(sorted(freed.get(first + place, 0) for place in held) for first, _ in spans)
    places = [place for turn in by_turn for place in turn]
    if not held or places != [*range(places[0], places[-1] + 1)]:
        return None
    does_the_same = len({tuple(log[place] for place in turn) for turn in by_turn}) == 1
    return (places[0], places[-1] + 1, len(held)) if does_the_same else None


def _as_logged(
    log: Sequence[Any], first: int, end: int, late: Mapping[int, tuple[int, Repeat]]
) -> Iterator[Change | Work | Microbatch | Repeat]:
    """What is between two places, without marks. What the turns of a repetition free late comes as often as they do.

    Args:
        late: by where it begins, where that ends and what it is.
    """
    place = first
    while place < end:
        if place in late:
            place, repeat = late[place]
            yield repeat
            continue
        if not isinstance(log[place], _Mark):
            yield log[place]
        place += 1


def _one_pass(marks: Sequence[_Mark], kept: int) -> int:
    """The repetition of marks that stand for all turns of one, in one direction."""
    turns = [mark.turn for mark in marks]
    if len({mark[:2] for mark in marks}) > 1 or turns not in ([*range(kept)], [*range(kept)][::-1]):
        raise NotRepeatedError("blocks do not run one after the other")
    return marks[0].repetition


def _check(
    log: Sequence[Any],
    timeline: Timeline,
    found: Sequence[Repetition],
    added: Sequence[Counter[str]],
    gradients: int,
) -> None:
    """Each turn leaves behind what all of them together have left, or less: what one makes, another frees."""
    if _net(timeline)["gradients"] != gradients:
        raise NotRepeatedError("gradients are not those of all blocks")
    left = _net([one for one in log if isinstance(one, Change)])
    kept = min(len(one.kept) for one in found)
    for category in {category for one in added for category in one} - {"gradients"}:
        of_turns = [one[category] for one in added]
        if min(of_turns) < 0 or kept * sum(of_turns) > max(left[category], 0):
            raise NotRepeatedError(f"{category} of a block are not freed as they are made")


def _net(timeline: Timeline) -> Counter[str]:
    """Bytes by category that are there afterwards and were not before, by what is known of them in the end."""
    tally = Tally()
    tally.play(timeline)
    sums = Counter(tally.current)
    sums.update(tally.known)
    return sums
