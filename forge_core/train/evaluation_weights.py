"""Weights that are evaluated in place of the trained ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from forge_core.checkpoint.state_dict import plain_values
from forge_core.contracts.optimizer import HasEvaluationWeights
from forge_core.distributed.collective_errors import run_on_all_ranks
from forge_core.errors import ConfigError, PluginError
from forge_core.ops.local_tensor import local_tensor
from forge_core.train.build import BuiltModel


class EvaluationWeights:
    """The ``evaluation_weights`` of all components of a run that have any. All ranks call the same methods together.

    Args:
        components: what may have some, with their names in messages.
    """

    def __init__(self, model: BuiltModel, components: Sequence[tuple[str, object]]) -> None:
        self._model = model
        self._owners = [(words, one) for words, one in components if isinstance(one, HasEvaluationWeights)]

    def by_name(self) -> dict[str, torch.Tensor]:
        """Those of this rank's parameters.

        Raises:
            ConfigError: two components have some for the same parameter.
            PluginError: one has something else.
        """
        return run_on_all_ranks(self._by_name) if self._owners else {}

    def to_save(self) -> dict[str, torch.Tensor]:
        """By key in a checkpoint, in the dtypes of the parameters. Raises as ``by_name`` does."""
        parameters = self._model.parameters
        return {f"evaluation.{name}": one.to(parameters[name].dtype) for name, one in self.by_name().items()}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """A context in which they are in the parameters' place. Raises as ``by_name`` does."""
        weights = self.by_name()
        trained: dict[str, torch.Tensor] = {}
        try:
            for name in [*weights]:  # one at a time: what has been made for this is gone when all are in place
                values = self._values(name)
                trained[name] = values.clone()
                values.copy_(local_tensor(weights.pop(name)))
            self._drop_gathered()
            yield
        finally:
            for name, values in trained.items():
                self._values(name).copy_(values)
            self._drop_gathered()

    def _by_name(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        owners: dict[str, str] = {}
        for words, one in self._owners:
            for name, tensor in one.evaluation_weights().items():
                if name in owners:
                    raise ConfigError(
                        f"{owners[name]} and {words} both have weights to be evaluated in place of {name}; leave out "
                        "one of the two"
                    )
                if problem := self._problem(name, tensor):
                    raise PluginError(f"{words}: evaluation_weights has {problem}. This is a bug in {words}.")
                found[name], owners[name] = tensor.detach(), words
        return found

    def _problem(self, name: str, tensor: Any) -> str | None:
        if (parameter := self._model.parameters.get(name)) is None:
            return f"{name!r}, and the model has no such parameter on this rank"
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            found = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            return f"a {found} for {name}, which must be a tensor of floating-point numbers"
        if _layout(tensor) != _layout(parameter):
            return f"a tensor {_layout(tensor)} for {name}, which is {_layout(parameter)}; the two must be alike"
        return None

    def _values(self, name: str) -> torch.Tensor:
        """This rank's part of a parameter, in the same memory."""
        return local_tensor(plain_values(self._model.parameters[name])).detach()

    def _drop_gathered(self) -> None:
        """The root's parameters stay gathered after a forward without a backward, with the values of then."""
        for part in self._model.parts:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()


def _layout(tensor: torch.Tensor) -> tuple[tuple[int, ...], str]:
    """Shape and placements."""
    return tuple(tensor.shape), str(tensor.placements) if isinstance(tensor, DTensor) else "whole on each rank"
