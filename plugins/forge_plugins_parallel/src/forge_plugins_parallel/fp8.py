"""Linear layers that multiply in float8, by torchao."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchao.float8 import Float8LinearConfig  # type: ignore[import-untyped]  # it has no types
from torchao.float8.float8_linear import Float8Linear  # type: ignore[import-untyped]

from forge_core.contracts.parallel_pass import PassContext
from forge_core.errors import ConfigError
from forge_core.module_pattern import is_within
from forge_plugins_parallel.config import Float8Config

_MULTIPLE = 16
"""Kernels ask for features in multiples of this."""


class Float8:
    """Makes float8 layers of the linear layers in blocks that multiply by a matrix, unless they are small.

    The head, the embedding and whatever the model's plan replicates (routers) stay as they are. Parameters stay in the
    dtype in which they were built; they are rounded whenever they are used.
    """

    def __init__(self, config: Float8Config) -> None:
        self._config = config

    def apply(self, model: nn.Module, context: PassContext) -> tuple[nn.Module, Sequence[str]]:
        """As ``ParallelPass.apply``.

        Raises:
            ConfigError: the device has no float8 and ``emulate`` is not set; or a pattern of ``exclude`` fits nothing.
        """
        self._refuse_without_hardware(context)
        if context.mesh.degrees["pp"] == 1:  # a stage does not know what the others hold
            self._refuse_idle_patterns(model)
        config = self._torchao_config()
        touched = []
        for name, linear in self._chosen(model):
            _make_float8(linear, config)
            touched.append(name)
        return model, touched

    def _refuse_without_hardware(self, context: PassContext) -> None:
        device, planned = context.device, context.planned_gpu
        if self._config.emulate:
            return
        if planned is not None:
            name, capability = planned.name, planned.capability
        elif device.type == "cuda":
            name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        else:
            name, capability = device.type, (0, 0)
        if capability < (8, 9):
            raise ConfigError(
                f"parallel.passes.fp8: {name} does not multiply in float8 (GPUs from compute capability 8.9 on do; a "
                "plan is told by --gpu); set emulate = true to try it out slowly, or take the pass out"
            )

    def _refuse_idle_patterns(self, model: nn.Module) -> None:
        names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        for pattern in self._config.exclude:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(
                    f"parallel.passes.fp8.exclude: {pattern!r} fits no linear layer; there are {', '.join(names[:8])}"
                    f"{' and more' if len(names) > 8 else ''}"
                )

    def _torchao_config(self) -> Float8LinearConfig:
        base = Float8LinearConfig.from_recipe_name(self._config.recipe)
        changed = {"emulate": self._config.emulate, "enable_fsdp_float8_all_gather": self._config.all_gather}
        return Float8LinearConfig(**(vars(base) | changed))

    def _chosen(self, model: Any) -> list[tuple[str, nn.Linear]]:
        roles, plan = model.parameter_roles(), model.parallel_plan()
        kept = [pattern for pattern, role in plan.items() if role in ("replicate", "router")]
        return [
            (name, module)
            for name, module in model.named_modules()
            if name.startswith("blocks.")
            and isinstance(module, nn.Linear)
            and _is_plain(type(module))
            and roles.get(f"{name}.weight") == "matrix"
            and not any(is_within(name, pattern) for pattern in kept)
            and not any(fnmatchcase(name, pattern) for pattern in self._config.exclude)
            and all(size >= self._config.min_dim and size % _MULTIPLE == 0 for size in _local_shape(module.weight))
        ]


def _make_float8(linear: Any, config: Float8LinearConfig) -> None:
    """In place, so that hooks of earlier passes stay."""
    converted = Float8Linear.from_float(linear, config)
    linear.__class__ = _float8_class(linear.__class__)
    linear.weight = converted.weight
    for name, value in vars(converted).items():
        if name not in vars(linear):
            setattr(linear, name, value)


def _is_plain(own: type[nn.Linear]) -> bool:
    """Whether it multiplies as ``nn.Linear`` does: that itself, or with something mixed in before and after."""
    return own is nn.Linear or (nn.Linear in own.__bases__ and "forward" not in vars(own))


@functools.cache  # one class for all layers of a kind, so that blocks still share one compiled graph
def _float8_class(own: Any) -> Any:
    if own is nn.Linear:
        return Float8Linear
    bases = tuple(Float8Linear if base is nn.Linear else base for base in own.__bases__)
    return type(f"Float8{own.__name__}", bases, {"__module__": __name__})


def _local_shape(weight: torch.Tensor) -> torch.Size:
    return weight.to_local().shape if isinstance(weight, DTensor) else weight.shape
