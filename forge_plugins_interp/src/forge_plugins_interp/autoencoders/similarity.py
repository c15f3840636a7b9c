"""How alike two dictionaries are.

Shapes: F, G = latents of the two, D = width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from forge_core.errors import ConfigError

_ROWS = 4096
"""Directions that are compared at a time."""


@torch.no_grad()
def mmcs(first: torch.Tensor, second: torch.Tensor) -> float:
    """The mean max cosine similarity (Sharkey et al. 2022): of each direction of ``first``, the cosine with the one of
    ``second`` that is most alike, and the mean of that. It is 1 where each has its like, and not symmetric: a larger
    dictionary may have all directions of a smaller one, and others.

    Args:
        first: ``(F, D)``, such as ``Dictionary.decoder``, or directions that were planted; of any norms.
        second: ``(G, D)``.

    Raises:
        ConfigError: the two have different widths.
    """
    if first.shape[1] != second.shape[1]:
        raise ConfigError(f"mmcs: directions of {first.shape[1]} and of {second.shape[1]} features have no cosine")
    columns = F.normalize(second.float(), dim=-1).T
    best = [(F.normalize(rows.float(), dim=-1) @ columns).amax(1) for rows in torch.split(first, _ROWS)]
    return float(torch.cat(best).double().mean())
