"""Microbatches of a pipeline that do the same: a few are simulated, and the others leave the same trace, on this
rank and on those whose stages are like its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import attrs
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining.stage import _PipelineStageBase

from forge_core.ops.partial_gradients import PartialGradients
from forge_plugins_plan import chunks
from forge_plugins_plan.memory import MemoryLedger, StandIn, Storage
from forge_plugins_plan.repeated import NotRepeatedError
from forge_plugins_plan.work import Work

_FIRST = 3
"""So many of the first microbatches are simulated, and the last one. The third and the last must do the same: the first
makes gradients, and FSDP makes room to add to them with the second."""

_FORWARD, _BACKWARD = "forward_one_chunk", "backward_one_chunk"
_SUM = (0, "sum", 0)
"""The key of what follows on all actions: gradients that ranks have parts of are summed."""
_RECEIVED = {_FORWARD: "args_recv_info", _BACKWARD: "grad_recv_info"}
"""The attribute of a stage for what it receives, by action."""

_SCHEDULES = logging.getLogger("torch.distributed.pipelining.schedules")

_Key = tuple[int, str, int]
"""An action: the place of its stage among those of the rank, its name, and the number of the microbatch."""


@attrs.define(kw_only=True)
class _Trace:
    """What an action has done."""

    after: str
    """The action of this stage before it."""
    notes: Sequence[Any] = ()
    """In the ledger. A number stands for the first read of what the stage has received for the microbatch."""
    left: Sequence[StandIn | None] = ()
    """The tensors that it gives to other stages."""
    held: Sequence[bool] = ()
    """Of a forward: which of them are still there after the stage has dropped them, as they had been sent."""
    freed: Sequence[int | None] = ()
    """Of a backward: which of the notes say that what the schedule may hold is freed, if it does not hold it."""


@attrs.frozen
class Traces:
    """All that a rank's stages have done in a step."""

    by_action: Mapping[_Key, _Trace]
    fake: FakeTensorMode
    """The mode in which the tensors were made that they hold."""


@contextmanager
def replayed(ledger: MemoryLedger, n_microbatches: int, like: Traces | None = None) -> Iterator[Replay | None]:
    """Stages compute some of the microbatches that torch's schedules give them. Of the others, they repeat in the
    ledger what these have done, and leave tensors of the same form to be sent.

    Args:
        like: of a rank whose stage is like this one's; nothing is computed then.

    Raises:
        NotRepeatedError: within the context or at its end: microbatches do not do the same, or what they do hangs on
            what has been done before them; or a backward is split: what its first half keeps is freed by the second
            one, at another time for each microbatch.
    """
    if n_microbatches <= _FIRST + 1:
        yield None
        return
    replay = (
        Replay(ledger, {*range(_FIRST), n_microbatches - 1})
        if like is None
        else Replay(ledger, set(), {**like.by_action})
    )
    with ExitStack() as stack:
        stack.callback(setattr, _SCHEDULES, "disabled", _SCHEDULES.disabled)
        _SCHEDULES.disabled = True  # it prints the whole schedule where an action raises
        for name in (_FORWARD, _BACKWARD, *chunks.REDUCTIONS):
            method = getattr(_PipelineStageBase, name)
            setattr(_PipelineStageBase, name, replay.in_place_of(method, name))
            stack.callback(setattr, _PipelineStageBase, name, method)
        if hasattr(_PipelineStageBase, chunks.RELEASE):
            method = getattr(_PipelineStageBase, chunks.RELEASE)
            setattr(_PipelineStageBase, chunks.RELEASE, replay.in_place_of_release(method))
            stack.callback(setattr, _PipelineStageBase, chunks.RELEASE, method)
        stack.callback(setattr, PartialGradients, "sum", PartialGradients.sum)
        PartialGradients.sum = replay.in_place_of_sum(PartialGradients.sum)  # type: ignore[method-assign, assignment]
        yield replay
    replay.check()


@attrs.define
class _Place:
    """Where a simulated action is in the log."""

    start: int
    end: int
    received: Mapping[Work, int]


