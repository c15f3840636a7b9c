"""What callbacks and trackers want to find again after a resume: JSON values, each in a namespace of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from forge_core.errors import PluginError


class Stateful(Protocol):
    """As the contracts of callbacks and trackers have it."""

    @property
    def state_version(self) -> int: ...

    def state(self) -> Mapping[str, Any]: ...

    def load_state(self, state: Mapping[str, Any], version: int) -> None: ...


S = TypeVar("S")


def states_of(named: Sequence[tuple[str, Stateful]]) -> dict[str, Any]:
    """The state of all that have any, by namespace.

    Raises:
        PluginError: one is not made of JSON values, which would not be the same when it is read.
    """
    return {namespace: entry for namespace, one in by_namespace(named) if (entry := state_entry(namespace, one))}


def state_entry(namespace: str, one: Stateful) -> dict[str, Any]:
    """What is saved of one of them; nothing if it has no state. Raises as ``states_of`` does."""
    state = one.state()
    if not state:
        return {}
    _refuse_strangers(state, f"{namespace}: its state")
    return {"version": one.state_version, "state": dict(state)}


def load_states(named: Sequence[tuple[str, Stateful]], saved: Mapping[str, Any]) -> list[str]:
    """Give each its state back; returns the namespaces nobody claims."""
    remaining = dict(saved)
    for namespace, one in by_namespace(named):
        entry = remaining.pop(namespace, None)
        if entry is not None:
            one.load_state(entry["state"], entry["version"])
    return sorted(remaining)


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
