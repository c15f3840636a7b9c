"""A stage of a pipeline, as torch's schedules run it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from forge_core.contracts.batch import bind
from forge_core.contracts.loss import Loss
from forge_plugins_parallel.between_stages import BetweenStages, Form, along

Batch = Mapping[str, torch.Tensor]


class Stage(PipelineStage):
    """A part of the model; the last one gives the summed loss, as the model contract has it inside forward.

    Torch would have all microbatches in the shape of one. Here each is taken as it is, by its number: what a rank
    receives for it has shapes that follow from the batch, which every rank has read.
    """

    loss: Loss
    between: BetweenStages
    microbatches: Sequence[Batch] = ()
    """Of this step."""
    forms: Sequence[Mapping[str, Form]] = ()
    """Of what lies between stages, for each of them."""

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.is_first:
            self._fit(self.args_recv_info[fwd_chunk_id], fwd_chunk_id)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.is_last:
            self._fit(self.grad_recv_info[bwd_chunk_id], bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *_: Any, **options: Any) -> Any:
        inputs, self._bound_loss = bind(self.loss, self.microbatches[fwd_chunk_id])
        tokens = inputs.pop("tokens")
        self._forms = self.forms[fwd_chunk_id]
        return super().forward_one_chunk(fwd_chunk_id, (tokens,), {**inputs, **known(self.submod, tokens)}, **options)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        first, *received = args
        for one in () if self.is_first else args:
            one.register_hook(torch.Tensor.contiguous)  # only such tensors can be sent, forward and backward
        sent_along = along(self._forms, received) if received else {}
        output = self.submod(first, **kwargs, **sent_along, loss=self._bound_loss)
        if self.is_last:
            return output.total
        given = [_to_send(one, args) for one in self.between.tensors(output, self._forms)]
        return tuple(given) if len(given) > 1 else given[0]

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> None:
        """With zeros where there is no gradient: torch would send some of the shape of the first microbatch."""
        super().backward_one_chunk(bwd_chunk_id, *args, **options)
        if self.is_last:  # the schedule keeps it to the end of the step, and it would keep what its stage has received
            options["loss"].detach_()
        if not self.is_first:
            forms = list(self.forms[bwd_chunk_id].values())
            self.bwd_cache[bwd_chunk_id] = tuple(
                torch.zeros(form.shape, dtype=form.dtype, device=self.device) if gradient is None else gradient
                for form, gradient in zip(forms, self.bwd_cache[bwd_chunk_id][: len(forms)], strict=True)
            )

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Without a rank's to itself, which torch 2.11 has where stages form a V, and gloo cannot do."""
        return [one for one in super()._get_init_p2p_neighbors_ops() if one.peer != dist.get_rank()]

    def start_gradient_reduction(self) -> None:
        """torch 2.15 reduces here what it knows that backward has left. More is left where ``fsdp`` reduces with each
        microbatch, and gradients of weights come after that reduction."""
        for module in self.submod.modules():
            if isinstance(module, FSDPModule):
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    group._post_backward_pending = True  # type: ignore[attr-defined]  # since 2.15
        super().start_gradient_reduction()  # type: ignore[misc]  # only that torch has it, and calls it

    def _fit(self, received: Sequence[Any], microbatch: int) -> None:
        for one, form in zip(received, self.forms[microbatch].values(), strict=True):
            if hasattr(one, "allocate_buffer"):  # torch 2.15 does, once it receives, by what it knows of the tensor
                strides = torch.empty(form.shape, device="meta").stride()
                one.tensor_meta = dataclasses.replace(one.tensor_meta, shape=torch.Size(form.shape), stride=strides)
            elif one.buffer.shape != form.shape:
                one.buffer = one.buffer.new_empty(form.shape, requires_grad=one.buffer.requires_grad)

    def _validate_stage_tensors(self, *_: Any) -> None:
        """Not here: torch, where TORCH_DISTRIBUTED_DEBUG asks for it, compares with the one shape that it knows."""

    def _validate_fwd_outputs(self, *_: Any) -> None:
        """Same as ``_validate_stage_tensors``, in torch 2.11, which always compares."""


def _to_send(output: torch.Tensor, received: Sequence[torch.Tensor]) -> torch.Tensor:
    """Contiguous. The schedules that split the backward detach a stage's outputs in place, which cannot be done to a
    view, and must not be done to what the stage has received and gives on."""
    if output._is_view() or any(output is one for one in received):
        return output.clone(memory_format=torch.contiguous_format)
    return output.contiguous()


def known(part: nn.Module, tokens: torch.Tensor) -> Batch:
    """What a stage needs to know of tokens, of which hidden states do not tell."""
    return {"token_ids": tokens} if "token_ids" in getattr(part, "needs", ()) else {}
