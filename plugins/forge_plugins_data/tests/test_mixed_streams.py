"""A mixture with streams: shares before any step, each stream once, the same samples from any state."""

import json
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest

from forge_core.data.stream import SampleStream
from forge_core.data.streams import StreamsByPosition
from forge_core.errors import ConfigError
from forge_plugins_data.interleaving import InterleavingInPhases
from forge_plugins_data.mixed_streams import MixedStreams
from forge_plugins_data.mixture import Mixture
from forge_plugins_data.mixture_parts import MixtureParts, Part


class Counting:
    """Sample ``k`` of stream ``s`` has the token ``base + 1000 · s + k``; a stream ends after ``length`` of them."""

    tokenizer = None

    def __init__(self, base, n_streams, length=900):
        self.vocab_size, self.fingerprint = 10**6, f"counting from {base}"
        self.base, self.n_streams, self.length, self.opened = base, n_streams, length, []

    def open(self, stream, state):
        self.opened.append(stream)
        for number in range(state["read"] if state else 0, self.length):
            tokens = np.array([self.base + 1000 * stream + number])
            yield {"tokens": tokens, "targets": tokens}, {"read": number + 1}


class Indexed:
    """Sample ``i`` has the token ``i``."""

    vocab_size, tokenizer, fingerprint = 1000, None, "indexed"

    def __len__(self):
        return 1000

    def read(self, indices):
        return {"tokens": indices[:, None].copy(), "targets": indices[:, None].copy()}


class Rows:
    """Rows of numbers, and no tokens."""

    vocab_size, tokenizer, fingerprint, counted_in = 1, None, "rows", "rows"

    def __len__(self):
        return 8

    def read(self, indices):
        return {"rows": np.ones((len(indices), 3, 2), np.float32)}


class StreamOfRows:
    """The same as streams."""

    vocab_size, tokenizer, fingerprint, counted_in, n_streams = 1, None, "stream of rows", "rows", 2

    def open(self, stream, state):
        for number in range(state["read"] if state else 0, 8):
            yield {"rows": np.zeros((3, 2), np.float32)}, {"read": number + 1}


def parts_of(sources):
    parts = [
        Part(SimpleNamespace(name=name, loss_weight=1.0), source, seed=3)
        for name, source in zip("abcd", sources, strict=False)
    ]
    return MixtureParts.of(parts, tuple(part.name for part in parts))


def mixed(sources, shares, phases=()):
    return MixedStreams(parts_of(sources), shares, phases)


def read(mixture, n):
    return StreamsByPosition(mixture).read_at(np.arange(n))


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.25, 0.75), (0.125, 0.875), (0.01, 0.99), (0.7, 0.3)])
@pytest.mark.parametrize("n_streams", [1, 2, 8])
def test_each_source_has_its_share_before_any_step_and_so_has_each_stream(shares, n_streams):
    n = 6000
    mixture = mixed([Counting(0, n_streams), Indexed()], shares)

    batch = read(mixture, n)
    of_a = np.cumsum(batch["source"] == 0)
    steps = np.arange(n_streams, n + 1, n_streams)

    assert np.abs(of_a[steps - 1] - shares[0] * steps).max() < 2
    for position in (0, 1, n_streams, 4095, 4097, n - 1):
        assert mixture.counts(position) == np.bincount(batch["source"][:position], minlength=2).tolist()
    own = np.bincount(np.arange(n)[batch["source"] == 0] % n_streams, minlength=n_streams)
    spread = 5 * np.sqrt(shares[0] * shares[1] * n / n_streams)  # of a coin that is thrown for each sample
    assert np.abs(own - shares[0] * n / n_streams).max() <= spread


def test_streams_go_on_in_their_order_and_indexed_samples_are_those_of_a_mixture_without_streams():
    sources = [Counting(10_000, 4), Indexed()]
    mixture, n = mixed(sources, (0.4, 0.6)), 400

    batch = read(mixture, n)
    tokens, source = batch["tokens"][:, 0], batch["source"]

    for stream in range(4):
        own = tokens[(np.arange(n) % 4 == stream) & (source == 0)]
        np.testing.assert_array_equal(own, 10_000 + 1000 * stream + np.arange(len(own)))
    plain = Mixture(parts_of([Indexed(), Indexed()]), (0.4, 0.6)).read_at(np.arange(n))
    expected = plain["tokens"][plain["source"] == 1][:, 0]
    np.testing.assert_array_equal(np.sort(tokens[source == 1]), np.sort(expected))


