"""Checks of the first two steps after each start: the host has to wait for them, so no later step has them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from forge_core.checkpoint.state_dict import empty_slot, plain_values
from forge_core.contracts.optimizer import StateLayout
from forge_core.distributed.collective_errors import run_on_all_ranks
from forge_core.errors import PluginError, and_more
from forge_core.ops.local_tensor import local_tensor
from forge_core.train.build import Built
from forge_core.train.component_checks import CheckedLoss

_STEPS = 2
"""An update in backward shows in the second step at the latest, when the optimizer has state."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes: what the bits of a value are read as."""


class FirstSteps:
    """All ranks call the same methods at the same steps.

    Args:
        parameters: this rank's, by name.
        loss: what the executor computes.
        optimizer: names it in messages.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], loss: CheckedLoss, optimizer: str) -> None:
        self._parameters = parameters
        self._loss = loss
        self._optimizer = optimizer
        self._left = _STEPS
        self._before: Mapping[str, int] = {}
        loss.is_watched = True

    def before_gradients(self) -> None:
        """Nothing has been computed in this step."""
        if self._left:
            self._before = bit_sums(self._parameters)

    def after_gradients(self, step: int) -> None:
        """Gradients are there, and no update.

        Raises:
            PluginError: what the loss returns is not what its contract says; or parameters have changed.
        """
        if not self._left:
            return
        self._left -= 1
        run_on_all_ranks(lambda: self._refuse_what_is_wrong(step))
        self._before = {}
        self._loss.is_watched = self._loss.is_watched and self._left > 0

    def _refuse_what_is_wrong(self, step: int) -> None:
        if self._loss.problem:
            raise PluginError(self._loss.problem)
        after = bit_sums(self._parameters)
        changed = [name for name in after if after[name] != self._before[name]]
        if changed:
            more = and_more(len(changed), 1)
            raise PluginError(
                f"step {step}: {changed[0]}{more} changed while gradients were computed. Only the step of "
                f"{self._optimizer} may change parameters, which the engine calls after gradients are summed over "
                "microbatches and ranks and are clipped. This is a bug in the optimizer if it updates in backward, and "
                "otherwise in the model"
            )


def bit_sums(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The sum of the bits of each tensor's elements on this rank, so that no difference is lost in rounding. The host
    waits once for each device."""
    on_device: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        values = plain_values(tensor.detach())
        local = local_tensor(values)
        total = local.contiguous().view(_INTEGERS[local.element_size()]).sum(dtype=torch.int64)
        on_device.setdefault(local.device, {})[name] = total
    return {
        name: total
        for sums in on_device.values()
        for name, total in zip(sums, torch.stack([*sums.values()]).tolist(), strict=True)
    }


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


class FirstSave:
    """All ranks call the same methods at the same steps.

    Args:
        log: prints a line on rank 0.
    """

    def __init__(self, built: Built, log: Callable[[str], None]) -> None:
        self._optimizer = built.optimizer
        self._words = built.optimizer_words
        self._parameters = built.model.parameters
        self._log = log
        self._updated: set[str] = set()
        self._has_updated = self._is_done = False

    def note_update(self, names: Collection[str]) -> None:
        """The parameters that had a gradient in an optimizer's step."""
        self._has_updated = True
        if not self._is_done and len(self._updated) < len(self._parameters):
            self._updated.update(names)

    def check(self) -> None:
        """Before the first checkpoint after an update. It also says which parameters have no state.

        Raises:
            PluginError: there is state that a resumed run could not be given as it was.
        """
        if self._is_done or not self._has_updated:
            return
        self._is_done = True
        own = self._look()
        found = [own] * dist.get_world_size()
        if dist.get_world_size() > 1:
            dist.all_gather_object(found, own)
        problems = [problem for one in found for problem in one.problems] or _differing(found)
        if problems:
            sentence = f"{self._words} keeps {problems[0]}. This is a bug in the optimizer."
            raise PluginError("" if dist.get_rank() else sentence)
        updated, missing = ({name for one in found for name in getattr(one, key)} for key in ("updated", "missing"))
        if missing:
            self._tell(sorted(missing), len(updated))

    def _look(self) -> _Own:
        problems, plain = [], {}
        for name, parameter in self._parameters.items():
            for slot, value in self._optimizer.state.get(parameter, {}).items():
                key = f"the state {slot!r} of {name}"
                if not isinstance(value, torch.Tensor):
                    continue
                if not isinstance(value, DTensor):
                    plain[key] = value
                if isinstance(value, DTensor) or isinstance(self._optimizer, StateLayout):
                    empty = empty_slot(self._optimizer, parameter, slot, value.shape, value.dtype)
                    problems += _laid_out_otherwise(key, value, empty)
        sums = bit_sums(plain) if dist.get_world_size() > 1 else {}
        return _Own(
            problems,
            {key: (tuple(plain[key].shape), str(plain[key].dtype), total) for key, total in sums.items()},
            self._updated,
            {name for name in self._updated if not self._optimizer.state.get(self._parameters[name])},
        )

    def _tell(self, missing: Sequence[str], n_updated: int) -> None:
        names = ", ".join(missing[:_LISTED]) + and_more(len(missing), _LISTED)
        whose = f"{len(missing)} of the {n_updated} parameters" if len(missing) < n_updated else "any of the parameters"
        own = _holding_tensors(self._optimizer, {id(parameter) for parameter in self._parameters.values()})
        where = f"; its attribute {' and '.join(own)} holds tensors, which are not saved" if own else ""
        self._log(
            f"{self._words} has no state for {whose} that it has updated ({names}){where}. Only what stands in "
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
