"""Building a module as the engine does, and seeing what a call has changed in it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from forge_core.train.initialisation import SeededInitializer, named_tensors


def build_on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a module on the meta device; nothing in it may be anywhere else.

    Raises:
        AssertionError: a parameter or buffer was made on another device.
    """
    with torch.device("meta"):
        module = build()
    assert isinstance(module, nn.Module), f"the factory must return an nn.Module, got {type(module).__qualname__}"
    elsewhere = [name for name, tensor in named_tensors(module) if not tensor.is_meta]
    assert not elsewhere, (
        f"{', '.join(elsewhere)}: made on another device than the default one; a model too large for one device must "
        "be buildable on meta, so values belong into init_weights"
    )
    return module


def materialise(module: nn.Module) -> None:
    """Give every meta tensor memory on the CPU, filled with values that show where ``init_weights`` forgot something.

    Tensors shared between modules stay shared, which ``nn.Module.to_empty`` does not promise.
    """
    made: dict[int, torch.Tensor] = {}
    for submodule in module.modules():
        for name, parameter in submodule._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(_poisoned(parameter), parameter.requires_grad)
                submodule._parameters[name] = made[id(parameter)]  # type: ignore[assignment]  # a Parameter, made above
        for name, buffer in submodule._buffers.items():
            if buffer is not None:
                if id(buffer) not in made:
                    made[id(buffer)] = _poisoned(buffer)
                submodule._buffers[name] = made[id(buffer)]


def assert_initialised(module: nn.Module, rng: SeededInitializer, prefix: str = "") -> None:
    """Check that ``rng`` has filled exactly the parameters and buffers of ``module``, with finite values, and that each
    parameter has a dimension by which it can be sharded."""
    for name, parameter in module.named_parameters():
        assert parameter.ndim > 0, f"the parameter {name} has no dimension by which it could be sharded; give it (1,)"
    expected = {prefix + name for name, _ in named_tensors(module)}
    forgotten, unknown = sorted(expected - rng.filled), sorted(rng.filled - expected)
    assert not forgotten, f"init_weights leaves {', '.join(forgotten)} uninitialised"
    assert not unknown, f"init_weights fills {', '.join(unknown)}, which the module does not have"
    for name, tensor in named_tensors(module):
        assert torch.isfinite(tensor).all(), f"init_weights leaves values that are not finite in {prefix}{name}"


def snapshot(module: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters and buffers by name."""
    return {name: tensor.detach().clone() for name, tensor in named_tensors(module)}


def changed(before: dict[str, torch.Tensor], module: nn.Module) -> set[str]:
    """Names of the parameters and buffers that differ from ``before``."""
    return {name for name, tensor in named_tensors(module) if not torch.equal(before[name], tensor)}


def accumulator_names(module: nn.Module) -> set[str]:
    """Names of the buffers that ``module`` and its submodules declare in ``accumulators``.

    Raises:
        AssertionError: one of them is not a non-persistent buffer of the module that declares it.
    """
    names = set()
    for path, submodule in module.named_modules():
        if not hasattr(submodule, "accumulators"):
            continue
        own = {id(buffer): name for name, buffer in submodule.named_buffers()}
        persistent = submodule.state_dict(keep_vars=True)
        for label, tensor in submodule.accumulators().items():
            assert id(tensor) in own, f"the accumulator {label!r} is not a buffer of the module that declares it"
            name = own[id(tensor)]
            assert name not in persistent, f"the accumulator {name!r} must be registered with persistent=False"
            names.add(f"{path}.{name}" if path else name)
    return names


def assert_forward_is_pure(before: dict[str, torch.Tensor], module: nn.Module) -> None:
    """Check that nothing differs from ``before`` but the declared accumulators."""
    wrong = sorted(changed(before, module) - accumulator_names(module))
    assert not wrong, (
        f"forward changed {', '.join(wrong)}; forward may only add to accumulators, everything else changes in "
        "before_optimizer_step"
    )


def assert_gradients_everywhere(module: nn.Module) -> None:
    """Check that every trainable parameter has a finite gradient that is not all zero."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            gradient = parameter.grad
            assert gradient is not None, f"no gradient reaches {name}"
            assert torch.isfinite(gradient).all(), f"the gradient of {name} is not finite"
            assert gradient.abs().max() > 0, f"the gradient of {name} is zero everywhere"


def _poisoned(like: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(like.shape, dtype=like.dtype)
    return empty.fill_(float("nan")) if empty.is_floating_point() else empty.zero_()
