"""Adafactor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import nn

from forge_core.contracts.optimizer import NamedParameter, UpdateSize
from forge_core.ops.local_tensor import local_tensor
from forge_plugins_optim.config import AdafactorConfig
from forge_plugins_optim.parameter_groups import parameter_groups
from forge_plugins_optim.state_layout import groups_across, reduce_across, zeros_along
from forge_plugins_optim.stochastic_rounding import round_into, seed_of


class Adafactor(torch.optim.Optimizer):
    """Algorithms 4 and 5 of Shazeer and Stern (2018, https://arxiv.org/abs/1804.04235).

    Of the squares of a matrix's gradient, ``(m, n)``, it keeps a running mean of each row, ``(m,)``, and of each
    column, ``(n,)``; of a stack ``(E, m, n)`` those of each matrix. Vectors keep the mean of each element. All state is
    fp32, and the same on every mesh: rows are cut as the parameter's rows are, columns as its columns.

    A step of all parameters costs three collectives on each axis of the mesh at most: sums of rows, of columns, and of
    the squares of updates, by whose root mean square over the whole parameter an update is clipped.

    Gradients in fp32 are overwritten by the updates.
    """

    leaves_out = True
    left_out: torch.Tensor | None = None

    def __init__(self, config: AdafactorConfig, /, *, parameters: Sequence[NamedParameter]) -> None:
        """
        Raises:
            ConfigError: a parameter group takes no parameter.
        """
        super().__init__(parameter_groups(parameters, config), {})
        self.update_size: UpdateSize = "parameter" if config.scale_parameter else "element"
        self._config = config
        self._seeds = {one.parameter: seed_of(one.name) for one in parameters if config.rounding == "stochastic"}

    def empty_state(
        self, parameter: nn.Parameter, slot: str, shape: torch.Size, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Same as ``StateLayout.empty_state``."""
        return _ALONG[slot](parameter) if slot in _ALONG and parameter.ndim > 1 else None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # as torch's
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        held = [
            _Held(parameter, self._gradient(parameter), self._state(parameter), group)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if held:
            self._update(held)
        return loss

    def _gradient(self, parameter: nn.Parameter) -> torch.Tensor:
        """This rank's part in fp32, zero in a step that is left out."""
        assert parameter.grad is not None, "only parameters with one are updated"
        gradient = local_tensor(parameter.grad)
        if self.left_out is not None:
            gradient.masked_fill_(self.left_out.bool(), 0)
        return gradient.float()

    def _state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """With the slots that are needed: a resumed run may have another ``beta1``."""
        state: dict[str, Any] = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros((), device=parameter.device)
            if parameter.ndim > 1:
                state.update({slot: zeros(parameter) for slot, zeros in _ALONG.items()})
            else:
                state["square"] = torch.zeros_like(parameter, dtype=torch.float32)
        if not self._config.beta1:
            state.pop("momentum", None)
        elif "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter, dtype=torch.float32)
        return state

    def _update(self, held: Sequence[_Held]) -> None:
        is_taken = torch.ones((), device=held[0].gradient.device)
        if self.left_out is not None:
            is_taken = 1 - self.left_out
        steps = torch.stack([one.state["step"] for one in held]) + 1
        new = steps.pow(-self._config.decay_power).unbind()  # 1 − β₂
        self._update_means(held, [share * is_taken for share in new])
        for one in held:
            one.scale_gradient()
            if self.left_out is not None:
                one.gradient.masked_fill_(self.left_out.bool(), 0)  # means of nothing give NaN
        clipped, scales = self._sizes(held)
        for one, size, scale, step in zip(held, clipped, scales, steps.unbind(), strict=True):
            lr = one.group["lr"] * self._relative(step) * scale * is_taken
            self._move(one, one.gradient.mul_(lr / size), lr, is_taken)
            one.state["step"].add_(is_taken)

    def _update_means(self, held: Sequence[_Held], new: Sequence[torch.Tensor]) -> None:
        """Of the squares, by rows, columns, or elements."""
        matrices = [(one, share) for one, share in zip(held, new, strict=True) if one.is_factored]
        rows, columns = [], []
        for one, _ in matrices:
            squares = one.gradient.square().add_(self._config.eps[0])
            rows.append(squares.sum(-1))
            columns.append(squares.sum(-2))
        reduce_across(rows, [one.across_columns for one, _ in matrices])
        for (one, share), row in zip(matrices, rows, strict=True):
            one.row.lerp_(row / one.parameter.shape[-1], share)
        totals = [one.row.sum(-1) for one, _ in matrices]
        reduce_across([*columns, *totals], 2 * [one.across_rows for one, _ in matrices])
        for (one, share), column, total in zip(matrices, columns, totals, strict=True):
            one.column.lerp_(column / one.parameter.shape[-2], share)
            one.mean_of_rows = total / one.parameter.shape[-2]
        for one, share in zip(held, new, strict=True):
            if not one.is_factored:
                local_tensor(one.state["square"]).lerp_(one.gradient.square().add_(self._config.eps[0]), share)

    def _sizes(self, held: Sequence[_Held]) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """What each update is divided by, and the size of each parameter, which is 1 without ``scale_parameter``."""
        measured = [one.gradient for one in held]
        if self._config.scale_parameter:
            measured += [local_tensor(one.parameter) for one in held]
        copies = len(measured) // len(held)
        squares = [norm.square() for norm in torch._foreach_norm(measured, 2.0, dtype=torch.float32)]
        reduce_across(squares, copies * [one.across for one in held])
        numels = copies * [one.parameter.numel() for one in held]
        roots = [(total / n).sqrt() for total, n in zip(squares, numels, strict=True)]
        clipped = [(root / self._config.clip_threshold).clamp(min=1.0) for root in roots[: len(held)]]
        scales = [root.clamp(min=self._config.eps[1]) for root in roots[len(held) :]]
        return clipped, scales or [torch.ones_like(one) for one in clipped]

    def _relative(self, step: torch.Tensor) -> torch.Tensor | float:
        return step.rsqrt().clamp(max=1e-2) if self._config.relative_step else 1.0

    def _move(self, one: _Held, update: torch.Tensor, lr: torch.Tensor, is_taken: torch.Tensor) -> None:
        if self._config.beta1:
            momentum = local_tensor(one.state["momentum"])
            momentum.lerp_(update, (1 - self._config.beta1) * is_taken)
            update = momentum * is_taken
        parameter = local_tensor(one.parameter)
        whole = parameter.float()
        whole.addcmul_(whole, lr * one.group["weight_decay"], value=-1)  # 1 − lr · decay would be rounded to fp32
        whole.sub_(update)
        if one.parameter in self._seeds and parameter.dtype == torch.bfloat16:
            round_into([(parameter, whole)], one.parameter, self._seeds[one.parameter], one.state["step"])
        elif whole is not parameter:
            parameter.copy_(whole)


@attrs.define
class _Held:
    """A parameter with a gradient."""

    parameter: nn.Parameter
    gradient: torch.Tensor
    """This rank's part in fp32; later on the update."""
    state: dict[str, Any]
    group: dict[str, Any]
    mean_of_rows: torch.Tensor = attrs.field(init=False)
    """Of the running mean of each row, over the rows of a matrix."""

    @property
    def is_factored(self) -> bool:
        return self.parameter.ndim > 1

    @property
    def row(self) -> torch.Tensor:
        return local_tensor(self.state["row"])

    @property
    def column(self) -> torch.Tensor:
        return local_tensor(self.state["column"])

    @property
    def across_rows(self) -> list[dist.ProcessGroup]:
        return groups_across(self.parameter, [self.parameter.ndim - 2])

    @property
    def across_columns(self) -> list[dist.ProcessGroup]:
        return groups_across(self.parameter, [self.parameter.ndim - 1])

    @property
    def across(self) -> list[dist.ProcessGroup]:
        return groups_across(self.parameter, range(self.parameter.ndim))

    def scale_gradient(self) -> None:
        """Divide by the root of the estimated mean of the squares."""
        if self.is_factored:
            by_row = (self.row / self.mean_of_rows.unsqueeze(-1)).rsqrt_()
            self.gradient.mul_(by_row.unsqueeze(-1)).mul_(self.column.rsqrt().unsqueeze(-2))
        else:
            self.gradient.mul_(local_tensor(self.state["square"]).rsqrt())


def _rows(parameter: torch.Tensor) -> torch.Tensor:
    return zeros_along(parameter, parameter.shape[:-1], range(parameter.ndim - 1))


def _columns(parameter: torch.Tensor) -> torch.Tensor:
    dims = [*range(parameter.ndim - 2), parameter.ndim - 1]
    return zeros_along(parameter, [parameter.shape[dim] for dim in dims], dims)


_ALONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"row": _rows, "column": _columns}
