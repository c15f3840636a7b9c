"""State of optimizers, before it is saved for the first time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import attrs
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from forge_core.checkpoint.state_dict import empty_slot
from forge_core.contracts.callback import RunContext
from forge_core.contracts.observer import Observer
from forge_core.contracts.optimizer import StateLayout
from forge_core.errors import PluginError, and_more
from forge_core.registry.catalog import Catalog
from forge_plugins_monitor.observers.bit_sums import bit_sums

_LISTED = 3
"""Names in a line; of more, the number is given."""
_Digest = tuple[tuple[int, ...], str, int]
"""Shape, dtype and bits of a tensor."""
_TORCHS = frozenset({"defaults", "state", "param_groups", "found_inf", "left_out"})
"""Attributes of every optimizer."""


@attrs.frozen
class _Own:
    """The findings of one rank."""

    problems: Sequence[str]
    plain: Mapping[str, _Digest]
    """Digests of state that is no DTensor, which has to be the same on all ranks that have it."""
    updated: Collection[str]
    missing: Collection[str]
    """Parameters that have been updated and have no state."""


class OptimizerState(Observer):
    """Looks before the first checkpoint after an update whether a resume could give the optimizer what it has."""

    def __init__(self, *, catalog: Catalog) -> None:
        self._catalog = catalog
        self._updated: set[str] = set()
        self._has_updated = self._is_done = False

    def update_end(self, run: RunContext, names: Collection[str]) -> None:
        self._has_updated = True
        if not self._is_done and len(self._updated) < len(run.parameters):
            self._updated.update(names)

    def save_start(self, run: RunContext) -> None:
        """Same as ``Observer.save_start``. It also says which parameters have no state.

        Raises:
            PluginError: there is state that a resumed run could not be given as it was.
        """
        if self._is_done or not self._has_updated:
            return
        self._is_done = True
        own = self._look(run)
        found = [own] * run.world_size
        if run.world_size > 1:
            dist.all_gather_object(found, own)
        problems = [problem for one in found for problem in one.problems] or _differing(found)
        words = self._catalog.words_for(run.job.optimizer)
        if problems:
            raise PluginError("" if run.rank else f"{words} keeps {problems[0]}. This is a bug in the optimizer.")
        updated, missing = ({name for one in found for name in getattr(one, key)} for key in ("updated", "missing"))
        if missing:
            run.log(f"{words} {_without_state(sorted(missing), len(updated), run)}")

    def _look(self, run: RunContext) -> _Own:
        problems, plain = [], {}
        for name, parameter in run.parameters.items():
            for slot, value in run.optimizer.state.get(parameter, {}).items():
                key = f"the state {slot!r} of {name}"
                if not isinstance(value, torch.Tensor):
                    continue
                if not isinstance(value, DTensor):
                    plain[key] = value
                says_how = isinstance(run.optimizer, StateLayout)
                if says_how or (isinstance(value, DTensor) and _layout(value) != _layout(parameter.data)):
                    empty = empty_slot(run.optimizer, parameter, slot, value.shape, value.dtype)
                    problems += _laid_out_otherwise(key, value, empty)
        sums = bit_sums(plain) if run.world_size > 1 else {}
        return _Own(
            problems,
            {key: (tuple(plain[key].shape), str(plain[key].dtype), total) for key, total in sums.items()},
            self._updated,
            {name for name in self._updated if not run.optimizer.state.get(run.parameters[name])},
        )


def _without_state(missing: Sequence[str], n_updated: int, run: RunContext) -> str:
    names = ", ".join(missing[:_LISTED]) + and_more(len(missing), _LISTED)
    whose = f"{len(missing)} of the {n_updated} parameters" if len(missing) < n_updated else "any of the parameters"
    own = _holding_tensors(run.optimizer, {id(parameter) for parameter in run.parameters.values()})
    where = f"; its attribute {' and '.join(own)} holds tensors, which are not saved" if own else ""
    return (
        f"has no state for {whose} that it has updated ({names}){where}. Only what stands in "
        "optimizer.state[parameter] is saved: if it keeps anything else, a resumed run is another one"
    )


def _laid_out_otherwise(key: str, value: torch.Tensor, empty: torch.Tensor) -> list[str]:
    """Than what a resume would read it into."""
    here, there = _layout(value), _layout(empty)
    remedy = "state must be sharded as the parameter is, or as empty_state says, or equal on all ranks"
    return [] if here == there else [f"{key} {here}, which a resume would have {there}; {remedy}"]


def _layout(tensor: torch.Tensor) -> str:
    return (f"sharded as {tensor.placements} " if isinstance(tensor, DTensor) else "whole ") + f"{tuple(tensor.shape)}"


def _differing(found: Sequence[_Own]) -> list[str]:
    """State that cannot be saved as one tensor."""
    first: dict[str, _Digest] = {}
    for one in found:
        for key, digest in one.plain.items():
            if first.setdefault(key, digest) != digest:
                remedy = "make it with zeros_like(parameter), so that it is sharded as the parameter is"
                return [f"a plain tensor as {key}, {digest[0]}, that differs between ranks; {remedy}"]
    return []


def _holding_tensors(optimizer: torch.optim.Optimizer, parameters: Collection[int]) -> list[str]:
    """Attributes of its own in which there are tensors other than parameters, or another optimizer."""

    def holds(value: object) -> bool:
        if isinstance(value, torch.optim.Optimizer):
            return value.state is not optimizer.state
        leaves = tree_leaves(dict(value) if isinstance(value, Mapping) else value)
        return any(isinstance(leaf, torch.Tensor) and id(leaf) not in parameters for leaf in leaves)

    return [repr(name) for name, value in vars(optimizer).items() if name not in _TORCHS and holds(value)]
