"""A run's tensors by name, the same names on every layout: ``model.<name>``, ``optimizer.<name>.<slot>``,
``evaluation.<name>`` of what is evaluated in place of a parameter, and ``plugin.….<name>`` of callbacks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from forge_core.contracts.model import canonical_name
from forge_core.contracts.optimizer import StateLayout
from forge_core.errors import ConfigError, PluginError
from forge_core.ops.local_tensor import local_tensor


def model_tensors(parameters: Mapping[str, nn.Parameter], parts: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """The given parameters, and persistent buffers, as they are: writing to them changes the model. ``state_dict`` has
    FSDP drop the copies that it has gathered, so that the next forward takes what is written."""
    named: dict[str, torch.Tensor] = dict(parameters)
    for part in parts:
        persistent = {canonical_name(name) for name in part.state_dict(keep_vars=True)}
        named.update((name, buffer) for name, buffer in part.named_buffers() if canonical_name(name) in persistent)
    return {f"model.{canonical_name(name)}": plain_values(tensor) for name, tensor in named.items()}


def plain_values(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without the class that a pass has put around it (such as float8 all-gather's): a checkpoint with
    that class in it could be read only where the class is known."""
    local: Any = local_tensor(tensor)
    if not is_traceable_wrapper_subclass(local):
        return tensor
    values: torch.Tensor = getattr(local, local.__tensor_flatten__()[0][0])
    assert (values.shape, values.dtype) == (local.shape, tensor.dtype), f"values of a {type(local).__qualname__}"
    if not isinstance(tensor, DTensor):
        return values
    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(values, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def named_parameters(parts: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """This rank's parameters by their names in the whole model, a tied one once, and none that another part lends. Ask
    before the first forward: FSDP may leave other tensors in the modules afterwards."""
    every = ((part, canonical_name(name), parameter) for part in parts for name, parameter in part.named_parameters())
    return {name: parameter for part, name, parameter in every if name not in getattr(part, "borrowed", ())}


def optimizer_state(
    optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """All state of an optimizer by parameter name: tensors, and everything else as JSON values.

    Raises:
        PluginError: the optimizer keeps something that is neither a tensor nor a number, string or boolean.
    """
    if strangers := optimizer.state.keys() - set(names.values()):
        raise PluginError(
            f"{type(optimizer).__qualname__} keeps state of {len(strangers)} tensors that are no parameters of the "
            "model, which cannot be saved by name"
        )
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    on_host: set[str] = set()
    for name, parameter in names.items():
        for slot, value in optimizer.state.get(parameter, {}).items():
            key = f"optimizer.{name}.{slot}"
            if isinstance(value, torch.Tensor):
                tensors[key] = value
                if value.device != parameter.device:
                    on_host.add(slot)
            elif value is None or isinstance(value, (bool, int, float, str)):
                values[key] = value
            else:
                raise PluginError(
                    f"{type(optimizer).__qualname__} keeps a {type(value).__name__} as state {slot!r} of {name}; state "
                    "must be tensors, numbers or strings to be saved"
                )
    return tensors, {"values": values, "on_host": sorted(on_host)}


def empty_optimizer_state(
    optimizer: torch.optim.Optimizer,
    names: Mapping[str, nn.Parameter],
    saved: Mapping[str, Any],
    facts: Mapping[str, Any],
    elsewhere: Collection[str] = (),
) -> dict[str, torch.Tensor]:
    """Give a fresh optimizer state of the saved kind, without a step, and return its tensors to be read into.

    Args:
        saved: what a checkpoint holds, by key.
        facts: the second part of what ``optimizer_state`` returned when it was saved.
        elsewhere: parameters that other pipeline stages hold; their state is theirs to read.

    Raises:
        ConfigError: the checkpoint has state of a parameter that is not there.
    """
    tensors: dict[str, torch.Tensor] = {}
    for key, metadata in saved.items():
        if key.startswith("optimizer."):
            name, slot = _split(key)
            if name in elsewhere:
                continue
            parameter = _parameter(names, name, key)
            dtype, on_host = metadata.properties.dtype, slot in facts["on_host"]
            tensor = empty_slot(optimizer, parameter, slot, metadata.size, dtype, on_host=on_host)
            optimizer.state[parameter][slot] = tensor
            tensors[key] = tensor
    for key, value in facts["values"].items():
        name, slot = _split(key)
        if name not in elsewhere:
            optimizer.state[_parameter(names, name, key)][slot] = value
    return tensors


def empty_slot(
    optimizer: torch.optim.Optimizer,
    parameter: nn.Parameter,
    slot: str,
    shape: torch.Size,
    dtype: torch.dtype,
    *,
    on_host: bool = False,
) -> torch.Tensor:
    """One tensor of an optimizer's state to be read into, laid out as the optimizer says (``StateLayout``); if it says
    nothing, sharded as its parameter is if it has its shape, otherwise whole on every rank."""
    if isinstance(optimizer, StateLayout):
        laid_out = optimizer.empty_state(parameter, slot, shape, dtype)
        if laid_out is not None:
            return laid_out
    if shape == parameter.shape and isinstance(parameter.data, DTensor):
        return torch.zeros_like(parameter.data, dtype=dtype)
    return torch.zeros(shape, dtype=dtype, device="cpu" if on_host else parameter.device)


def _split(key: str) -> tuple[str, str]:
    name, _, slot = key.removeprefix("optimizer.").rpartition(".")
    return name, slot


def _parameter(names: Mapping[str, nn.Parameter], name: str, key: str) -> nn.Parameter:
    if name not in names:
        raise ConfigError(f"the checkpoint has {key}, but the model has no parameter {name}")
    return names[name]
