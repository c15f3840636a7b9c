"""Modules that do something once an optimizer step, or report on it, found by protocol (``StepModule``,
``ReportsMetrics``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from forge_core.contracts.model import canonical_name
from forge_core.contracts.module import ReportsMetrics, StepModule
from forge_core.distributed.mesh import DATA_AXES, Mesh, StageScalars, widest
from forge_core.errors import PluginError


class StepModules:
    """All such modules of this rank's parts of the model."""

    def __init__(self, parts: Sequence[nn.Module], mesh: Mesh) -> None:
        self._mesh = mesh
        named: dict[str, Any] = {canonical_name(name): one for part in parts for name, one in part.named_modules()}
        self._modules: dict[str, Any] = {name: one for name, one in named.items() if isinstance(one, StepModule)}
        self._measured: dict[str, Any] = {name: one for name, one in named.items() if isinstance(one, ReportsMetrics)}
        self._deciding = {one: _deciding(name, named) for name, one in named.items()}
        self._stages = StageScalars("modules")

    @torch.no_grad()
    def forget(self) -> None:
        """Throw away what a step has accumulated that is not to count."""
        for _, _, tensor in self._accumulators():
            tensor.zero_()

    def accumulators(self) -> list[torch.Tensor]:
        """The accumulators of this rank in this step, to be summed further in place."""
        return [tensor for _, _, tensor in self._accumulators()]

    @torch.no_grad()
    def before_optimizer_step(self, progress: float, left_out: torch.Tensor | None = None) -> None:
        """Sum all accumulators over the ranks that hold other tokens, in one collective, and hand them out. What a
        module that is frozen saves in checkpoints stays as it is.

        Args:
            progress: as ``StepModule.before_optimizer_step``.
            left_out: scalar on the device, equal on all ranks; if it is not 0, modules keep what is saved of them.
        """
        reduced: dict[str, dict[str, torch.Tensor]] = {name: {} for name in self._modules}
        if named := [*self._accumulators()]:
            # counts of tokens pass 2**24, where fp32 stops counting
            flat = torch.cat([tensor.reshape(-1).to(widest(tensor.device)) for _, _, tensor in named])
            self._mesh.sum_over(flat, (*DATA_AXES, "cp"))
            parts = torch.split(flat, [tensor.numel() for _, _, tensor in named])
            for (module, name, tensor), part in zip(named, parts, strict=True):
                reduced[module][name] = part.view(tensor.shape).to(tensor.dtype)
                tensor.zero_()
        for name, module in self._modules.items():
            kept = [
                (owner, key, owner.get_buffer(key), owner.get_buffer(key).clone(), frozen)
                for owner, key in _buffers_of(module)
                if (frozen := self._is_frozen(owner)) or left_out is not None
            ]
            with _named(module, name, "before_optimizer_step"):
                module.before_optimizer_step(reduced[name], progress)
            for owner, key, buffer, value, frozen in kept:
                new = owner.get_buffer(key)
                buffer.copy_(value if frozen or left_out is None else torch.where(left_out != 0, value, new))
                setattr(owner, key, buffer)  # a module may have put another one there

    @torch.no_grad()
    def metrics(self, device: torch.device) -> Mapping[str, torch.Tensor]:
        """The metrics that modules of all pipeline stages report of the last step (``ReportsMetrics``): fp32 scalars,
        equal on all ranks.

        Raises:
            PluginError: something else than a tensor with one value is reported; or, with a pipeline, a name that no
                stage has reported at the first logged step.
        """
        own: dict[str, torch.Tensor] = {}
        for name, module in self._measured.items():
            with _named(module, name, "step_metrics"):
                own |= {f"{key}/{name}": _scalar(key, value) for key, value in module.step_metrics().items()}
        return self._stages.summed(self._mesh, own, device)

    def _is_frozen(self, owner: nn.Module) -> bool:
        """Return whether a module is not trained in this step."""
        deciding = self._deciding.get(owner, ())
        return bool(deciding) and all(parameter.grad is None for parameter in deciding)

    def _accumulators(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        for module, contributor in self._modules.items():
            for name, tensor in contributor.accumulators().items():
                yield module, name, tensor


def _deciding(name: str, named: Mapping[str, nn.Module]) -> list[nn.Parameter]:
    """The parameters of a module; if it has none, those of the nearest one around it that has. They are looked for
    once, as a pass may put whole ones in their place for a while, which have no gradients."""
    found = [*named[name].parameters()]
    return found or (_deciding(name.rpartition(".")[0], named) if name else [])


def _scalar(key: str, value: object) -> torch.Tensor:
    """The value of a tensor with one element, which may follow from parameters that are sharded over ranks."""
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        what = f"of the shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        raise PluginError(f"the metric {key!r} must be a tensor with one value, and is {what}")
    return (value.full_tensor() if isinstance(value, DTensor) else value).float().reshape(())


@contextmanager
def _named(module: nn.Module, name: str, method: str) -> Iterator[None]:
    """Add a note to an error that names the module."""
    try:
        yield
    except Exception as error:
        error.add_note(f"raised in {method} of {type(module).__qualname__} ({name})")
        if "DTensor" in str(error):
            error.add_note("parameters are whole in forward alone; elsewhere, parameter.full_tensor() is the whole one")
        raise


def _buffers_of(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The buffers of a step module that are saved, each as its module and its name there: not those of a step module
    inside it. The others are what it reports of a step, also of one that is left out."""
    saved = {name for name, _ in module.named_buffers(recurse=False)} - module._non_persistent_buffers_set
    yield from ((module, name) for name in saved)
    for child in module.children():
        if not isinstance(child, StepModule):
            yield from _buffers_of(child)
