"""An optimizer's groups, split by what their parameters need."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import nn


def split_groups(optimizer: torch.optim.Optimizer, of: Callable[[nn.Parameter], Hashable]) -> None:
    """Split the groups of an optimizer, or of its members, until ``of`` is equal for all parameters of one."""
    members = members_of(optimizer)
    for one in members:
        one.param_groups[:] = [part for group in one.param_groups for part in _split(group, of)]
    if members != [optimizer]:
        optimizer.param_groups[:] = [group for one in members for group in one.param_groups]


def members_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers that one is made of, which may be made of others in their turn, or that one alone."""
    return [own for one in getattr(optimizer, "members", ()) for own in members_of(one)] or [optimizer]


def _split(group: dict[str, Any], of: Callable[[nn.Parameter], Hashable]) -> Iterator[dict[str, Any]]:
    alike: dict[Hashable, list[nn.Parameter]] = {}
    for parameter in group["params"]:
        alike.setdefault(of(parameter), []).append(parameter)
    if len(alike) < 2:
        yield group
    else:
        yield from ({**group, "params": parameters} for parameters in alike.values())
