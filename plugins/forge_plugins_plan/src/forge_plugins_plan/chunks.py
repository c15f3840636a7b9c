"""What torch's stages keep of a microbatch, which torch calls a chunk, from its forward to its backward.

Up to torch 2.14 outputs and inputs are in ``fwd_cache`` until the backward, buffers for what is received stay, and a
stage reduces its gradients in one action. torch 2.15 drops an output once it has been sent, gives what is received away
with the inputs, and reduces in two actions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.pipelining.stage import _PipelineStageBase

RELEASE = "release_fwd_send_outputs"
"""The method of a stage that drops what has been sent, in torch 2.15."""
_RELEASES = hasattr(_PipelineStageBase, RELEASE)
REDUCTIONS: Sequence[str] = (
    ("start_gradient_reduction", "wait_for_gradient_reduction") if _RELEASES else ("perform_reduce_grad",)
)


def keep(stage: Any, microbatch: int, outputs: tuple[torch.Tensor, ...], received: Iterable[Any]) -> None:
    """Leave what a forward leaves that has been given what is ``received``."""
    if _RELEASES:
        stage._forward_chunk_states[microbatch] = stage._make_forward_chunk_state(outputs, _taken(received))
    else:
        stage.fwd_cache[microbatch] = outputs, []


def outputs(stage: Any, microbatch: int) -> Sequence[torch.Tensor]:
    """Return what the forward that has just been run has given."""
    given: Sequence[torch.Tensor] = (
        stage._forward_chunk_states[microbatch].live_outputs if _RELEASES else stage.fwd_cache[microbatch][0]
    )
    return given


def hold(stage: Any, microbatch: int, held: Iterable[bool]) -> None:
    """Have outputs that autograd would hold last until the backward, before the stage drops what has been sent."""
    state = stage._forward_chunk_states.get(microbatch)
    if state is not None:
        state.input_values += [one for one, lasts in zip(state.live_outputs, held, strict=True) if lasts]


def drop(stage: Any, microbatch: int, received: Iterable[Any]) -> None:
    """Drop what a backward drops that has been given what is ``received``."""
    if _RELEASES:
        _taken(received)
        del stage._forward_chunk_states[microbatch]
    else:
        del stage.fwd_cache[microbatch]


def releasable(method: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """As torch 2.15 does with tensors, and would not with fake ones."""
    real = torch.empty(0)
    return lambda stage, output: method(stage, real if isinstance(output, FakeTensor) else output)


def _taken(received: Iterable[Any]) -> list[torch.Tensor]:
    return [one.take_buffer() for one in received if getattr(one, "buffer", None) is not None]
