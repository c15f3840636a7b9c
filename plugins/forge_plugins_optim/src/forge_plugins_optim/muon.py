"""Muon."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from forge_core.contracts.optimizer import NamedParameter, UpdateSize
from forge_core.errors import ConfigError, and_more
from forge_core.ops.local_tensor import local_tensor
from forge_plugins_optim.config import MATRIX_ROLES, MUON_ALONE, MuonConfig
from forge_plugins_optim.foreach import ForeachOptimizer, Tensors
from forge_plugins_optim.newton_schulz import orthogonalise
from forge_plugins_optim.parameter_groups import parameter_groups
from forge_plugins_optim.stacked_matrices import rows_of_stacked
from forge_plugins_optim.whole_matrices import map_whole

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Muon(ForeachOptimizer):
    """Momentum, orthogonalised (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon).

    With ``M ← μ M + (1 − μ) G``, a matrix moves by ``lr`` times its scale times ``orthogonalise(M)``, or with Nesterov
    ``orthogonalise(μ M + (1 − μ) G)``. Each expert of a stack is a matrix of its own, and so is each of ``stacked``.
    Matrices that are spread over ranks are brought together, each on one of them (``map_whole``).
    """

    def __init__(self, config: MuonConfig, /, *, parameters: Sequence[NamedParameter]) -> None:
        """
        Raises:
            ConfigError: a parameter is no matrix, a parameter group takes no parameter, or ``stacked`` does not fit.
        """
        _refuse_others(parameters)
        super().__init__(parameter_groups(parameters, config), {})
        self.round_as(config.rounding, parameters)
        self.update_size: UpdateSize = "spectral" if config.scale == "spectral" else "orthogonal"
        self._config = config
        self._rows = rows_of_stacked(parameters, config.stacked)

    def update(self, group: dict[str, Any], held: Tensors) -> None:
        self.count(held)
        averages = [average for bucket in self.buckets(held) for average in self._averages(bucket)]
        spread = [_laid_out_as(one, average) for one, average in zip(held, averages, strict=True)]
        steps = iter(self._orthogonal(held, spread))
        for bucket in self.buckets(held):
            self._step(group, bucket, [local_tensor(next(steps)).float() for _ in bucket])

    def _orthogonal(self, held: Tensors, spread: Tensors) -> Tensors:
        """``spread`` as orthogonal matrices; those with the same rows of stacked ones come together."""
        alike: dict[tuple[int, ...], list[int]] = {}
        for index, one in enumerate(held):
            alike.setdefault(self._rows.get(one, ()), []).append(index)
        found: dict[int, torch.Tensor] = {}
        for rows, indices in alike.items():
            steps = map_whole([spread[index] for index in indices], partial(self._each, rows=rows))
            found.update(zip(indices, steps, strict=True))
        return [found[index] for index in range(len(held))]

    def _each(self, whole: torch.Tensor, *, rows: tuple[int, ...]) -> torch.Tensor:
        """Orthogonalise each of stacked matrices ``(k, m, n)``. ``_step`` scales by the whole shape: a part gets here
        what it lacks of its own scale."""
        if not rows:
            return orthogonalise(whole, self._config.iterations)
        rule, parts = self._config.scale, whole.split(rows, dim=-2)  # type: ignore[no-untyped-call]  # torch's
        factors = [_scale(rule, part.shape) / _scale(rule, whole.shape) for part in parts]
        steps = [orthogonalise(part, self._config.iterations) for part in parts]
        return torch.cat([step * factor for step, factor in zip(steps, factors, strict=True)], dim=-2)

    def _averages(self, held: Tensors) -> Tensors:
        """What is to be orthogonalised, this rank's parts in ``dtype``."""
        config, kept = self._config, self.slot(held, "momentum")
        momenta = [one.float() for one in kept] if self.is_rounded_by_chance(held[0]) else kept
        gradients = [
            gradient.to(momentum.dtype) for gradient, momentum in zip(self.parts(held)[1], momenta, strict=True)
        ]
        self.decay(momenta, config.momentum)
        torch._foreach_add_(momenta, gradients, alpha=1 - config.momentum)
        averages = torch._foreach_lerp(gradients, momenta, config.momentum) if config.nesterov else momenta
        for one, state, momentum in zip(held, kept, momenta, strict=True):
            if momentum is not state:
                self.round(one, [(state, momentum)], first=1)
        return [average.to(_DTYPES[config.dtype]) for average in averages]

    def _step(self, group: dict[str, Any], held: Tensors, steps: Tensors) -> None:
        torch._foreach_mul_(steps, [_scale(self._config.scale, one.shape) for one in held])
        parameters = [self.exact(one) if self.has_copy(one) else local_tensor(one) for one in held]
        self.shrink(parameters, group["lr"] * group["weight_decay"])
        self.move(parameters, steps, group["lr"])
        for one, parameter in zip(held, parameters, strict=True):
            self.keep(one, parameter)


def _scale(rule: str, shape: torch.Size) -> float:
    rows, columns = shape[-2:]
    return sqrt(max(1.0, rows / columns)) if rule == "spectral" else 0.2 * sqrt(max(rows, columns))


def _laid_out_as(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return part
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())


def _refuse_others(parameters: Sequence[NamedParameter]) -> None:
    others = [one for one in parameters if one.role not in MATRIX_ROLES or one.parameter.ndim not in (2, 3)]
    if others:
        named = ", ".join(f"{one.name} ({one.role} {tuple(one.parameter.shape)})" for one in others[:3])
        advice = MUON_ALONE
        if all(one.role in MATRIX_ROLES for one in others):  # kernels of convolutions
            advice = (
                "It takes 2 or 3 dimensions. Use optimizer 'grouped' with patterns for muon, such as [\"blocks.*\"]"
            )
        raise ConfigError(f"optimizer: muon was given {named}{and_more(len(others), 3)}. {advice}.")
