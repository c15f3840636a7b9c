"""Which learning rate and weight decay each parameter gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor import DTensor

from forge_core.contracts.model import PARAMETER_ROLES
from forge_core.contracts.optimizer import NamedParameter
from forge_core.errors import ConfigError, nearest_hint
from forge_plugins_optim.config import MatrixRules
from forge_plugins_optim.name_patterns import first_match, why_idle


def parameter_groups(parameters: Sequence[NamedParameter], rules: MatrixRules) -> list[dict[str, Any]]:
    """The ``params`` of a ``torch.optim.Optimizer``: dictionaries with ``params``, ``lr``, ``weight_decay``.

    Every parameter is in exactly one of them. Parameters on different meshes are apart, since torch's fused and foreach
    kernels take lists of tensors of one mesh only.

    Args:
        parameters: all that are to be optimized.
        rules: learning rate and weight decay by role, and exceptions to them; the first group whose pattern matches a
            name takes the parameter.

    Raises:
        ConfigError: a group takes no parameter, or has no effect; or a parameter has a role without a rule.
    """
    decayed = rules.decayed_roles
    lr, groups = rules.lr, rules.groups
    taken = [0] * len(groups)
    gathered: dict[tuple[Any, ...], list[Any]] = {}
    for entry in parameters:
        own_lr, own_decay = lr, rules.weight_decay if entry.role in decayed else 0.0
        index = first_match(entry.name, groups)
        if index is not None:
            group = groups[index]
            taken[index] += 1
            own_lr = group.lr if group.lr is not None else lr * (1.0 if group.lr_scale is None else group.lr_scale)
            own_decay = own_decay if group.weight_decay is None else group.weight_decay
        is_decided = index is not None and groups[index].weight_decay is not None
        if entry.role not in PARAMETER_ROLES and rules.weight_decay and not is_decided:
            raise ConfigError(
                f"optimizer.weight_decay: {entry.name} has the role {entry.role!r}, for which there is no rule"
                f"{nearest_hint(entry.role, PARAMETER_ROLES)}; known are {', '.join(PARAMETER_ROLES)}. Or set its "
                "weight_decay in optimizer.groups"
            )
        mesh = entry.parameter.device_mesh if isinstance(entry.parameter, DTensor) else None
        gathered.setdefault((own_lr, own_decay, mesh), []).append(entry.parameter)
    elsewhere = parameters[0].elsewhere if parameters else ()
    names = [*(entry.name for entry in parameters), *sorted(elsewhere)]
    taken_elsewhere = {first_match(name, groups) for name in elsewhere}
    for index, (group, count) in enumerate(zip(groups, taken, strict=True)):
        if count == 0 and index not in taken_elsewhere:
            raise ConfigError(why_idle("optimizer.groups", group.pattern, names, "groups"))
        kept = (name for name in names if first_match(name, groups) == index)
        if group.is_exemption and all(first_match(name, groups[index + 1 :]) is None for name in kept):
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
