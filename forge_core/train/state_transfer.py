"""State transfer: a replica gives its state between two steps to one that is behind, without a file."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from forge_core.checkpoint.component_state import load_states, states_of, tensors_of
from forge_core.checkpoint.state_dict import empty_optimizer_state, optimizer_state
from forge_core.contracts.callback import Callback
from forge_core.contracts.replication import LiveState, Replication
from forge_core.data.stream import SampleStream
from forge_core.errors import ConfigError
from forge_core.ops.local_tensor import local_tensor
from forge_core.train.saving import Contents


def give_state(contents: Contents, step: int) -> LiveState:
    """This rank's part. Ranks of a replica do not talk to each other here.

    The tensors are the ones that are trained; everything else is a copy.
    """
    model = contents.built.model
    tensors, optimizer = optimizer_state(contents.built.optimizer, model.parameters)
    tensors.update({**model.tensors(), **tensors_of(_callbacks(contents))})
    facts = {
        "progress": {"step": step, **contents.progress()},
        "optimizer": optimizer,
        "callbacks": states_of(_callbacks(contents)),
        "tensors": {key: [list(tensor.shape), str(tensor.dtype)] for key, tensor in tensors.items()},
    }
    return {
        "tensors": {key: local_tensor(tensor).detach() for key, tensor in tensors.items()},
        "facts": json.dumps(facts),
    }


def take_state(contents: Contents, state: LiveState) -> int:
    """Fill model, optimizer, callbacks, loader and guard. Returns the step.

    Raises:
        ConfigError: it is of another model or mesh.
    """
    model, optimizer, loader = contents.built.model, contents.built.optimizer, contents.run.loader
    facts, given = json.loads(state["facts"]), state["tensors"]
    own = {**model.tensors(), **tensors_of(_callbacks(contents))}
    optimizer.state.clear()
    described = {key: _described(*entry) for key, entry in facts["tensors"].items()}
    own.update(empty_optimizer_state(optimizer, model.parameters, described, facts["optimizer"]))
    locals_of_own = {key: local_tensor(tensor).detach() for key, tensor in own.items()}
    theirs, ours = ({key: one.shape for key, one in tensors.items()} for tensors in (given, locals_of_own))
    if wrong := sorted(key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key)):
        raise ConfigError(f"the other replica has another model, or another mesh: {', '.join(wrong[:5])} differ")
    with torch.no_grad():
        for key, tensor in locals_of_own.items():
            tensor.copy_(given[key])
    load_states(_callbacks(contents), facts["callbacks"])
    progress, before = facts["progress"], loader.stream
    stream = SampleStream(before.source, before.seed, before.shuffle, progress["left_out"])
    loader.restart(stream, progress["position"])
    contents.rollback.guard.restart(progress["anomalies"])
    return int(progress["step"])


def _callbacks(contents: Contents) -> list[tuple[str, Callback]]:
    """Those whose state is the run's: what joins it to others has its own in each replica."""
    return [(name, one) for name, one in contents.callbacks if not isinstance(one, Replication)]


def _described(size: Sequence[int], dtype: str) -> TensorStorageMetadata:
    properties = TensorProperties(dtype=getattr(torch, dtype.removeprefix("torch.")))
    return TensorStorageMetadata(properties, torch.Size(size), [])
