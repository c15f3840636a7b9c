"""Samples by global position."""

import numpy as np
import pytest

from forge_core.data.loader import evaluation_batches
from forge_core.data.stream import SampleStream
from forge_core.train.sources import entries_of


class NumberedSource:
    """Sample i is the tokens i·10, i·10 + 1, …"""

    vocab_size = 10**6
    tokenizer = None
    fingerprint = "numbered"

    def __init__(self, samples, seq_len=4):
        self.samples, self.seq_len = samples, seq_len

    def __len__(self):
        return self.samples

    def read(self, indices):
        assert indices.dtype == np.int64
        tokens = indices[:, None] * 10 + np.arange(self.seq_len)
        return {"tokens": tokens, "targets": tokens + 1}


@pytest.mark.parametrize("samples", [1, 2, 7, 511, 512, 513, 1300])
def test_each_epoch_has_every_sample_once_and_its_own_order(samples):
    stream = SampleStream(NumberedSource(samples), seed=1, shuffle=True)

    epochs = stream.indices(np.arange(3 * samples)).reshape(3, samples)

    np.testing.assert_array_equal(np.sort(epochs, axis=1), np.tile(np.arange(samples), (3, 1)))
    if samples > 7:
        assert not np.array_equal(epochs[0], epochs[1])
        assert not np.array_equal(epochs[0], np.arange(samples))


def test_without_shuffling_samples_come_in_their_order_again_and_again():
    stream = SampleStream(NumberedSource(5), seed=1, shuffle=False)

    np.testing.assert_array_equal(stream.indices(np.arange(12)), np.arange(12) % 5)


def test_a_sample_depends_on_its_position_and_the_seed_alone():
    n = 1300
    positions = np.random.default_rng(0).integers(0, 5 * n, 400)
    whole = SampleStream(NumberedSource(n), seed=9, shuffle=True).indices(np.arange(5 * n))

    in_parts = SampleStream(NumberedSource(n), seed=9, shuffle=True)

    np.testing.assert_array_equal(in_parts.indices(positions), whole[positions])
    np.testing.assert_array_equal(in_parts.read(positions)["tokens"][:, 0], whole[positions] * 10)
    other = SampleStream(NumberedSource(n), seed=10, shuffle=True).indices(np.arange(5 * n))
    assert np.count_nonzero(other == whole) < 30


def test_a_position_far_out_is_found_at_once():
    n = 10**15
    stream = SampleStream(NumberedSource(n), seed=0, shuffle=True)

    far = stream.indices(np.arange(1000) + 3 * n - 500)

    assert np.unique(far).size == 1000
    assert far.min() >= 0
    assert far.max() < n


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_stream_without_stretches_moves_up_what_comes_after_them(shuffle):
    whole = SampleStream(NumberedSource(50), seed=3, shuffle=shuffle)
    expected = whole.indices(np.arange(150)).tolist()
    stream = whole

    for start, stop in [(60, 70), (10, 20), (10, 11), (20, 22), (5, 12), (45, 55)]:  # also next to and around others
        del expected[start:stop]
        stream = stream.without(start, stop)

        assert stream.indices(np.arange(100)).tolist() == expected[:100]
    again = SampleStream(NumberedSource(50), seed=3, shuffle=shuffle, left_out=stream.left_out)
    assert again.indices(np.arange(100)).tolist() == expected[:100]
    assert stream.left_out == tuple(sorted(stream.left_out))
    assert all(stop <= start for (_, stop), (start, _) in zip(stream.left_out, stream.left_out[1:], strict=False))


def test_where_a_position_is_in_the_whole_stream_is_known():
    stream = SampleStream(NumberedSource(50), seed=3, shuffle=True).without(10, 20)

    assert stream.numbers(np.array([9, 10, 30])).tolist() == [9, 20, 40]
    assert stream.numbers_of(5, 15) == (5, 24)


class OwnOrder:
    """Position p is the tokens p·10, …; it has no length."""

    vocab_size, tokenizer, fingerprint = 10**6, None, "own order"

    def read_at(self, positions):
        tokens = positions[:, None] * 10 + np.arange(4)
        return {"tokens": tokens, "targets": tokens + 1}


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_source_with_an_order_of_its_own_is_asked_for_positions_of_the_whole_stream(shuffle):
    stream = SampleStream(OwnOrder(), seed=1, shuffle=shuffle).without(3, 5)

    read = stream.read(np.array([0, 2, 3, 10**12]))["tokens"][:, 0] // 10

    np.testing.assert_array_equal(read, [0, 2, 5, 10**12 + 2])


class RowsWithoutTokens:
    """Sample i has i + 1 rows, and padding."""

    vocab_size, tokenizer, fingerprint = 1, None, "rows"
    counted_in = "rows"

    def __len__(self):
        return 4

    def read(self, indices):
        positions = np.where(np.arange(4) <= indices[:, None], np.arange(4), -1)
        return {"rows": np.zeros((len(indices), 4, 7), np.float32), "positions": positions}


def test_a_source_without_tokens_is_counted_in_its_rows():
    batch = SampleStream(RowsWithoutTokens(), seed=1, shuffle=False).read(np.arange(4))

    assert batch["tokens"].shape == (4, 4)
    assert (batch["targets"] != -100).sum(1).tolist() == [1, 2, 3, 4]
    (last,) = evaluation_batches(RowsWithoutTokens(), batch_size=8, dp_rank=0, dp_size=1, samples=3)
    assert (last["targets"] != -100).sum(1).tolist() == [1, 2, 3, 0, 0, 0, 0, 0]
    assert entries_of(RowsWithoutTokens(), 4).keys() == {"tokens", "targets", "rows", "positions"}
