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
from forge_plugins_plan.timeline import Change, Repeat, Timeline, left_by
from forge_plugins_plan.work import Microbatch, Work

_KEPT = 4
"""Turns that are simulated; one less of ``_LONG`` ones. What blocks do hangs on those around them, and on what they
share, so that the first turn and the last but one may differ from those between them."""
_LONG = 3
"""Blocks of a turn."""
_LEAST = 5
"""Turns of which some are left out."""
_LONGEST = 8
"""Blocks of different kinds that may take turns."""
_NONE: Mapping[int, int] = MappingProxyType({})


class NotRepeatedError(Exception):
    """What is left out does not follow from what has been simulated."""


class TooFewTurnsError(NotRepeatedError):
    """It may follow if one turn more is simulated."""


class _Pass(NamedTuple):
    """What has been seen where all turns of a repetition came one after the other, in one direction."""

    first: bool
    """The first does what those in the middle do."""
    last: bool
    """The last but one does."""
    late: bool
    """What they hold is freed after the last."""


@attrs.frozen(eq=False)
class Repetition:
    """A stretch of a model in which blocks are alike, or blocks of different kinds take turns evenly."""

    within: str
    """The name of the module whose children the blocks are."""
    module: Any
    """That one."""
    kept: Sequence[Sequence[str]]
    """The names of the blocks that are simulated, by turn."""
    left_out: Sequence[Sequence[str]]
    """The names of the others, by turn."""
    like: Sequence[_Pass] | None = None
    """What has been seen of it in a job that differs in what is recomputed."""
    passes: list[_Pass] = attrs.field(factory=list)
    """What has been seen of it in this one."""

    @property
    def turns(self) -> int:
        """Their number."""
        return len(self.kept) + len(self.left_out)

    @property
    def to_spare(self) -> int:
        """Turns that need not be simulated again in another job."""
        return 0 if any(one.late for one in self.passes) else 1

    def seen_of(self, number: int) -> _Pass | None:
        """What has been seen of a pass in the other job, nothing without one."""
        if self.like is not None and number >= len(self.like):
            raise TooFewTurnsError("there are more passes than where less is recomputed")
        return None if self.like is None else self.like[number]

    def stand_ins(self) -> Iterator[tuple[nn.Module, nn.Module]]:
        """Each block that is left out, with one that is simulated."""
        for turn in self.left_out:
            for name, other in zip(turn, self.kept[0], strict=True):
                yield self.module.get_submodule(name), self.module.get_submodule(other)


class _Mark(NamedTuple):
    """In a log: here a turn of a repetition begins."""

    repetition: int
    phase: str
    turn: int


def repetitions(part: Any, *, more: int = 0, seen: Sequence[Repetition] = ()) -> list[Repetition]:
    """Those of a model's ``blocks``, and of its further units, that are long enough to leave some out; none where there
    is no telling.

    Args:
        more: turns that are simulated beyond the usual number.
        seen: of a job that differs in what is recomputed, or in its sequences. Fewer turns are simulated of a
            repetition that is there.
    """
    found = []
    for within, module in _sequences(part).items():
        names, first = [name for name, _ in module.named_children()], 0
        kinds = _kinds(part, within, module)
        while first < len(names):
            turns, period = max((_turns(kinds, first, period), period) for period in _periods(len(names) - first))
            if turns >= _LEAST:
                each = [names[first + turn * period : first + (turn + 1) * period] for turn in range(turns)]
                found.append(_shortened(within, module, each, more, seen))
            first += turns * period if turns >= _LEAST else 1
    return found


def _sequences(part: Any) -> dict[str, nn.Module]:
    """Modules whose children run one after the other, by their names (``TowerModel.units``)."""
    blocks = getattr(part, "blocks", None)
    if not isinstance(blocks, nn.ModuleDict):
        return {}
    units = [*(part.units() if hasattr(part, "units") else ())]
    names = dict.fromkeys(name.rpartition(".")[0] for name in units)
    others = {name: part.get_submodule(name) for name in names}
    return {"blocks": blocks} | {
        name: module
        for name, module in others.items()
        if isinstance(module, nn.ModuleList) and {f"{name}.{child}" for child, _ in module.named_children()} <= {*units}
    }


