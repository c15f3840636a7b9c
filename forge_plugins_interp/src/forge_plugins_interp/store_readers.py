"""A store for a training loop in torch: samples by number, and rows in random order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from forge_core.errors import ConfigError
from forge_plugins_interp.store import Store


class SampleDataset(Dataset[dict[str, Any]]):
    """The samples of a store for ``torch.utils.data.DataLoader``, which may read them in processes of its own.

    A sample has the values of each site, ``(length, …)`` or without positions ``(…)``, and its columns of the index:
    ``stimulus_id``, ``length`` and others. Samples differ in length, so that a loader of sites with positions needs a
    ``collate_fn``.

    Args:
        store: where they are.
        sites: those to read; all by default.

    Raises:
        ConfigError: a site is not in the store.
    """

    def __init__(self, store: Store, sites: Sequence[str] | None = None) -> None:
        self._store = store
        self._sites = store.sites if sites is None else [name for one in sites for name in store.chosen(one)]

    def __len__(self) -> int:
        return len(self._store)

    def __getitem__(self, sample: int) -> dict[str, Any]:
        """
        Raises:
            IndexError: there is no such sample.
        """
        values: dict[str, Any] = {site: self._store.read(site, sample) for site in self._sites}
        return values | {name: column[sample].item() for name, column in self._store.columns.items()}


def shuffled(store: Store, site: str, rows: int, *, seed: int, buffer_rows: int = 2**20) -> Iterator[torch.Tensor]:
    """The rows of a site in random order, each once, ``rows`` at a time; the last batch may have fewer.

    Shards are read in random order into a buffer, of which batches are drawn. Rows that are further apart in the store
    than the buffer is large mix by the order of shards alone.

    Args:
        store: where they are.
        site: its name.
        rows: of a batch, 1 or more.
        seed: of both orders. Another one gives another epoch.
        buffer_rows: of the buffer, which holds no fewer than a batch.

    Yields:
        ``(rows, …)``, copies.

    Raises:
        ConfigError: the site is not in the store, or ``rows`` is below 1.
    """
    if rows < 1:
        raise ConfigError(f"rows = {rows}: a batch has 1 row or more")
    generator = torch.Generator().manual_seed(seed)
    shards = iter(torch.randperm(store.manifest.n_shards(), generator=generator).tolist())
    held: list[torch.Tensor] = []
    n_held = 0
    while True:
        while n_held < max(rows, buffer_rows) and (shard := next(shards, None)) is not None:
            held.append(store.shard(site, shard))
            n_held += len(held[-1])
        if not n_held:
            return
        buffer = torch.cat(held)
        order = torch.randperm(n_held, generator=generator)
        # half of the buffer goes before more is read, so that each row is copied about twice
        n_drawn = n_held if n_held < max(rows, buffer_rows) else max(rows, n_held // 2 // rows * rows)
        for index in torch.split(order[:n_drawn], rows):
            yield buffer[index]
        held, n_held = [buffer[order[n_drawn:]]], n_held - n_drawn
