"""Element-wise steps of optimizers as one compiled kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from forge_core.errors import ConfigError
from forge_plugins_optim.split_weights import joined, split

Number = float | Sequence[torch.Tensor]
"""Of a step: one for all parameters, or an fp32 scalar on the device for each."""
_TRIED_ON = 4096
"""Elements."""


class CompiledStep:
    """A kernel that reads and writes each element of a parameter and its states once. It computes in fp32.

    Sizes, and what a step's numbers are, may change without another compilation. A tensor that is not in one piece of
    memory, or of one element, is updated by the same lines, not compiled. Where a step is left out, nothing changes.
    """

    def __init__(self, new_values: Callable[..., Sequence[torch.Tensor]], n_states: int) -> None:
        """
        Args:
            new_values: makes the new weight and the new states of a weight, its gradient, its states and the numbers.
            n_states: how many of its arguments are states.
        """

        def step(
            is_taken: torch.Tensor,
            gradient: torch.Tensor,
            tail: torch.Tensor | None,
            parameter: torch.Tensor,
            *others: torch.Tensor,
        ) -> None:
            kept = [parameter, *others[:n_states]]
            old = [one.float() for one in kept]
            if tail is not None:
                old[0] = joined(parameter, tail)
            new = new_values(old[0], gradient.float(), *old[1:], *others[n_states:])
            new = [torch.where(is_taken, after, before) for after, before in zip(new, old, strict=True)]
            if tail is not None:
                new[0], lower = split(new[0])
                tail.copy_(lower)
            for one, value in zip(kept, new, strict=True):
                one.copy_(value)

        step.__code__ = step.__code__.replace()  # torch counts kernels by it, and makes no more than eight of one
        self._plain = step
        self._compiled = torch.compile(step, dynamic=True, fullgraph=True)

    def __call__(
        self,
        left_out: torch.Tensor | None,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        tails: Sequence[torch.Tensor],
        states: Sequence[Sequence[torch.Tensor]],
        numbers: Sequence[Number],
    ) -> None:
        """Step in place.

        Args:
            parameters: this rank's parts, as all others.
            tails: none, or one for each parameter.
            states: of each kind, those of all parameters.
        """
        device = parameters[0].device
        is_taken = torch.ones((), dtype=torch.bool, device=device) if left_out is None else left_out == 0
        on_device = [torch.full((), one, device=device) if isinstance(one, (int, float)) else one for one in numbers]
        for index, parameter in enumerate(parameters):
            own = [parameter, *(state[index] for state in states)]
            beside = [gradients[index], tails[index] if tails else None]
            is_flat = all(one is None or one.is_contiguous() for one in (*own, *beside)) and parameter.numel() > 1
            given = [one if isinstance(one, torch.Tensor) else _itself(one[index], ()) for one in on_device]
            if is_flat:
                own = [_itself(one, (one.numel(),)) for one in own]
                beside = [one if one is None else _itself(one, (one.numel(),)) for one in beside]
            step = self._compiled if is_flat else self._plain
            step(is_taken, *beside, *own, *given)

    @torch.no_grad()
    def try_out(
        self, parameter: torch.Tensor, state_dtypes: Sequence[torch.dtype], *, has_tail: bool, n_numbers: int
    ) -> None:
        """Compile it for parameters of this device and dtype, before the first step needs it.

        Raises:
            ConfigError: there is no compiler, or it does not take it.
        """
        own = torch.zeros(_TRIED_ON, dtype=parameter.dtype, device=parameter.device)
        states = [[torch.zeros_like(own, dtype=dtype)] for dtype in state_dtypes]
        tails = [torch.zeros_like(own, dtype=torch.int16)] if has_tail else []
        try:
            self(None, [own], [own.clone()], tails, states, [1.0] * n_numbers)
        except Exception as error:  # of torch, its backend, or a compiler that it has started
            why = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigError(
                f"optimizer.compile: torch.compile cannot make a kernel here ({why}). It takes a C++ compiler such as "
                "g++ on a CPU, and Triton on a GPU; install it, or leave compile out"
            ) from error


def _itself(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The same memory, in another shape, as a tensor that is no view: of views, torch compiles for what they are of."""
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    strides = (1,) * len(shape)
    return flat.set_(tensor.untyped_storage(), tensor.storage_offset(), shape, strides)
