"""Parameters that are several matrices, one above the other."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping, Sequence

import torch

from forge_core.contracts.optimizer import NamedParameter
from forge_core.errors import ConfigError
from forge_plugins_optim.config import StackedMatrices


def rows_of_stacked(
    parameters: Sequence[NamedParameter], stacked: Sequence[StackedMatrices]
) -> Mapping[torch.Tensor, tuple[int, ...]]:
    """The rows of each matrix of those parameters that have several.

    Raises:
        ConfigError: a pattern takes no parameter, or rows do not add up to a parameter's.
    """
    found: dict[torch.Tensor, tuple[int, ...]] = {}
    for entry in parameters:
        one = _first_match(entry.name, stacked)
        if one is None:
            continue
        rows = entry.parameter.shape[-2]
        if sum(one.rows) != rows:
            raise ConfigError(
                f"optimizer: stacked of muon: rows = {[*one.rows]} add up to {sum(one.rows)}, and {entry.name}, which "
                f"{one.pattern!r} matches, has {rows} rows"
            )
        found[entry.parameter] = one.rows
    names = [*(entry.name for entry in parameters), *(sorted(parameters[0].elsewhere) if parameters else ())]
    taking = [_first_match(name, stacked) for name in names]
    for one in stacked:
        if one not in taking and fnmatch.filter(names, one.pattern):
            raise ConfigError(
                f"optimizer: stacked of muon: the pattern {one.pattern!r} takes no parameter, because those before it "
                "take all that it matches. The first match wins: put the narrower pattern first."
            )
        if one not in taking:
            nearest = difflib.get_close_matches(one.pattern, names, n=3, cutoff=0.3) or names[:3]
            raise ConfigError(
                f"optimizer: stacked of muon: the pattern {one.pattern!r} matches no parameter. The nearest names are "
                f"{', '.join(nearest)}. ('*' stands for anything, dots included.)"
            )
    return found


def _first_match(name: str, stacked: Sequence[StackedMatrices]) -> StackedMatrices | None:
    return next((one for one in stacked if fnmatch.fnmatchcase(name, one.pattern)), None)
