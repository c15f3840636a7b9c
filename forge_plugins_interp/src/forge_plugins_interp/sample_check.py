"""The check, before the first forward, that each sample has the tokens that a store is to keep of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from forge_core.contracts.data_source import DataSource
from forge_core.distributed.mesh import Mesh
from forge_core.errors import ConfigError
from forge_plugins_interp.reduction import Reduction, token_mask
from forge_plugins_interp.session import read_batch

_SECONDS = 10.0
"""Between two lines that say how far it is."""


def refuse_short_samples(
    source: DataSource,
    reduction: Reduction,
    ids: Sequence[Any] | np.ndarray,
    *,
    batch_size: int,
    mesh: Mesh,
    log: Callable[[str], None],
) -> None:
    """Read the entries of all samples, a batch at a time, and run no model. The ranks share the batches out, and call
    this together. Where any number of tokens will do, none is read.

    Args:
        ids: of the samples, by their numbers in the source.

    Raises:
        ConfigError: a sample has fewer tokens than ``reduction`` needs of it.
    """
    needed = reduction.tokens_needed()
    if needed == 0:
        return
    lacking, first_short = 0, (len(ids), 0)
    starts = range(0, len(ids), batch_size)[mesh.rank :: mesh.world_size]
    log(f"counting the tokens that are kept of {len(ids):,} samples")
    said = time.monotonic()
    for start in starts:
        numbers = np.arange(start, min(start + batch_size, len(ids)))
        batch = read_batch(source, numbers)
        first = batch.get("tokens", next(iter(batch.values())))
        lengths = reduction.kept_tokens(batch, token_mask(batch, len(first), first.shape[1])).sum(1).numpy()
        short = lengths < needed
        if short.any():
            lacking += int(short.sum())
            first_short = min(first_short, (int(numbers[short][0]), int(lengths[short][0])))
        if time.monotonic() - said > _SECONDS:
            said = time.monotonic()
            log(f"counted them in {start:,} samples of {len(ids):,}")
    found: list[Any] = [None] * mesh.world_size
    dist.all_gather_object(found, (lacking, first_short))
    lacking, (number, length) = sum(one for one, _ in found), min(one for _, one in found)
    if lacking:
        raise ConfigError(reduction.lack(f"sample {ids[number]}", length, lacking - 1))
