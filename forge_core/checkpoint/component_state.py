"""State of callbacks and trackers that survives a resume: JSON values and tensors, each in a namespace of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from forge_core.checkpoint.compatibility import installed
from forge_core.contracts.callback import Callback
from forge_core.contracts.tracker import Tracker
from forge_core.errors import PluginError, retelling

Stateful = Callback | Tracker
S = TypeVar("S")


def states_of(named: Sequence[tuple[str, Stateful]]) -> dict[str, Any]:
    """The state of all that have any, by namespace.

    Raises:
        PluginError: one is not made of JSON values, which would not be the same when it is read.
    """
    return {namespace: entry for namespace, one in by_namespace(named) if (entry := state_entry(namespace, one))}


def state_entry(namespace: str, one: Stateful) -> dict[str, Any]:
    """The saved state of one of them; nothing if it has none. Raises as ``states_of`` does."""
    state = one.state()
    if not state:
        return {}
    if not isinstance(state, Mapping):
        raise PluginError(f"{namespace}: its state is a {type(state).__name__}, which must be a dictionary")
    _refuse_strangers(state, f"{namespace}: its state")
    return {"version": one.state_version, "state": dict(state)}


def tensors_of(callbacks: Sequence[tuple[str, Callback]]) -> dict[str, torch.Tensor]:
    """The tensors of callbacks, by key; writing to them changes the callbacks.

    Raises:
        PluginError: something else is among them.
    """
    tensors: dict[str, torch.Tensor] = {}
    for namespace, one in by_namespace(callbacks):
        for name, tensor in one.tensors().items():
            if not isinstance(tensor, torch.Tensor):
                raise PluginError(
                    f"{namespace}: tensors() has a {type(tensor).__name__} as {name!r}, which is no tensor"
                )
            tensors[f"{namespace}.{name}"] = tensor.detach()
    return tensors


def load_states(
    named: Sequence[tuple[str, Stateful]], saved: Mapping[str, Any], versions: Mapping[str, str] | None = None
) -> list[str]:
    """Give each its state back; returns the namespaces that belong to none of them.

    Args:
        versions: of the distributions that saved it, if they may be others than are here.

    Raises:
        PluginError: one does not take its state.
    """
    remaining = dict(saved)
    for namespace, one in by_namespace(named):
        entry = remaining.pop(namespace, None)
        if entry is not None:
            tell = partial(_not_taken, namespace, entry["version"], one.state_version, versions or {})
            with retelling(tell):
                one.load_state(entry["state"], entry["version"])
    return sorted(remaining)


def _not_taken(namespace: str, then: int, now: int, versions: Mapping[str, str], why: str) -> PluginError:
    distribution = namespace.split(".")[1] if namespace.startswith("plugin.") else namespace
    return PluginError(
        f"{namespace} does not take the state of the checkpoint ({why}). It was saved with "
        f"{distribution} {versions.get(distribution, 'of an unknown version')} (state_version {then}); here is "
        f"{installed(distribution) or 'none'} (state_version {now}). Install the earlier version to go on. If both are "
        f"the same, it is a bug in {distribution}: load_state has to take what earlier versions have saved."
    )


def by_namespace(named: Sequence[tuple[str, S]]) -> Iterator[tuple[str, S]]:
    """The second and later ones of one name are numbered, so that others may come and go between them."""
    seen: Counter[str] = Counter()
    for name, one in named:
        seen[name] += 1
        yield (name if seen[name] == 1 else f"{name}#{seen[name]}"), one


def _refuse_strangers(value: Any, where: str) -> None:
    """``json`` would turn a tuple into a list and the key 1 into "1"."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise PluginError(f"{where} has the key {key!r}; keys must be strings to be saved as JSON")
            _refuse_strangers(item, f"{where}[{key!r}]")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_strangers(item, f"{where}[{index}]")
    elif value is not None and type(value) not in (bool, int, float, str):
        raise PluginError(
            f"{where} is a {type(value).__name__}; state must be made of lists, dictionaries, strings, numbers, "
            "booleans and None, to be saved as JSON"
        )
