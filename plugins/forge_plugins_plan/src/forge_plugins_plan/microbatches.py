"""Microbatches of a pipeline that do the same: a few are simulated, and the others leave the same trace, on this
rank and on those whose stages are like its own."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import attrs
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining.stage import _PipelineStageBase

from forge_core.ops.partial_gradients import PartialGradients
from forge_plugins_plan.memory import MemoryLedger, StandIn
from forge_plugins_plan.repeated import NotRepeatedError
from forge_plugins_plan.timeline import Change
from forge_plugins_plan.work import Work

_FIRST = 3
"""So many of the first microbatches are simulated, and the last one. The third and the last must do the same: the first
makes gradients, and FSDP makes room to add to them with the second."""

_FORWARD, _BACKWARD, _REDUCE = "forward_one_chunk", "backward_one_chunk", "perform_reduce_grad"
_SUM = (0, "sum", 0)
"""The key of what follows on all actions: gradients that ranks have parts of are summed."""
_RECEIVED = {_FORWARD: "args_recv_info", _BACKWARD: "grad_recv_info"}
"""Where a stage keeps what it receives for an action."""

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
    keeps: Sequence[bool] = ()
    """Of a backward: whether what forward gave to other stages is still there after it."""


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
        for name in (_FORWARD, _BACKWARD, _REDUCE):
            method = getattr(_PipelineStageBase, name)
            setattr(_PipelineStageBase, name, replay.in_place_of(method, name))
            stack.callback(setattr, _PipelineStageBase, name, method)
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
    _repeated: set[tuple[int, str, str]] = attrs.field(factory=set)
    """Stages and actions that have been repeated, with the action before."""

    def in_place_of(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        """A method of a stage, which takes the number of a microbatch, or is called once."""

        def run(stage: Any, given: int, *args: Any, **options: Any) -> Any:
            if not options.get("full_backward", True):
                raise NotRepeatedError("a backward is split")
            key = stage.stage_index // stage.group_size, name, 0 if name == _REDUCE else given
            after = self._before.get(key[0], "")
            self._before[key[0]] = name
            if name == _FORWARD and self._is_new(stage, key, after):
                self._further.add((key[0], given))
            if key[2] in self.simulated or (key[0], key[2]) in self._further:
                return self._note(stage, key, after, partial(method, stage, given, *args, **options))
            trace = self._trace(key, after)
            self.ledger.log.extend(self._notes(stage, key, trace))
            if name == _FORWARD:
                return self._forward(stage, key)
            if name == _BACKWARD:
                self._backward(stage, key, trace)
            return None

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
        result = run()
        place = self._places[key] = _Place(start, len(self.ledger.log), received)
        trace = self.traces[key] = _Trace(after=after)
        if name == _REDUCE:
            return result
        trace.notes = _numbered(self.ledger.log, place)
        if name == _FORWARD:
            trace.left = [self.ledger.stand_in(one) for one in stage.fwd_cache[microbatch][0]]
        else:
            given = stage.bwd_cache[microbatch]
            trace.left = [None if one is None else self.ledger.stand_in(one) for one in given]
            trace.keeps = [one is not None and one.is_live for one in self.traces[key[0], _FORWARD, microbatch].left]
        if microbatch >= _FIRST and not self._is_as_before(key, trace):
            raise NotRepeatedError("microbatches do not do the same")
        return result

    def _is_as_before(self, key: _Key, trace: _Trace) -> bool:
        """Return whether it has done what this action did with the microbatch that others repeat. Some schedules hold
        on to what the last forward has given, which then is not freed by its backward."""
        like = self.traces[*key[:2], _FIRST - 1]
        given = self.traces[key[0], _FORWARD, key[2]].left
        kept = [
            Change(one.category, one.size, one.category, 0)
            for one, now, before in zip(given, trace.keeps, like.keeps, strict=False)
            if one is not None and now and not before
        ]
        notes = iter(trace.notes)
        latest = next(notes, None)
        for one in like.notes:
            if one == latest:
                latest = next(notes, None)
            elif one in kept:
                kept.remove(one)
            else:
                return False
        return latest is None and not kept

    def _trace(self, key: _Key, after: str) -> _Trace:
        """
        Raises:
            NotRepeatedError: one of the first microbatches did it after something else, or there is none yet.
        """
        trace = self.traces.get(key) or self.traces.get((*key[:2], _FIRST - 1))
        if trace is None:
            raise NotRepeatedError("microbatches do not come in order")
        if key[1] != _REDUCE and key[2] >= _FIRST - 1:
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
        if self.ledger.recorder is None or name == _REDUCE:
            return []
        kept = getattr(stage, _RECEIVED[name]).get(microbatch, ())
        buffers = [getattr(one, "buffer", None) for one in kept]
        return self.ledger.recorder.unread(one for one in buffers if isinstance(one, torch.Tensor))

    def _forward(self, stage: Any, key: _Key) -> Any:
        """What is given to the next stage is freed by the backward of the microbatch, whose notes say so, or later."""
        left = self._left(key)
        outputs = tuple(self.ledger.unseen(one) for one in left if one is not None)
        stage.fwd_cache[key[2]] = outputs, []
        return outputs if len(outputs) > 1 else outputs[0]

    def _left(self, key: _Key) -> Sequence[StandIn | None]:
        return (self.traces.get(key) or self.traces[*key[:2], _FIRST - 1]).left

    def _backward(self, stage: Any, key: _Key, trace: _Trace) -> None:
        given = [one for one in self._left((key[0], _FORWARD, key[2])) if one is not None]
        made = [weakref.ref(one.untyped_storage()) for one in stage.fwd_cache.pop(key[2])[0]]
        for storage, one, keeps in zip((one() for one in made), given, trace.keeps, strict=True):
            if (storage is not None) is not keeps:  # by the schedule
                raise NotRepeatedError("what is sent is not freed as it was")
            if storage is not None:
                self.ledger.adopt_storage(storage, one.category)
        stage.bwd_cache[key[2]] = tuple(None if one is None else self._adopted(one) for one in trace.left)

    def _adopted(self, one: StandIn) -> torch.Tensor:
        made = self.ledger.unseen(one)
        self.ledger.adopt(made, one.category)
        return made


def _numbered(log: Sequence[Any], place: _Place) -> list[Any]:
    """The notes of an action, with numbers for what has been received."""
    notes = log[place.start : place.end]
    return (
        [place.received.get(one, one) if isinstance(one, Work) else one for one in notes]
        if place.received
        else [*notes]
    )
