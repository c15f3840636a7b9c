"""Parameters that are several matrices, one above the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from forge_core.contracts.optimizer import NamedParameter
from forge_core.errors import ConfigError
from forge_plugins_optim.config import StackedMatrices
from forge_plugins_optim.name_patterns import first_match, why_idle


def rows_of_stacked(
    parameters: Sequence[NamedParameter], stacked: Sequence[StackedMatrices]
) -> Mapping[torch.Tensor, tuple[int, ...]]:
    """The rows of each matrix of those parameters that have several.

    Raises:
        ConfigError: a pattern takes no parameter, or rows do not add up to a parameter's.
    """
    found: dict[torch.Tensor, tuple[int, ...]] = {}
    for entry in parameters:
        index = first_match(entry.name, stacked)
        if index is None:
            continue
        one = stacked[index]
        rows = entry.parameter.shape[-2]
        if sum(one.rows) != rows:
            raise ConfigError(
                f"optimizer: stacked of muon: rows = {[*one.rows]} add up to {sum(one.rows)}, and {entry.name}, which "
                f"{one.pattern!r} matches, has {rows} rows"
            )
        found[entry.parameter] = one.rows
    names = [*(entry.name for entry in parameters), *(sorted(parameters[0].elsewhere) if parameters else ())]
    taking = {first_match(name, stacked) for name in names}
    for index, one in enumerate(stacked):
        if index not in taking:
            raise ConfigError(why_idle("optimizer: stacked of muon", one.pattern, names, "those"))
    return found
