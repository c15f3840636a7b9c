"""What a replica gives another one that is behind: its state between two steps, without a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from forge_core.checkpoint.state_dict import empty_optimizer_state, optimizer_state
from forge_core.contracts.callback import Callback
from forge_core.contracts.replication import LiveState
from forge_core.errors import ConfigError
from forge_core.train.build import BuiltModel
from forge_core.train.component_state import load_states, states_of


@attrs.frozen
class StateTransfer:
    """Where this rank's part of it is found. Ranks of a replica do not talk to each other here."""

    model: BuiltModel
    optimizer: torch.optim.Optimizer
    callbacks: Sequence[tuple[str, Callback]]

    def give(self, progress: Mapping[str, Any]) -> LiveState:
        """The tensors are the ones that are trained; everything else is a copy.

        Args:
            progress: where the run is, as JSON values.
        """
        tensors, optimizer = optimizer_state(self.optimizer, self.model.parameters)
        tensors.update(self.model.tensors())
        facts = {
            "progress": progress,
            "optimizer": optimizer,
            "callbacks": states_of(self.callbacks),
            "tensors": {key: [list(tensor.shape), str(tensor.dtype)] for key, tensor in tensors.items()},
        }
        return {"tensors": {key: _local(tensor) for key, tensor in tensors.items()}, "facts": json.dumps(facts)}

    def take(self, state: LiveState) -> Mapping[str, Any]:
        """Fill model, optimizer and callbacks. Returns the progress.

        Raises:
            ConfigError: it is of another model or mesh.
        """
        facts = json.loads(state["facts"])
        own = self.model.tensors()
        self.optimizer.state.clear()
        described = {key: _described(*entry) for key, entry in facts["tensors"].items()}
        own.update(empty_optimizer_state(self.optimizer, self.model.parameters, described, facts["optimizer"]))
        given = state["tensors"]
        locals_of_own = {key: _local(tensor) for key, tensor in own.items()}
        wrong = sorted(
            key
            for key in given.keys() | own.keys()
            if key not in given or key not in own or given[key].shape != locals_of_own[key].shape
        )
        if wrong:
            raise ConfigError(f"the other replica has another model, or another mesh: {', '.join(wrong[:5])} differ")
        with torch.no_grad():
            for key, tensor in locals_of_own.items():
                tensor.copy_(given[key])
        load_states(self.callbacks, facts["callbacks"])
        progress: Mapping[str, Any] = facts["progress"]
        return progress


def _described(size: Sequence[int], dtype: str) -> TensorStorageMetadata:
    properties = TensorProperties(dtype=getattr(torch, dtype.removeprefix("torch.")))
    return TensorStorageMetadata(properties, torch.Size(size), [])


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()
