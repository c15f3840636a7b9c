"""A store for torch: samples by number, rows in random order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from forge_core.errors import ConfigError
from forge_plugins_interp.store import Manifest, Store, StoredSite, write_index, write_shard
from forge_plugins_interp.store_readers import SampleDataset, shuffled

LENGTHS = np.array([3, 1, 4, 1, 5, 9, 2])


@pytest.fixture
def store(tmp_path):
    """Of seven samples in three shards: a row of ``tokens.*`` is its number, and one of ``last`` that of its sample."""
    sites = {
        "tokens.a": StoredSite(dims=("token", "width"), sizes=(2,), dtype="float32"),
        "last": StoredSite(dims=("sample", "width"), sizes=(1,), dtype="float32"),
    }
    manifest = Manifest(sites=sites, n_samples=7, shard_samples=3, origin={}, complete=True)
    numbers = torch.arange(LENGTHS.sum(), dtype=torch.float32)[:, None].repeat(1, 2)
    ends = np.concatenate([[0], np.cumsum(LENGTHS)])
    for shard in range(manifest.n_shards()):
        samples = manifest.samples_of(shard)
        rows = numbers[ends[samples.start] : ends[samples.stop]]
        write_shard(tmp_path, "tokens.a", shard, {"values": rows})
        write_shard(tmp_path, "last", shard, {"values": torch.tensor(samples, dtype=torch.float32)[:, None]})
    write_index(tmp_path, {"stimulus_id": np.array([f"s{number}" for number in range(7)]), "length": LENGTHS})
    manifest.write(tmp_path)
    return Store(tmp_path)


def test_a_loader_reads_each_sample_with_its_id(store):
    samples = list(DataLoader(SampleDataset(store), batch_size=None, shuffle=True))

    assert sorted(sample["stimulus_id"] for sample in samples) == [f"s{number}" for number in range(7)]
    for sample in samples:
        number = int(sample["stimulus_id"][1:])
        assert sample["last"].tolist() == [number]
        first = LENGTHS[:number].sum()
        assert sample["tokens.a"][:, 0].tolist() == [*range(first, first + LENGTHS[number])]
    with pytest.raises(IndexError, match="sample 7 of 7"):
        SampleDataset(store)[7]
    with pytest.raises(ConfigError, match="no site 'lasd'"):
        SampleDataset(store, ["lasd"])


@pytest.mark.parametrize("buffer_rows", [1, 8, 1000])
def test_rows_come_once_each_in_an_order_of_their_seed(store, buffer_rows):
    def epoch(seed):
        return list(shuffled(store, "tokens.a", 4, seed=seed, buffer_rows=buffer_rows))

    batches = epoch(0)

    n_rows = int(LENGTHS.sum())
    assert [len(batch) for batch in batches] == [4] * (n_rows // 4) + [n_rows % 4]
    rows = torch.cat(batches)[:, 0].tolist()
    assert sorted(rows) == [*range(n_rows)] != rows
    assert torch.equal(torch.cat(epoch(0)), torch.cat(batches))
    assert not torch.equal(torch.cat(epoch(1)), torch.cat(batches))


def test_a_large_buffer_mixes_shards(store):
    first, *_ = shuffled(store, "tokens.a", 12, seed=0)

    ends = np.cumsum([8, 15, 2])
    assert {int(np.searchsorted(ends, row, side="right")) for row in first[:, 0].tolist()} == {0, 1, 2}


def test_a_batch_of_no_rows_is_refused(store):
    with pytest.raises(ConfigError, match="rows = 0: a batch has 1 row or more"):
        next(shuffled(store, "last", 0, seed=0))