@attrs.frozen
class Replay:
    """In place of some of the actions of a rank's stages."""

    ledger: MemoryLedger
    simulated: set[int]
    """The numbers of microbatches."""
    traces: dict[_Key, _Trace] = attrs.field(factory=dict)
    _further: set[tuple[int, int]] = attrs.field(factory=set)
    """Further ones of a stage."""
    _places: dict[_Key, _Place] = attrs.field(factory=dict)
    _before: dict[int, str] = attrs.field(factory=dict)
    """The latest action of each stage."""
    _between: dict[tuple[int, int], list[Storage]] = attrs.field(factory=dict)
    """What a stage has received and given in the forward of a microbatch, until its backward."""
    _repeated: set[tuple[int, str, str]] = attrs.field(factory=set)
    """Stages and actions that have been repeated, with the action before."""

    def in_place_of(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        """A method of a stage, which takes the number of a microbatch, or is called once."""

        def run(stage: Any, *args: Any, **options: Any) -> Any:
            if not options.get("full_backward", True):
                raise NotRepeatedError("a backward is split")
            key = stage.stage_index // stage.group_size, name, 0 if name in chunks.REDUCTIONS else args[0]
            after = self._before.get(key[0], "")
            self._before[key[0]] = name
            if name == _FORWARD and self._is_new(stage, key, after):
                self._further.add((key[0], key[2]))
            if key[2] in self.simulated or (key[0], key[2]) in self._further:
                return self._note(stage, key, after, partial(method, stage, *args, **options))
            trace = self._trace(key, after)
            notes = self._notes(stage, key, trace)
            if name == _BACKWARD:
                notes = _without(notes, self._backward(stage, key, trace))
            self.ledger.log.extend(notes)
            return self._forward(stage, key) if name == _FORWARD else None

        return run

    def in_place_of_release(self, method: Callable[[Any, int], None]) -> Callable[[Any, int], None]:
        """A method of a stage, which drops what has been sent."""

        def run(stage: Any, microbatch: int) -> None:
            key = stage.stage_index // stage.group_size, _FORWARD, microbatch
            trace = self._like(key)
            if microbatch in self.simulated or key[::2] in self._further:
                method(stage, microbatch)
                trace.held = [one is not None and one.entry.freed is None for one in trace.left]
            else:
                chunks.hold(stage, microbatch, trace.held)
                method(stage, microbatch)

        return run

    def in_place_of_sum(self, method: Callable[[PartialGradients], None]) -> Callable[[PartialGradients], None]:
        """A method that is called once, after all actions."""

        def run(partial: PartialGradients) -> None:
            if not self.simulated:
                self.ledger.log.extend(self.traces[_SUM].notes)
                return
            start = len(self.ledger.log)
            method(partial)
            self._places[_SUM] = _Place(start, len(self.ledger.log), {})
            self.traces[_SUM] = _Trace(after="")

        return run

    def _is_new(self, stage: Any, key: _Key, after: str) -> bool:
        """Return whether a rank with several stages has to simulate one microbatch more: the first whose forward comes
        after a backward, or after a forward. With one stage, the last one shows that."""
        if stage.num_stages == stage.group_size or key[2] < _FIRST:
            return False
        return (*key[:2], after) not in self._seen()

    def _seen(self) -> set[tuple[int, str, str]]:
        """Actions that have been simulated and are as those of other microbatches, with the action before."""
        return {(*key[:2], trace.after) for key, trace in self.traces.items() if key[2] >= _FIRST - 1}

    def check(self) -> None:
        """
        Raises:
            NotRepeatedError: actions have been repeated after such as they were not simulated after.
        """
        if not self._repeated <= self._seen():
            raise NotRepeatedError("the order of forwards and backwards is another one")

    def finished(self, fake: FakeTensorMode) -> Traces:
        """All that has been done, once the log says what it was for."""
        by_action = {
            key: attrs.evolve(trace, notes=_numbered(self.ledger.log, self._places[key]))
            for key, trace in self.traces.items()
        }
        return Traces(by_action, fake)

    def _note(self, stage: Any, key: _Key, after: str, run: Callable[[], Any]) -> Any:
        _, name, microbatch = key
        start = len(self.ledger.log)
        received = {work: number for number, work in enumerate(self._unread(stage, name, microbatch))}
        storages = self._storages(stage, key)
        result = run()
        place = self._places[key] = _Place(start, len(self.ledger.log), received)
        trace = self.traces[key] = _Trace(after=after)
        if name in chunks.REDUCTIONS:
            return result
        trace.notes = _numbered(self.ledger.log, place)
        if name == _FORWARD:
            left = [self.ledger.stand_in(one) for one in chunks.outputs(stage, microbatch)]
            trace.left = left
            self._between[key[::2]] = [*storages, *(one.entry for one in left)]
        else:
            given = stage.bwd_cache[microbatch]
            trace.left = [None if one is None else self.ledger.stand_in(one) for one in given]
            freed = [-1 if one.freed is None else one.freed - start for one in storages]
            trace.freed = [place if place >= 0 else None for place in freed]
        if microbatch >= _FIRST and not self._is_as_before(key, trace):
            raise NotRepeatedError("microbatches do not do the same")
        return result

    def _is_as_before(self, key: _Key, trace: _Trace) -> bool:
        """Return whether it has done what this action did with the microbatch that others repeat. Some schedules hold
        on to what the last forward has given or received, which then is not freed by its backward."""
        like = self.traces[*key[:2], _FIRST - 1]
        both = [*zip(trace.freed, like.freed, strict=True)]
        if any(now is not None and before is None for now, before in both):
            return False
        return [*trace.notes] == _without(like.notes, {before for now, before in both if now is None})

    def _trace(self, key: _Key, after: str) -> _Trace:
        """
        Raises:
            NotRepeatedError: one of the first microbatches did it after something else, or there is none yet.
        """
        trace = self.traces.get(key) or self.traces.get((*key[:2], _FIRST - 1))
        if trace is None:
            raise NotRepeatedError("microbatches do not come in order")
        if key[1] not in chunks.REDUCTIONS and key[2] >= _FIRST - 1:
            self._repeated.add((key[0], key[1], after))
        elif trace.after != after:
            raise NotRepeatedError("the order of forwards and backwards is another one")
        return trace

    def _notes(self, stage: Any, key: _Key, trace: _Trace) -> Sequence[Any]:
        if self.ledger.recorder is None:
            return trace.notes
        received = self._unread(stage, *key[1:])
        self.ledger.recorder.read(received[one] for one in trace.notes if isinstance(one, int))
        return [received[one] if isinstance(one, int) else one for one in trace.notes]

    def _unread(self, stage: Any, name: str, microbatch: int) -> list[Work]:
        """Reads of what is received for a microbatch, in the order in which the stage keeps it."""
        if self.ledger.recorder is None:
            return []
        return self.ledger.recorder.unread(_buffers(stage, name, microbatch))

    def _storages(self, stage: Any, key: _Key) -> list[Storage]:
        """What a schedule may hold on to of an action and, if that is a backward, of its forward."""
        received = self.ledger.storages(_buffers(stage, *key[1:]))
        return [*self._between.pop(key[::2], ()), *received] if key[1] == _BACKWARD else received

    def _forward(self, stage: Any, key: _Key) -> Any:
        received = self._storages(stage, key)
        outputs = tuple(self.ledger.again(one) for one in self._like(key).left if one is not None)
        self._between[key[::2]] = [*received, *self.ledger.storages(outputs)]
        chunks.keep(stage, key[2], outputs, _received(stage, *key[1:]))
        return outputs if len(outputs) > 1 else outputs[0]

    def _like(self, key: _Key) -> _Trace:
        return self.traces.get(key) or self.traces[*key[:2], _FIRST - 1]

    def _backward(self, stage: Any, key: _Key, trace: _Trace) -> set[int | None]:
        """Return the places of notes that something is freed which has been before, or which the schedule holds."""
        storages = self._storages(stage, key)
        live = [one.freed is None for one in storages]
        with self.ledger.unnoted(storages):
            chunks.drop(stage, key[2], _received(stage, *key[1:]))
        others = set()
        for one, was_live, place in zip(storages, live, trace.freed, strict=True):
            if not was_live or one.freed is None:
                others.add(place)
            elif place is None and one.size > 0:
                raise NotRepeatedError("what is sent or received is not freed as it was")
        stage.bwd_cache[key[2]] = tuple(None if one is None else self.ledger.again(one) for one in trace.left)
        return others


def _received(stage: Any, name: str, microbatch: int) -> Sequence[Any]:
    """Where a stage keeps what it receives for an action."""
    return getattr(stage, _RECEIVED[name]).get(microbatch, ()) if name in _RECEIVED else ()


def _buffers(stage: Any, name: str, microbatch: int) -> list[torch.Tensor]:
    buffers = [getattr(one, "buffer", None) for one in _received(stage, name, microbatch)]
    return [one for one in buffers if isinstance(one, torch.Tensor)]


def _without(notes: Sequence[Any], places: Collection[int | None]) -> list[Any]:
    return [one for place, one in enumerate(notes) if place not in places]


def _numbered(log: Sequence[Any], place: _Place) -> list[Any]:
    """The notes of an action, with numbers for what has been received."""
    notes = log[place.start : place.end]
    return (
        [place.received.get(one, one) if isinstance(one, Work) else one for one in notes]
        if place.received
        else [*notes]
    )
