"""Checks, before the first forward, that a store can keep what it is to keep of each sample."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch.distributed as dist

from forge_core.contracts.batch import DescribedSource
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
    log(f"counting the tokens that are kept of {len(ids):,} samples")
    for numbers in _own_batches(len(ids), batch_size, mesh, log):
        batch = read_batch(source, numbers)
        first = batch.get("tokens", next(iter(batch.values())))
        lengths = reduction.kept_tokens(batch, token_mask(batch, len(first), first.shape[1])).sum(1).numpy()
        short = lengths < needed
        if short.any():
            lacking += int(short.sum())
            first_short = min(first_short, (int(numbers[short][0]), int(lengths[short][0])))
    found: list[Any] = [None] * mesh.world_size
    dist.all_gather_object(found, (lacking, first_short))
    lacking, (number, length) = sum(one for one, _ in found), min(one for _, one in found)
    if lacking:
        raise ConfigError(reduction.lack(f"sample {ids[number]}", length, lacking - 1))


@runtime_checkable
class CountsTiles(Protocol):
    """A data source that knows how many images or tiles its samples have without decoding them."""

    def n_tiles(self, indices: np.ndarray) -> np.ndarray:
        """How many each of these samples has, ``(n,)`` int64."""
        ...


def refuse_several_tiles(
    source: DataSource,
    sites: Sequence[str],
    ids: Sequence[Any] | np.ndarray,
    *,
    batch_size: int,
    mesh: Mesh,
    log: Callable[[str], None],
) -> None:
    """Count the images or tiles of all samples, and run no model. A source that does not know them is read, a part by
    each rank. The ranks call this together.

    Args:
        sites: those of this rank that have a row for each tile.
        ids: of the samples, by their numbers in the source.

    Raises:
        ConfigError: there are such sites, and a sample has several tiles.
    """
    gathered: list[Any] = [None] * mesh.world_size
    dist.all_gather_object(gathered, list(sites))
    wanted = [name for names in gathered for name in names]
    if not wanted:
        return
    several = _first_with_several(source, len(ids), batch_size=batch_size, mesh=mesh, log=log)
    if several is not None:
        number, n_tiles = several
        raise ConfigError(
            f"site {wanted[0]}: a store has a row for each sample, and sample {ids[number]} has {n_tiles} images or "
            "tiles; leave the site out, or read it with run.observe"
        )


def _first_with_several(
    source: DataSource, n_samples: int, *, batch_size: int, mesh: Mesh, log: Callable[[str], None]
) -> tuple[int, int] | None:
    """The number of the first sample with several tiles, and how many; ``None``: each has one, or the source does not
    say which of its entries have tiles."""
    if isinstance(source, CountsTiles):
        counts = source.n_tiles(np.arange(n_samples))
        return next(((int(number), int(counts[number])) for number in np.flatnonzero(counts > 1)), None)
    described = source.entries() if isinstance(source, DescribedSource) else {}
    along = {name: entry.dims.index("tile") for name, entry in described.items() if "tile" in entry.dims}
    if not along:
        return None
    log(f"counting the images of {n_samples:,} samples")

    def most(numbers: np.ndarray) -> int:
        batch = read_batch(source, numbers)
        return max((batch[name].shape[dim] for name, dim in along.items() if name in batch), default=1)

    own: tuple[int, int] | None = None
    for numbers in _own_batches(n_samples, batch_size, mesh, log):
        if most(numbers) > 1:  # of a batch that is filled up, perhaps of none
            each = ((int(number), most(np.array([number]))) for number in numbers)
            own = next((one for one in each if one[1] > 1), None)
        if own is not None:
            break
    found: list[Any] = [None] * mesh.world_size
    dist.all_gather_object(found, own)
    return min((one for one in found if one is not None), default=None)


def _own_batches(n_samples: int, batch_size: int, mesh: Mesh, log: Callable[[str], None]) -> Iterator[np.ndarray]:
    """The numbers of the samples of each batch that this rank looks at. It tells how far it is."""
    said = time.monotonic()
    for start in range(0, n_samples, batch_size)[mesh.rank :: mesh.world_size]:
        yield np.arange(start, min(start + batch_size, n_samples))
        if time.monotonic() - said > _SECONDS:
            said = time.monotonic()
            log(f"counted them in {start:,} samples of {n_samples:,}")
