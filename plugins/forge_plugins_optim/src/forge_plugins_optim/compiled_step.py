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
_ALIGNED = 4
"""Numbers in fp32 between addresses that torch's compiler takes for aligned, 16 bytes."""


class CompiledStep:
    """A kernel that reads and writes each element of a parameter and its states once. It computes in fp32.

    Sizes, and what a step's numbers are, may change without another compilation. A tensor that is not in one piece of
    memory, or of one element, is updated by the same lines, not compiled. Where a step is left out, nothing changes.
    """

    def __init__(self, new_values: Callable[..., Sequence[torch.Tensor]]) -> None:
        """
        Args:
            new_values: makes the new weight and the new states of a weight, its gradient, its states and the numbers.
        """

        def step(
            numbers: torch.Tensor,
            gradient: torch.Tensor,
            tail: torch.Tensor | None,
            parameter: torch.Tensor,
            *states: torch.Tensor,
        ) -> None:
            is_taken, scale, *of_step = numbers.unbind()
            kept = [parameter, *states]
            old = [one.float() for one in kept]
            if tail is not None:
                old[0] = joined(parameter, tail)
            new = new_values(old[0], gradient.float() * scale, *old[1:], *of_step)
            new = [torch.where(is_taken != 0, after, before) for after, before in zip(new, old, strict=True)]
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
        told: tuple[torch.Tensor | None, torch.Tensor | None],
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        tails: Sequence[torch.Tensor | None],
        states: Sequence[Sequence[torch.Tensor]],
        numbers: Sequence[Number],
    ) -> None:
        """Step in place.

        Args:
            told: ``left_out`` and ``gradient_scale`` of the optimizer.
            parameters: this rank's parts, as all others.
            tails: of parameters that are split, as all lists one for each parameter.
            states: of each kind, those of all parameters.
        """
        left_out, scale = told
        is_taken = 1.0 if left_out is None else 1 - left_out
        rows = _rows([is_taken, 1.0 if scale is None else scale, *numbers], parameters)
        for index, parameter in enumerate(parameters):
            own: list[torch.Tensor | None] = [parameter, *(state[index] for state in states)]
            beside = [gradients[index], tails[index]]
            step: Callable[..., None] = self._plain
            if parameter.numel() > 1 and all(one is None or one.is_contiguous() for one in (*own, *beside)):
                step = self._compiled
                own, beside = ([one if one is None else _flat(one) for one in some] for some in (own, beside))
            step(rows[index], *beside, *own)

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
        tails = [torch.zeros_like(own, dtype=torch.int16) if has_tail else None]
        try:
            self((None, None), [own], [own.clone()], tails, states, [1.0] * n_numbers)
        except Exception as error:  # of torch, its backend, or a compiler that it has started
            why = " ".join(str(error).splitlines()[:2]) or type(error).__name__  # the first names torch's part
            raise ConfigError(
                f"optimizer.compile: torch.compile cannot make a kernel here ({why}). It takes a C++ compiler such as "
                "g++ on a CPU, and Triton on a GPU; install it, or leave compile out"
            ) from error


def _rows(numbers: Sequence[torch.Tensor | Number], parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those of each parameter. Each row begins where a GPU's kernel takes it as it is: others it would copy first."""
    width = -(-len(numbers) // _ALIGNED) * _ALIGNED
    table = torch.empty(len(parameters), width, device=parameters[0].device)[:, : len(numbers)]
    for column, number in zip(table.unbind(1), numbers, strict=True):
        if isinstance(number, (int, float)):
            column.fill_(number)
        else:
            column.copy_(number if isinstance(number, torch.Tensor) else torch.stack([*number]))
    return [row.data for row in table.unbind()]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, as a tensor that is no view: of views, torch compiles for what they are of, too."""
    return tensor.view(-1).data
