"""Auxiliary losses (load balance, z-loss), attached to the graph where they arise.

They need no path to the place where the task loss is computed, so they work under pipelining and activation
checkpointing, and they are reported apart from the task loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

import torch

from forge_core.ops.accumulate import unchanged

Place = Literal["stream", "read", "head"]
"""Where a value is computed from: the residual stream (what blocks, embeddings and ``row`` layers give), what layers
cut by output read (what a norm gives), or what the head gives. Under tensor parallelism each rank has its share of the
tokens of the first, or a copy; of the second it has a copy, whose gradient is the sum over ranks; of the third too,
but it goes on with the gradient of its own part of the vocabulary, as after the task loss."""


class AuxiliaryLedger:
    """The factors by which all losses of a step are multiplied, and the sums so far."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, Place], torch.Tensor] = {}
        self._stream_is_shared_out = False
        self.start_step(None)

    def start_run(self) -> None:
        """Forget what passes have said about the model before."""
        self._stream_is_shared_out = False

    def share_out_stream(self) -> None:
        """Said by the pass that gives each rank along ``tp`` its share of the tokens of the residual stream."""
        self._stream_is_shared_out = True

    def start_step(
        self,
        scale: torch.Tensor | None,
        readers: int = 1,
        own_scales: Mapping[str, torch.Tensor] | None = None,
        token_scale: torch.Tensor | None = None,
        loss_scale: torch.Tensor | None = None,
    ) -> None:
        """Forget the last step.

        Args:
            scale: scalar on the device, 1 / targets of the step over all ranks; ``None`` outside of a step.
            readers: ranks along ``tp``, which all compute what is computed from the place ``"read"``.
            own_scales: the same for losses, by name, that are means over something else.
            token_scale: the same for all tokens but padding, if some of them have no target.
            loss_scale: multiplies what backward begins with, and nothing that is reported; ``None`` is 1.
        """
        self._scale = scale
        self._token_scale = scale if token_scale is None else token_scale
        self._own_scales = own_scales or {}
        self._readers, self.loss_scale = readers, loss_scale
        self._sums.clear()

    def scale_for(self, name: str, value: torch.Tensor, place: Place) -> torch.Tensor:
        """One over what a loss is a mean over; 1 outside of a step."""
        scale = self._own_scales.get(name, self._scale if place == "head" else self._token_scale)
        return torch.ones((), device=value.device) if scale is None else scale

    def gradient_for(self, name: str, value: torch.Tensor, place: Place) -> torch.Tensor:
        """The gradient with which backward begins at ``value``, in its dtype; a tensor of its own."""
        scale = self.scale_for(name, value, place) / (self._readers if place == "read" else 1)
        return (scale if self.loss_scale is None else scale * self.loss_scale).to(value.dtype)

    def add(self, name: str, place: Place, value: torch.Tensor) -> None:
        """Backward runs once for each forward that counts, also where activations are computed twice."""
        key = (name, place)
        self._sums[key] = self._sums[key] + value if key in self._sums else value

    def sums(self) -> list[torch.Tensor]:
        """The sums of this rank in this step, in the same order on all that have this part of the model, to be
        summed further in place."""
        return [self._sums[key] for key in sorted(self._sums)]

    def means(self) -> dict[str, torch.Tensor]:
        """This rank's part of the mean of each auxiliary loss, detached device scalars; their sum over all ranks is the
        whole."""
        means: dict[str, torch.Tensor] = {}
        for (name, place), value in self._sums.items():
            copies = 1 if place == "stream" and self._stream_is_shared_out else self._readers
            share = value * self.scale_for(name, value, place) / copies
            means[name] = means[name] + share if name in means else share
        return means


LEDGER = AuxiliaryLedger()
"""One a process, as autograd is."""


def attach_auxiliary_loss(
    activation: torch.Tensor, value: torch.Tensor, name: str, *, place: Place, follow: bool = False
) -> torch.Tensor:
    """Return ``activation`` unchanged; in backward, also minimise ``value``.

    Args:
        activation: any tensor on the way to the task loss.
        value: scalar fp32, already multiplied by its coefficient, **summed** over the tokens it covers, as a loss'
            total is: the engine divides it by the step's number of tokens, padding left out, and what is computed from
            the head by that of targets, so that the gradient does not depend on how the step is cut into microbatches
            and ranks. A model may have it divided by another number (``MultiTokenModel.count_targets``).
        name: under which the mean is reported, such as ``"load_balance"``. With a pipeline, each has to be there at the
            first logged step.
        place: where ``value`` was computed from. ``"read"``: from what a norm gives, as a router's are. ``"stream"``:
            from the residual stream, as a penalty on what a layer gives back is. ``"head"``: by a loss from the head.
        follow: for a loss that adds to what it is the total of, ``activation``: the gradient of ``value`` begins with
            that of ``activation``, so that it is divided and weighted as the total is. A ``value`` without gradient,
            which the total's gradient has in it already, is then reported.
    """
    if not (activation.requires_grad and (follow or value.requires_grad) and torch.is_grad_enabled()):
        return activation
    attached: torch.Tensor = _Attach.apply(activation, value, name, place, follow)  # type: ignore[no-untyped-call]  # torch's
    return attached


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, activation: torch.Tensor, value: torch.Tensor, name: str, place: str, follow: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(value)
        ctx.name, ctx.place, ctx.follow = name, place, follow
        ctx.recorded = False
        return unchanged(activation)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        # A zero-bubble pipeline goes here twice where the value does not depend on what the stage was given: for the
        # gradient of that, and for those of parameters.
        (value,) = ctx.saved_tensors
        first, ctx.recorded = not ctx.recorded, True
        own = _record(value, gradients[0] if ctx.follow else None, ctx.name, ctx.place, first)
        return gradients[0], own, None, None, None


# An operator, so that torch.compile keeps it as it is: neither the note it takes nor the scale of the step, which is
# another one each time, are part of a graph; nor of a CUDA graph, which would replay the scale of one step.
@torch.library.custom_op("forge::record_auxiliary_loss", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _record(value: torch.Tensor, followed: torch.Tensor | None, name: str, place: str, first: bool) -> torch.Tensor:
    gradient = LEDGER.gradient_for(name, value, cast("Place", place))
    weight = 1.0 if followed is None else followed / gradient
    if first:
        LEDGER.add(name, cast("Place", place), value.detach() * weight)
    return gradient if followed is None else followed.to(value.dtype, copy=True)


@_record.register_fake
def _(value: torch.Tensor, followed: torch.Tensor | None, name: str, place: str, first: bool) -> torch.Tensor:
    return torch.empty_like(value)
