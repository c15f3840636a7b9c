"""The data source ``activation_store``: rows of a store, in random order, as sequences of ``seq_len`` rows."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from forge_core.contracts.batch import Entry
from forge_core.contracts.data_source import Split
from forge_core.errors import ConfigError, nearest_hint
from forge_plugins_interp.autoencoders.config import ActivationStoreConfig
from forge_plugins_interp.store import Manifest, Store

SCALED_BY = 16_384
"""Rows, the first ones, whose mean norm decides the scale."""


def width_of(config: ActivationStoreConfig, key: str) -> int | None:
    """Features of a site of the store; ``None`` where the store is not there yet.

    Raises:
        ConfigError: the store has no such site.
    """
    if not (Path(config.path) / "manifest.json").exists():
        return None
    sites, name = Manifest.read(Path(config.path)).sites, getattr(config, key)
    if name not in sites:
        hint = nearest_hint(name, sites)
        raise ConfigError(f"data.{key}: {config.path} has no site {name!r}{hint} It has {', '.join(sites)}")
    return math.prod(sites[name].sizes)


def held_out_samples(config: ActivationStoreConfig, n_samples: int) -> int:
    """How many of the store's samples are held out; these are its last ones."""
    return max(1, round(config.validation * n_samples)) if config.validation > 0 else 0


class ActivationRows:
    """A ``DataSource``. A batch has ``activation`` ``(B, S, width)`` fp32, for a transcoder ``target_activation``, and
    ``scales`` ``(B, 2)`` fp32, by which these were divided.
    """

    counted_in = "activation"
    tokenizer = None
    vocab_size = 1

    def __init__(self, config: ActivationStoreConfig, /, *, seq_len: int, split: Split, seed: int) -> None:
        self._entries = config.entries()
        store = Store(config.path)
        names = [config.site, *([config.target_site] if config.target_site else [])]
        for key, name in zip(("site", "target_site"), names, strict=False):
            width_of(config, key)
            own, other = (store.manifest.sites[one].dims[0] for one in (name, names[0]))
            if own != other:
                raise ConfigError(f"data.{key}: {name} has a row a {own}, and {names[0]} a row a {other}")
        self._values = [[shard.flatten(1) for shard in store.shards(name)] for name in names]
        self._starts = np.cumsum([0, *(len(shard) for shard in self._values[0])])
        rows = self._rows(store, config, split)
        self.scales = [_scale(values) if config.scale else 1.0 for values in self._values]
        self._order = rows.start + np.random.default_rng(seed).permutation(len(rows))
        self._seq_len, self._length = seq_len, len(rows) // seq_len
        if self._length == 0:
            raise ConfigError(
                f"data: {config.path} has {len(rows)} rows for {split}, and train.seq_len = {seq_len} rows are a sample"
            )
        facts = [json.dumps(store.manifest.origin, sort_keys=True, default=str), names, rows.start, rows.stop, seq_len]
        self.fingerprint = hashlib.sha256(json.dumps([*facts, seed, config.scale]).encode()).hexdigest()

    def _rows(self, store: Store, config: ActivationStoreConfig, split: Split) -> range:
        """The rows of the split: the store's last samples are held out."""
        n_held = held_out_samples(config, len(store))
        is_token = store.manifest.sites[config.site].dims[0] == "token"
        per_sample = store.columns["length"] if is_token else np.ones(len(store), np.int64)
        border, n_rows = int(per_sample[: len(store) - n_held].sum()), int(per_sample.sum())
        if split == "all":
            return range(n_rows)
        if split == "train":
            return range(border)
        if n_held == 0:
            raise ConfigError("data.validation = 0 holds nothing out; set it to a share of the samples, such as 0.05")
        return range(border, n_rows)

    def __len__(self) -> int:
        return self._length

    def entries(self) -> Mapping[str, Entry]:
        """Same as ``DescribedSource.entries``."""
        return self._entries

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Same as ``DataSource.read``."""
        places = indices[:, None] * self._seq_len + np.arange(self._seq_len)
        rows = self._order[places]
        found = [self._gather(number, rows) for number in range(len(self._values))]
        names = ("activation", "target_activation")
        scales = np.array([*self.scales, 1.0][:2], np.float32)
        return {
            **dict(zip(names, found, strict=False)),
            "scales": np.tile(scales, (len(indices), 1)),
        }

    def _gather(self, number: int, rows: np.ndarray) -> np.ndarray:
        values = self._values[number]
        flat = rows.ravel()
        found = np.empty((len(flat), values[0].shape[1]), np.float32)
        shards = np.searchsorted(self._starts, flat, side="right") - 1
        for shard in np.unique(shards):
            here = shards == shard
            chosen = values[shard][torch.from_numpy(flat[here] - self._starts[shard])]
            found[here] = chosen.float().numpy()
        found /= self.scales[number]
        return found.reshape(*rows.shape, -1)


def _scale(shards: list[torch.Tensor]) -> float:
    """That of the first rows."""
    first, left = [], SCALED_BY
    for shard in shards:
        first.append(shard[:left].float())
        left -= len(first[-1])
        if left <= 0:
            break
    return mean_scale(torch.cat(first))


def mean_scale(rows: torch.Tensor) -> float:
    """The mean norm of rows ``(n, width)`` over √width; 1 where all are zero, which have no other scale."""
    return float(rows.norm(dim=1).double().mean()) / math.sqrt(rows.shape[1]) or 1.0
