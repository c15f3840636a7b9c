"""Which learning rate and weight decay each parameter gets."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor import DTensor

from forge_core.contracts.optimizer import NamedParameter
from forge_core.errors import ConfigError
from forge_plugins_optim.config import MatrixRules, ParameterGroup


def parameter_groups(parameters: Sequence[NamedParameter], rules: MatrixRules) -> list[dict[str, Any]]:
    """The ``params`` of a ``torch.optim.Optimizer``: dictionaries with ``params``, ``lr``, ``weight_decay``.

    Every parameter is in exactly one of them. Parameters on different meshes are apart, since torch's fused and foreach
    kernels take lists of tensors of one mesh only.

    Args:
        parameters: all that are to be optimized.
        rules: learning rate and weight decay by role, and exceptions to them; the first group whose pattern matches a
            name takes the parameter.

    Raises:
        ConfigError: a group takes no parameter, or has no effect.
    """
    decayed = rules.decayed_roles
    lr, groups = rules.lr, rules.groups
    taken = [0] * len(groups)
    gathered: dict[tuple[Any, ...], list[Any]] = {}
    for entry in parameters:
        own_lr, own_decay = lr, rules.weight_decay if entry.role in decayed else 0.0
        index = _first_match(entry.name, groups)
        if index is not None:
            group = groups[index]
            taken[index] += 1
            own_lr = group.lr if group.lr is not None else lr * (1.0 if group.lr_scale is None else group.lr_scale)
            own_decay = own_decay if group.weight_decay is None else group.weight_decay
        mesh = entry.parameter.device_mesh if isinstance(entry.parameter, DTensor) else None
        gathered.setdefault((own_lr, own_decay, mesh), []).append(entry.parameter)
    elsewhere = parameters[0].elsewhere if parameters else ()
    names = [*(entry.name for entry in parameters), *sorted(elsewhere)]
    taken_elsewhere = {_first_match(name, groups) for name in elsewhere}
    for index, (group, count) in enumerate(zip(groups, taken, strict=True)):
        if count == 0 and index not in taken_elsewhere:
            raise ConfigError(_idle(group, names))
        kept = (name for name in names if _first_match(name, groups) == index)
        if group.is_exemption and all(_first_match(name, groups[index + 1 :]) is None for name in kept):
            raise ConfigError(
                f"optimizer.groups: the group with the pattern {group.pattern!r} has no effect: it sets neither lr, "
                "lr_scale nor weight_decay, and no group after it would take what it takes"
            )

    result = [
        {"params": members, "lr": own_lr, "weight_decay": own_decay}
        for (own_lr, own_decay, _), members in gathered.items()
    ]
    grouped = [id(parameter) for group in result for parameter in group["params"]]
    assert sorted(grouped) == sorted({id(entry.parameter) for entry in parameters})
    return result


def _first_match(name: str, groups: Sequence[ParameterGroup]) -> int | None:
    """The index of the group that takes the parameter of this name."""
    return next((i for i, group in enumerate(groups) if fnmatch.fnmatchcase(name, group.pattern)), None)


def _idle(group: ParameterGroup, names: Sequence[str]) -> str:
    """Why ``group`` takes no parameter."""
    matches = fnmatch.filter(names, group.pattern)
    if matches:
        return (
            f"optimizer.groups: the pattern {group.pattern!r} takes no parameter, because groups before it take all "
            f"that it matches, such as {matches[0]!r}. The first match wins: put the narrower pattern first."
        )
    nearest = difflib.get_close_matches(group.pattern, names, n=3, cutoff=0.3) or names[:3]
    return (
        f"optimizer.groups: the pattern {group.pattern!r} matches no parameter. The nearest names are "
        f"{', '.join(nearest)}. ('*' stands for anything, dots included.)"
    )
