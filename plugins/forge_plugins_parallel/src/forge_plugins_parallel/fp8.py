"""Linear layers that multiply in float8, by torchao; and experts that can."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig  # type: ignore[import-untyped]  # it has no types
from torchao.float8.float8_linear import Float8Linear  # type: ignore[import-untyped]

from forge_core.contracts.model import fits, is_within
from forge_core.contracts.observation import Ends
from forge_core.contracts.parallel_pass import PassContext
from forge_core.errors import ConfigError
from forge_core.ops.local_tensor import local_tensor
from forge_plugins_parallel.block_scaled import CAPABILITIES, BlockScaledLinear, Product, class_with, product_of
from forge_plugins_parallel.config import FLOAT8_BLOCKS, Float8Config

_KEY = "parallel.passes.fp8"


class Float8:
    """Makes float8 layers of the linear layers in blocks that multiply by a matrix, unless they are small.

    The head, the embedding and what the model's plan replicates (routers) stay as they are. Experts are asked to do
    the same with their products, if that is wanted. Parameters stay in the dtype in which they were built; they are
    rounded whenever they are used.
    """

    def __init__(self, config: Float8Config) -> None:
        self._config = config

    def apply(self, model: nn.Module, context: PassContext) -> tuple[nn.Module, Sequence[str]]:
        """Same as ``ParallelPass.apply``.

        Raises:
            ConfigError: the device has no float8 and ``emulate`` is not set; a pattern of ``exclude`` fits nothing;
                experts are wanted in float8, and there are none that can be; or nothing would be in float8.
        """
        capability = self._capability(context)
        experts = self._chosen_experts(model) if self._config.experts else []
        if context.mesh.degrees["pp"] == 1:  # a stage does not know what the others hold
            self._refuse_idle_patterns(model)
            if self._config.experts and not experts:
                raise ConfigError(f"{_KEY}.experts: {self._why_no_experts(model)}")
        convert = self._conversion(capability, is_planned=context.planned_gpu is not None)
        touched = []
        for name, linear in self._chosen(model):
            convert(linear)
            touched.append(name)
        for name, module in experts:
            try:
                module.multiply_in_float8(capability)
            except ConfigError as error:
                raise ConfigError(f"{_KEY}.experts: {name}: {error}; set experts = false") from None
            touched.append(name)
        if not touched and context.mesh.degrees["pp"] == 1:
            raise ConfigError(
                f"{_KEY}: exclude, recipe = {self._config.recipe!r} or min_dim = {self._config.min_dim} leaves all "
                "linear layers of blocks alone; change these, or take the pass out"
            )
        return model, touched

    def layout(self, model: nn.Module) -> Mapping[str, Ends]:
        """Same as ``LaidOutPass.layout``. Weights are where they were, so that nothing is hidden."""
        return {}

    def _capability(self, context: PassContext) -> tuple[int, int] | None:
        """That of the GPU that will multiply; ``None``: it is emulated."""
        device, planned = context.device, context.planned_gpu
        if self._config.emulate:
            return None
        if planned is not None:
            name, capability = planned.name, planned.capability
        elif device.type == "cuda":
            name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        else:
            name, capability = device.type, (0, 0)
        least = CAPABILITIES.get(self._config.recipe, (8, 9))
        if capability < least:
            how = f" with recipe = {self._config.recipe!r}" if self._config.recipe in CAPABILITIES else ""
            raise ConfigError(
                f"{_KEY}: {name} does not multiply in float8{how} (GPUs from compute capability {least[0]}.{least[1]} "
                "on do; a plan is told by --gpu); set emulate = true to try it out slowly, or take the pass out"
            )
        return capability

    def _refuse_idle_patterns(self, model: nn.Module) -> None:
        names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        what = "linear layer"
        if self._config.experts:
            names += [name for name, _ in _stacks_of(model)]
            what = "linear layer and no experts"
        for pattern in self._config.exclude:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(
                    f"{_KEY}.exclude: {pattern!r} fits no {what}; there are {', '.join(names[:8])}"
                    f"{' and more' if len(names) > 8 else ''}"
                )

    def _conversion(self, capability: tuple[int, int] | None, *, is_planned: bool) -> Callable[[Any], None]:
        """What makes a layer, in place, one that multiplies in float8."""
        recipe = self._config.recipe
        if recipe in FLOAT8_BLOCKS:
            product = product_of(recipe, capability, is_planned=is_planned)
            return functools.partial(_scale_in_blocks, product=product)
        return functools.partial(_make_float8, config=self._torchao_config())

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
            and not self._is_excluded(name)
            and self._config.takes(local_tensor(module.weight).shape)
        ]

    def _chosen_experts(self, model: Any) -> list[tuple[str, Any]]:
        return [
            (name, module)
            for name, module in _stacks_of(model)
            if hasattr(module, "multiply_in_float8")
            and not self._is_excluded(name)
            and all(
                min(local_tensor(stack).shape[1:]) >= self._config.min_dim for stack in module.parameters(recurse=False)
            )
        ]

    def _is_excluded(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._config.exclude)

    def _why_no_experts(self, model: nn.Module) -> str:
        stacks = _stacks_of(model)
        if not stacks:
            return "the model has no experts; set it to false"
        able = [name for name, module in stacks if hasattr(module, "multiply_in_float8")]
        if not able:
            return f"{stacks[0][0]} cannot multiply in float8 (it has no multiply_in_float8); set it to false"
        return (
            f"exclude or min_dim = {self._config.min_dim} leaves all experts alone, {able[0]} among them; change "
            "these, or set it to false"
        )


def _stacks_of(model: Any) -> list[tuple[str, nn.Module]]:
    """The modules to which the model's plan gives the role ``expert``."""
    patterns = [pattern for pattern, role in model.parallel_plan().items() if role == "expert"]
    return [(name, module) for name, module in model.named_modules() if any(fits(name, one) for one in patterns)]


def _make_float8(linear: Any, config: Float8LinearConfig) -> None:
    """In place, so that hooks of earlier passes stay."""
    converted = Float8Linear.from_float(linear, config)
    linear.__class__ = class_with(linear.__class__, Float8Linear)
    linear.weight = converted.weight
    for name, value in vars(converted).items():
        if name not in vars(linear):
            setattr(linear, name, value)


def _scale_in_blocks(linear: Any, *, product: Product) -> None:
    linear.__class__ = class_with(linear.__class__, BlockScaledLinear)
    linear.product = product


def _is_plain(own: type[nn.Linear]) -> bool:
    """Return whether it multiplies as ``nn.Linear`` does: that itself, or with something mixed in before and after."""
    return own is nn.Linear or (nn.Linear in own.__bases__ and "forward" not in vars(own))