def _shortened(
    within: str, module: nn.Module, turns: Sequence[Sequence[str]], more: int, seen: Sequence[Repetition]
) -> Repetition:
    known = next((one for one in seen if (one.within, one.kept[0], one.turns) == (within, turns[0], len(turns))), None)
    usual = _KEPT - (len(turns[0]) >= _LONG)
    if within != "blocks":
        usual += 1  # on either side of an encoder's layers are other modules
    kept = min(usual + more, len(turns)) if known is None else len(known.kept) - known.to_spare
    last = len(turns) - max(1, kept // 2)
    first = kept - len(turns) + last
    like = None if known is None else known.passes
    return Repetition(within, module, [*turns[:first], *turns[last:]], turns[first:last], like)


def _kinds(part: Any, within: str, module: nn.Module) -> list[int]:
    """A number for each block, equal for blocks that are alike."""
    of_model = by_block(part) if within == "blocks" else []
    known: list[tuple[str, Any]] = []
    kinds = []
    for name, block in module.named_children():
        held = block, [value[name] for value in of_model]
        latest = reversed([*enumerate(known)])  # the first block is often the only one of its kind
        same = (i for i, (other, of_it) in latest if alike(held, of_it, ([f"{within}.{name}"], [f"{within}.{other}"])))
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
    whole = [
        (module, dict(module.named_children())) for module in {id(one.module): one.module for one in found}.values()
    ]
    with ExitStack() as stack:
        for number, one in enumerate(found):
            for name in (name for turn in one.left_out for name in turn):
                delattr(one.module, name)
            for turn, names in enumerate(one.kept):
                first, last = (one.module.get_submodule(name) for name in (names[0], names[-1]))
                for end in _marking(first, last, log, number, turn):
                    stack.callback(end)
        try:
            yield
        finally:
            for module, blocks in whole:
                for name, _ in [*module.named_children()]:
                    delattr(module, name)
                for name, block in blocks.items():
                    module.add_module(name, block)


def _marking(first: nn.Module, last: nn.Module, log: list[Any], number: int, turn: int) -> Iterator[Callable[[], None]]:
    """Begin to mark, and give what ends it. A backward begins with the last block of a turn."""

    def mark(phase: str) -> None:
        log.append(_Mark(number, phase, turn))

    def leave(_: nn.Module, __: Any, output: Any) -> None:
        for one in tree_iter(output):
            if isinstance(one, torch.Tensor) and one.requires_grad:
                one.register_hook(lambda _: mark("backward"))  # type: ignore[no-untyped-call]  # torch's
                return

    yield first.register_forward_pre_hook(lambda *_: mark("forward"), prepend=True).remove
    yield last.register_forward_hook(leave).remove
    if isinstance(first, FSDPModule):
        yield _marking_reduction(first, lambda: mark("reduction"))


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
        TooFewTurnsError: there is no telling what those in the middle do.
    """
    places = [i for i, one in enumerate(log) if isinstance(one, _Mark)]
    timeline: list[Change | Work | Microbatch | Repeat] = []
    added: list[Counter[str]] = [Counter() for _ in found]
    late: dict[int, tuple[int, Repeat]] = {}
    done = 0
    while places:
        one = found[log[places[0]].repetition]
        own, places = places[: len(one.kept)], places[len(one.kept) :]
        number = _one_pass([log[i] for i in own], len(one.kept))
        turns = [list(log[start + 1 : end]) for start, end in pairwise(own)]
        middle = _middle(turns, one.seen_of(len(one.passes)))
        timeline += _as_logged(log, done, own[1], late)
        timeline.append(Repeat(middle, one.turns - 3))
        added[number].update(left_by(middle))
        if (frees := _freed_late(log, own, freed)) is not None:
            late[frees.place] = (
                frees.end,
                Repeat(log[frees.place : frees.place + frees.of_turn], one.turns - frees.others),
            )
            added[number].update(left_by(late[frees.place][1].changes))
        one.passes.append(_Pass(turns[0] == middle, turns[-1] == middle, frees is not None))
        done = own[-2]
    timeline += _as_logged(log, done, len(log), late)
    _check(log, timeline, found, added, gradients)
    return timeline


def _middle(turns: Sequence[Sequence[Any]], like: _Pass | None) -> Sequence[Any]:
    """What a turn does that is neither the first nor one of the last two.

    Args:
        turns: what all but the last have done.
        like: seen of a job that differs in what is recomputed.
    """
    inner = turns[1:-1] or turns[:1]
    if any(turn != inner[0] for turn in inner):
        raise NotRepeatedError("blocks that are alike do not do the same")
    if like is None:
        if turns.count(inner[0]) == 1:
            raise TooFewTurnsError("no two turns that follow on each other do the same")
        return inner[0]
    if len(turns) > 2:
        return inner[0]
    if (turns[0] == turns[-1]) != (like.first and like.last):
        raise TooFewTurnsError("turns differ where they did not, if less is recomputed, or the other way round")
    return turns[-1] if like.last else turns[0]


class _FreedLate(NamedTuple):
    """All of one turn after all of another."""

    place: int
    """In the log, where it begins."""
    end: int
    of_turn: int
    """How much of it is one turn's."""
    others: int
    """Turns whose part is elsewhere."""


def _freed_late(log: Sequence[Any], own: Sequence[int], freed: Mapping[int, int]) -> _FreedLate | None:
    """Where turns free, one after the other, what each has held until all were done. FSDP does so with what ranks sum
    that hold the same shards. The last turn does it elsewhere, and so does the first, if there are enough to see it.

    Args:
        own: where turns begin.
    """
    spans = [*pairwise(own[1:] if len(own) > 3 else own)]
    held = [made - spans[0][0] for made in range(*spans[0]) if freed.get(made, 0) > own[-1]]
    by_turn = sorted(sorted(freed.get(first + place, 0) for place in held) for first, _ in spans)
    places = [place for turn in by_turn for place in turn]
    if not held or len(spans) == 1 or places != [*range(places[0], places[-1] + 1)]:
        return None
    does_the_same = len({tuple(log[place] for place in turn) for turn in by_turn}) == 1
    others = 2 if len(own) > 3 else 1
    return _FreedLate(places[0], places[-1] + 1, len(held), others) if does_the_same else None


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
    if left_by(timeline)["gradients"] != gradients:
        raise NotRepeatedError("gradients are not those of all blocks")
    left = left_by(log)
    kept = min(len(one.kept) for one in found)
    for category in {category for one in added for category in one} - {"gradients"}:
        of_turns = [one[category] for one in added]
        if min(of_turns) < 0 or kept * sum(of_turns) > max(left[category], 0):
            raise NotRepeatedError(f"{category} of a block are not freed as they are made")
