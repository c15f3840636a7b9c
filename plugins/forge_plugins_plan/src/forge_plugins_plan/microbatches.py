"""Microbatches of a pipeline that do the same: a few are simulated, and the others leave the same trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import attrs
import torch
from torch.distributed.pipelining.stage import _PipelineStageBase

from forge_plugins_plan.memory import MemoryLedger, StandIn
from forge_plugins_plan.repeated import NotRepeatedError
from forge_plugins_plan.work import Work

_FIRST = 4
"""So many of the first microbatches are simulated, and the last one. The third and the fourth must do the same: the
first makes gradients, FSDP makes room to add to them with the second, and the last may reduce them."""


@contextmanager
def replayed(ledger: MemoryLedger, n_microbatches: int) -> Iterator[None]:
    """Stages compute some of the microbatches that torch's schedules give them. Of the others, they repeat in the
    ledger what these have done, and leave tensors of the same form to be sent.

    Raises:
        NotRepeatedError: within the context, microbatches do not do the same, or a backward is split: what its first
            half keeps is freed by the second one, at another time for each microbatch.
    """
    if n_microbatches <= _FIRST + 1:
        yield
        return
    replay = _Replay(ledger, {*range(_FIRST), n_microbatches - 1})
    with ExitStack() as stack:
        for name in ("forward_one_chunk", "backward_one_chunk"):
            method = getattr(_PipelineStageBase, name)
            setattr(_PipelineStageBase, name, replay.in_place_of(method, name))
            stack.callback(setattr, _PipelineStageBase, name, method)
        yield


_RECEIVED = {"forward_one_chunk": "args_recv_info", "backward_one_chunk": "grad_recv_info"}
"""Where a stage keeps what it receives for an action."""


@attrs.define
class _Trace:
    """What an action of a stage has done, of the latest microbatch that was simulated before the others."""

    notes: Sequence[Any] = ()
    """In the ledger. A number stands for the first read of what the stage has received for the microbatch."""
    left: Sequence[StandIn | None] = ()
    """The tensors that it gives to other stages."""


@attrs.frozen
class _Replay:
    ledger: MemoryLedger
    simulated: set[int]
    """The numbers of microbatches."""
    traces: dict[tuple[int, str], _Trace] = attrs.field(factory=dict)
    """By stage and action."""

    def in_place_of(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        """A method of a stage, which takes the number of a microbatch."""

        def run(stage: Any, microbatch: int, *args: Any, **options: Any) -> Any:
            if not options.get("full_backward", True):
                raise NotRepeatedError("a backward is split")
            if microbatch in self.simulated:
                return self._note(stage, name, microbatch, partial(method, stage, microbatch, *args, **options))
            self.ledger.log.extend(self._notes(stage, name, microbatch))
            if name == "forward_one_chunk":
                return self._forward(stage, microbatch)
            self._backward(stage, microbatch)
            return None

        return run

    def _note(self, stage: Any, name: str, microbatch: int, run: Callable[[], Any]) -> Any:
        start = len(self.ledger.log)
        received = {work: number for number, work in enumerate(self._unread(stage, name, microbatch))}
        result = run()
        if microbatch < _FIRST:
            trace = self.traces.setdefault((stage.stage_index, name), _Trace())
            notes = [received.get(one, one) if isinstance(one, Work) else one for one in self.ledger.log[start:]]
            if microbatch == _FIRST - 1 and notes != trace.notes:
                raise NotRepeatedError("microbatches do not do the same")
            trace.notes = notes
            if name == "forward_one_chunk":
                trace.left = [self.ledger.stand_in(one) for one in stage.fwd_cache[microbatch][0]]
            else:
                given = stage.bwd_cache[microbatch]
                trace.left = [None if one is None else self.ledger.stand_in(one) for one in given]
        return result

    def _notes(self, stage: Any, name: str, microbatch: int) -> list[Any]:
        notes = self.traces[stage.stage_index, name].notes
        if self.ledger.recorder is None:
            return [*notes]
        received = self._unread(stage, name, microbatch)
        self.ledger.recorder.read(received[one] for one in notes if isinstance(one, int))
        return [received[one] if isinstance(one, int) else one for one in notes]

    def _unread(self, stage: Any, name: str, microbatch: int) -> list[Work]:
        """What is received for a microbatch, in the order in which the stage keeps it."""
        if self.ledger.recorder is None:
            return []
        kept = getattr(stage, _RECEIVED[name]).get(microbatch, ())
        buffers = [getattr(one, "buffer", None) for one in kept]
        return self.ledger.recorder.unread(one for one in buffers if isinstance(one, torch.Tensor))

    def _forward(self, stage: Any, microbatch: int) -> Any:
        """What is given to the next stage is freed by the backward of the microbatch, whose notes say so, or later."""
        left = self.traces[stage.stage_index, "forward_one_chunk"].left
        outputs = tuple(self.ledger.unseen(one) for one in left if one is not None)
        stage.fwd_cache[microbatch] = outputs, []
        return outputs if len(outputs) > 1 else outputs[0]

    def _backward(self, stage: Any, microbatch: int) -> None:
        outputs, _ = stage.fwd_cache.pop(microbatch)
        for one, of_it in zip(outputs, self.traces[stage.stage_index, "forward_one_chunk"].left, strict=True):
            if of_it is not None and of_it.is_live:
                self.ledger.adopt(one, of_it.category)
        stage.bwd_cache[microbatch] = tuple(
            None if one is None else self._adopted(one)
            for one in self.traces[stage.stage_index, "backward_one_chunk"].left
        )

    def _adopted(self, one: StandIn) -> torch.Tensor:
        made = self.ledger.unseen(one)
        self.ledger.adopt(made, one.category)
        return made
