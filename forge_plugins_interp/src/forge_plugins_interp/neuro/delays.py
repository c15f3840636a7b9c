"""Features of earlier moments, for recordings that answer late, such as fMRI (a finite impulse response)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from forge_core.errors import ConfigError


def delayed(x: torch.Tensor, delays: Sequence[int], groups: np.ndarray | None = None) -> torch.Tensor:
    """The features of the rows ``delays`` before each row, side by side; a linear map of them is a finite impulse
    response of each feature (Huth et al. 2016).

    Args:
        x: ``(n, p)``, in the order of time within each group.
        delays: rows, from 0.
        groups: ``(n,)``, which know nothing of each other, such as stories.

    Returns:
        ``(n, p · delays)``: the features at the first delay, then those at the second. Where a group has no row so much
        earlier, the mean of all rows stands, which is 0 once features are centred.

    Raises:
        ConfigError: a delay is as long as the longest group, so that it has no features at all.
    """
    names = np.zeros(len(x)) if groups is None else groups
    rows_of = [torch.from_numpy(np.flatnonzero(names == name)) for name in np.unique(names)]
    longest = max(map(len, rows_of))
    if max(delays) >= longest:
        raise ConfigError(
            f"delay {max(delays)}: the longest group has {longest} rows, so that none has one so much earlier"
        )
    found = x.mean(0).expand(len(delays), *x.shape).clone()
    for number, delay in enumerate(delays):
        for rows in rows_of:
            found[number, rows[delay:]] = x[rows[: len(rows) - delay]]
    return found.transpose(0, 1).flatten(1)