def test_streams_of_several_sources_are_shared_out_to_the_streams_of_the_mixture_and_take_turns():
    mixture = mixed([Counting(0, 6), Counting(100_000, 4)], (0.5, 0.5))
    assert mixture.n_streams == 2

    batch = read(mixture, 400)
    tokens, source, own = batch["tokens"][:, 0], batch["source"], np.arange(400) % 2

    for number, n in enumerate((6, 4)):
        for stream in range(2):
            found = tokens[(source == number) & (own == stream)] % 100_000
            turns = [*range(stream, n, 2)]
            np.testing.assert_array_equal(found // 1000, np.resize(turns, len(found)))
            np.testing.assert_array_equal(found % 1000, np.arange(len(found)) // len(turns))


def test_each_state_continues_the_stream_over_phases_and_ends_of_streams():
    def opened():
        phases = [(40, (0.1, 0.5, 0.4)), (120, (0.0, 1.0, 0.0))]
        return mixed([Counting(0, 4, length=5), Counting(100_000, 2, length=7), Indexed()], (0.6, 0.1, 0.3), phases)

    whole = [*islice(opened().open(1, None), 90)]
    for number in (1, 3, 10, 19, 20, 21, 59, 60, 75):
        state = json.loads(json.dumps(whole[number - 1][1]))
        later = [*islice(opened().open(1, state), 90 - number)]
        assert [(sample["tokens"].item(), after) for sample, after in later] == [
            (sample["tokens"].item(), after) for sample, after in whole[number:]
        ]
    which = np.array([sample["source"] for sample, _ in whole])
    assert np.bincount(which[:20], minlength=3)[0] > np.bincount(which[20:60], minlength=3)[0]
    assert set(which[60:].tolist()) == {1}
    of_b = [sample["tokens"].item() % 1000 for sample, _ in whole if sample["source"] == 1]
    assert of_b == [number % 7 for number in range(len(of_b))]


def test_a_phase_changes_what_follows_and_nothing_before_it():
    sources, phases = [Counting(0, 4), Indexed()], [(40, (0.9, 0.1))]
    plain, phased = mixed(sources, (0.2, 0.8)), mixed(sources, (0.2, 0.8), phases)

    before, after = read(plain, 80), read(phased, 80)

    np.testing.assert_array_equal(before["tokens"][:40], after["tokens"][:40])
    assert phased.counts(80) == InterleavingInPhases([(0, (0.2, 0.8)), *phases]).counts(80) == [44, 36]
    assert plain.fingerprint == phased.fingerprint
    assert plain.fingerprint != mixed([Counting(0, 8), Indexed()], (0.2, 0.8)).fingerprint


def test_a_phase_begins_with_its_step_where_samples_before_it_are_left_out():
    source = StreamsByPosition(mixed([Counting(0, 4), Indexed()], (1.0, 0.0), [(40, (0.0, 1.0))]))

    stream = SampleStream(source, seed=0, shuffle=False).without(16, 24)

    assert stream.read(np.arange(48))["source"].tolist() == [0] * 40 + [1] * 8
    assert stream.counts(48) == {"a": 40, "b": 8}


def test_sources_without_tokens_are_mixed_and_counted():
    batch = read(mixed([StreamOfRows(), Rows()], (0.5, 0.5)), 8)

    assert batch["tokens"].shape == batch["targets"].shape == (8, 3)
    np.testing.assert_array_equal(batch["rows"][:, 0, 0], batch["source"])


def test_a_rank_opens_the_streams_of_its_own_positions_alone():
    source = Counting(0, 4)
    mixture = mixed([source, Indexed()], (0.5, 0.5))
    source.opened.clear()

    StreamsByPosition(mixture).read_at(np.array([position for position in range(80) if position % 4 > 1]))

    assert set(source.opened) == {2, 3}


def test_a_stream_without_a_sample_is_named():
    with pytest.raises(ConfigError, match=r"source 'a': stream 0 of 2 \(from 0\) has no sample; use fewer streams"):
        mixed([Counting(0, 2, length=0), Indexed()], (0.5, 0.5))

    mixture = mixed([Counting(0, 2), Indexed()], (0.5, 0.5))
    mixture._parts.parts[0].source.length = 0
    with pytest.raises(ConfigError, match=r"data: source 'a': stream 1 of 2 \(from 0\) has no sample"):
        [*islice(mixture.open(1, None), 9)]
