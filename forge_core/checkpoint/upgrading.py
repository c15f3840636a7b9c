"""Reading what an earlier version of a model, a router or an optimizer has saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import nn

from forge_core.contracts.model import canonical_name
from forge_core.contracts.state import StateChanges
from forge_core.errors import PluginError, retelling


@attrs.frozen(kw_only=True)
class Changes:
    """Versions of the tensors of a whole model, by their names in it."""

    then: Mapping[str, str] = attrs.field(factory=dict)
    """The name in the checkpoint of what has another one now."""
    dropped: frozenset[str] = frozenset()
    """In the checkpoint, and not read."""
    added: frozenset[str] = frozenset()
    """Not in the checkpoint, with their first values."""

    def joined(self, other: Changes) -> Changes:
        """Those of two parts of a model."""
        return Changes(
            then={**self.then, **other.then}, dropped=self.dropped | other.dropped, added=self.added | other.added
        )

    def to_read(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The model's tensors that the checkpoint has, by their keys there."""
        then = {f"model.{now}": f"model.{before}" for now, before in self.then.items()}
        added = {f"model.{name}" for name in self.added}
        return {then.get(key, key): tensor for key, tensor in tensors.items() if key not in added}


def module_versions(parts: Sequence[nn.Module]) -> dict[str, int]:
    """The ``state_version`` of every module that has one, by its name in the whole model with a final dot."""
    return {prefix: version for prefix, _, version in _versioned(parts)}


def module_changes(parts: Sequence[nn.Module], saved: Mapping[str, int]) -> Changes:
    """Find the tensors that have to be read by another name than now.

    Args:
        saved: what ``module_versions`` returned when the checkpoint was written.

    Raises:
        PluginError: a module cannot take what was saved.
    """
    changes = Changes()
    for prefix, module, now in _versioned(parts):
        then = saved.get(prefix, 1)
        if then == now:
            continue
        found = _asked(module, then, now, f"the module {prefix[:-1] or 'of the model'}")
        if not isinstance(found, StateChanges):
            raise PluginError(
                f"{type(module).__qualname__}.load_state({then}) must return StateChanges, not {type(found).__name__}"
            )
        changes = changes.joined(
            Changes(
                then={prefix + here: prefix + before for before, here in found.renamed.items()},
                dropped=frozenset(prefix + name for name in found.dropped),
                added=frozenset(prefix + name for name in found.added),
            )
        )
    return changes


def refuse_versions_lost(saved: Mapping[str, int], here: Mapping[str, int]) -> None:
    """Args: what ``module_versions`` returned then, and returns now on all ranks together.

    Raises:
        PluginError: a module is of no version now, and was of a later one than the first.
    """
    for prefix, then in saved.items():
        if then != 1 and prefix not in here:
            raise PluginError(
                f"the module {prefix[:-1] or 'of the model'} was saved with state_version {then}, and has none here. "
                "Install the version that saved it to go on."
            )


def optimizer_version(optimizer: torch.optim.Optimizer) -> int:
    """Its ``state_version``."""
    return int(getattr(optimizer, "state_version", 1))


def upgrade_optimizer(optimizer: torch.optim.Optimizer, then: int) -> None:
    """Have the state that it has been given made what it is now.

    Raises:
        PluginError: it cannot.
    """
    now = optimizer_version(optimizer)
    if then != now:
        _asked(optimizer, then, now, "the optimizer's state")


def _versioned(parts: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module, int]]:
    seen: set[str] = set()
    for part in parts:
        for name, module in part.named_modules():
            version = getattr(type(module), "state_version", None)
            prefix = canonical_name(f"{name}.") if name else ""
            if isinstance(version, int) and prefix not in seen:
                seen.add(prefix)
                yield prefix, module, version


def _asked(one: Any, then: int, now: int, what: str) -> Any:
    name = f"{type(one).__module__}.{type(one).__qualname__}"
    versions = f"{what} ({name}) was saved with state_version {then}, and has {now} here"
    go_on = "Install the version that saved it to go on."
    if not hasattr(one, "load_state"):
        raise PluginError(f"{versions}; no load_state takes it. {go_on}")
    with retelling(lambda why: PluginError(f"{versions}; its load_state does not take it ({why}). {go_on}")):
        return one.load_state(then)
