"""Streams by position: the same samples on any number of ranks, from any state, in any order of reading."""

import copy
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from inspect import getattr_static

import numpy as np
import pytest

from forge_core.contracts.batch import DescribedSource, MixedSource
from forge_core.contracts.data_source import CheckedSource, StreamedSource
from forge_core.data.loader import BatchLoader
from forge_core.data.stream import SampleStream
from forge_core.data.streams import StreamsByPosition
from forge_core.errors import ConfigError, PluginError
from forge_core.train.step_guard import _SYNC_AFTER


class Letters:
    """Sample ``k`` of stream ``s`` has the token ``1000 · s + k``, ``length`` of them before the stream ends."""

    vocab_size, tokenizer, fingerprint = 10**6, None, "letters"

    def __init__(self, n_streams, length=10**6, state=lambda number: {"read": number}):
        self.n_streams, self.length, self.state = n_streams, length, state
        self.read, self.opened = [], []

    def open(self, stream, state):
        self.opened.append((stream, state))
        for number in range(state["read"] if state else 0, self.length):
            self.read.append((stream, number))
            tokens = np.array([1000 * stream + number])
            yield {"tokens": tokens, "targets": tokens}, self.state(number + 1)


def loader(streams, position=0, batch_size=2, dp_rank=0, dp_size=1, accumulation=1, workers=0, left_out=()):
    return BatchLoader(
        SampleStream(streams, seed=0, shuffle=False, left_out=left_out),
        position=position,
        batch_size=batch_size,
        grad_accumulation=accumulation,
        dp_rank=dp_rank,
        dp_size=dp_size,
        workers=workers,
        prefetch=5,
        pin_memory=False,
    )


def tokens_of(step):
    return [token for batch in step for token in batch["tokens"].ravel().tolist()]


def states_of(ranks):
    """As they are saved: gathered over ranks, and through JSON."""
    number = ranks[0].stream.samples_read(ranks[0].position)
    states = {}
    for one in ranks:
        states |= one.stream.streams.states(number)
    n = ranks[0].stream.streams.n_streams
    return json.loads(json.dumps({"number": number, "states": [states[stream] for stream in range(n)]}))


def test_a_position_has_the_same_sample_however_and_in_which_order_it_is_asked_for():
    straight = StreamsByPosition(Letters(3)).read_at(np.arange(90))["tokens"].ravel()
    assert straight.tolist() == [1000 * (p % 3) + p // 3 for p in range(90)]

    backwards = StreamsByPosition(Letters(3))
    found = [backwards.read_at(np.array([p]))["tokens"].item() for p in range(89, -1, -1)]
    assert found[::-1] == straight.tolist()
    threads = StreamsByPosition(Letters(3))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda p: threads.read_at(np.array([p]))["tokens"].item(), range(90)))
    assert found == straight.tolist()


def test_threads_that_read_one_stream_wait_for_each_other():
    class Slow(Letters):
        def open(self, stream, state):
            for sample in super().open(stream, state):
                time.sleep(0.001)
                yield sample

    streams = StreamsByPosition(Slow(1))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda p: streams.read_at(np.array([p]))["tokens"].item(), range(40)))

    assert found == [*range(40)]


def test_what_stands_before_the_place_where_streams_go_on_can_be_read_too():
    streams = StreamsByPosition(Letters(2))
    streams.restart(9, [{"read": 9}, {"read": 9}])

    assert streams.read_at(np.array([18, 5, 19]))["tokens"].ravel().tolist() == [9, 1002, 1009]


def test_other_numbers_of_streams_are_other_data():
    assert StreamsByPosition(Letters(2)).fingerprint != StreamsByPosition(Letters(3)).fingerprint


def test_the_steps_that_a_guard_may_ask_for_are_read_again_from_their_own_states():
    source = Letters(1)
    one = loader(StreamsByPosition(source))
    for _ in range(_SYNC_AFTER + 10):
        next(one)

    assert [batch["tokens"].ravel().tolist() for batch in one.step_at(18)] == [[18, 19]]
    assert source.opened == [(0, None), (0, {"read": 18})]


def test_smaller_samples_of_a_batch_are_filled_up_with_zeros_behind():
    class Boxes(Letters):
        def open(self, stream, state):
            for sample, after in super().open(stream, state):
                yield {**sample, "boxes": np.ones((2 + stream, 4 - stream))}, after

    boxes = StreamsByPosition(Boxes(2)).read_at(np.arange(2))["boxes"]

    assert boxes.tolist() == [[[1] * 4, [1] * 4, [0] * 4], [[1, 1, 1, 0]] * 3]


@pytest.mark.parametrize(("dp_size", "accumulation"), [(1, 6), (2, 3), (3, 2), (6, 1), (4, 3)])
@pytest.mark.parametrize("workers", [0, 3])
def test_steps_have_the_same_samples_on_any_number_of_ranks_and_workers(dp_size, accumulation, workers):
    batch_size = 1 if dp_size == 4 else 2
    ranks = [
        loader(StreamsByPosition(Letters(6)), 0, batch_size, rank, dp_size, accumulation, workers)
        for rank in range(dp_size)
    ]

    for step in range(5):
        found = sorted(token for one in ranks for token in tokens_of(next(one)))
        positions = range(12 * step, 12 * step + 12)
        assert found == sorted(1000 * (p % 6) + p // 6 for p in positions)
    for one in ranks:
        one.close()


def test_a_rank_reads_its_own_streams_and_those_once():
    sources = [Letters(4), Letters(4)]
    ranks = [loader(StreamsByPosition(source), 0, 4, rank, 2) for rank, source in enumerate(sources)]
    for one in ranks:
        for _ in range(3):
            next(one)

    assert sources[0].read == [(s, k) for step in range(3) for s in (0, 1) for k in (2 * step, 2 * step + 1)]
    assert {stream for stream, _ in sources[1].read} == {2, 3}
    assert sources[0].opened == [(0, None), (1, None)]


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 2), (2, 1), (2, 4), (3, 2)])
def test_states_saved_on_some_ranks_continue_on_others_and_not_from_what_was_read_ahead(before, after):
    def ranks(dp_size, position=0, states=None):
        made = []
        for rank in range(dp_size):
            source = Letters(4)
            streams = StreamsByPosition(source)
            if states is not None:
                streams.restart(**states)
            made.append((source, loader(streams, position, 12 // dp_size, rank, dp_size, workers=2)))
        return made

    first = ranks(before)
    for _, one in first:
        for _ in range(3):
            next(one)
    states = states_of([one for _, one in first])
    second = ranks(after, 36, states)
    found = sorted(token for _, one in second for step in range(2) for token in tokens_of(next(one)))

    assert found == sorted(1000 * (p % 4) + p // 4 for p in range(36, 60))
    assert states == {"number": 9, "states": [{"read": 9}] * 4}
    for source, one in second:
        assert all(state == {"read": 9} for _, state in source.opened)
        assert min(number for _, number in source.read) == 9
        one.close()
    for _, one in first:
        one.close()


def test_stretches_that_are_left_out_are_read_over_also_right_after_a_checkpoint():
    streams = StreamsByPosition(Letters(2))
    one = loader(streams, batch_size=4)
    next(one), next(one)
    states, position = states_of([one]), one.position
    next(one)

    one.restart(one.stream.without(8, 12), position)
    streams.restart(**states)
    assert states_of([one]) == states
    assert sorted(tokens_of(next(one))) == [6, 7, 1006, 1007]
    again = StreamsByPosition(Letters(2))
    again.restart(**states_of([one]))
    resumed = loader(again, one.position, 4, left_out=one.stream.left_out)
    assert tokens_of(next(resumed)) == tokens_of(next(one)) == [8, 9, 1008, 1009]


def test_a_step_that_is_over_can_be_read_once_more_and_the_next_one_is_not_another():
    one = loader(StreamsByPosition(Letters(2)), batch_size=4)
    steps = [tokens_of(next(one)) for _ in range(100)]

    assert [tokens_of([*one.step_at(4 * step)]) for step in (0, 50, 99)] == [steps[0], steps[50], steps[99]]
    assert tokens_of(next(one)) == [200, 201, 1200, 1201]
    assert len(one.stream.streams._cursors[0].states) < 140


class Halting(Letters):
    """It waits before sample ``halt`` of stream 0 until it may ``go``, once, and then raises ``error``, if there is
    one."""

    def __init__(self, n_streams, halt, error=None):
        super().__init__(n_streams)
        self.halt, self.error = halt, error
        self.waits, self.go = threading.Event(), threading.Event()

    def open(self, stream, state):
        for sample, after in super().open(stream, state):
            if (stream, after["read"] - 1) == (0, self.halt) and not self.waits.is_set():
                self.waits.set()
                assert self.go.wait(60)
                if self.error is not None:
                    raise self.error
            yield sample, after


@pytest.mark.parametrize("error", [OSError("connection reset"), KeyboardInterrupt()])
def test_a_stream_that_has_failed_for_one_thread_goes_on_for_others_where_it_was(error):
    source = Halting(2, halt=5, error=error)
    streams = StreamsByPosition(source)
    streams.read_at(np.arange(8))
    with ThreadPoolExecutor(2) as pool:
        ahead = pool.submit(streams.read_at, np.array([12, 14]))
        assert source.waits.wait(60)
        behind = pool.submit(streams.read_at, np.array([8, 10]))
        source.go.set()
        with pytest.raises(type(error)):
            ahead.result()
        assert behind.result()["tokens"].ravel().tolist() == [4, 5]

    assert streams.read_at(np.array([12, 13]))["tokens"].ravel().tolist() == [6, 1006]


def test_a_stream_that_has_failed_goes_on_where_it_was_if_it_is_asked_again():
    source = Halting(1, halt=3, error=OSError("connection reset"))
    source.go.set()
    streams = StreamsByPosition(source)
    with pytest.raises(OSError, match="connection reset"):
        streams.read_at(np.arange(5))

    assert streams.read_at(np.arange(3, 5))["tokens"].ravel().tolist() == [3, 4]


def test_the_next_step_does_not_wait_for_a_stream_that_is_read_ahead():
    source = Halting(2, halt=5)
    one = loader(StreamsByPosition(source), batch_size=4, workers=1)
    with ThreadPoolExecutor(1) as training:
        steps = [training.submit(next, one).result(60)]
        assert source.waits.wait(60)
        steps.append(training.submit(next, one))
        try:
            steps[1] = steps[1].result(20)
        finally:
            source.go.set()
        steps.append(training.submit(next, one).result(60))
    one.close()

    assert [tokens_of(step) for step in steps] == [[2 * n, 2 * n + 1, 1000 + 2 * n, 1001 + 2 * n] for n in range(3)]


def test_a_microbatch_that_others_have_overtaken_is_still_there():
    source = Letters(2)
    with loader(StreamsByPosition(source), workers=1) as batches:
        batches.stream.read(np.array([10, 11]))
        batches.stream.read(np.array([0, 1]))

    assert source.opened == [(0, None), (1, None)]


def test_what_stands_between_is_not_kept_and_can_be_read_all_the_same():
    streams = StreamsByPosition(Letters(2))
    streams.read_at(np.array([10_000, 10_001, 10_002]))
    assert [sorted(cursor._samples) for cursor in streams._cursors] == [[5001], [5000]]
    assert streams.read_at(np.array([9_000, 10_004]))["tokens"].ravel().tolist() == [4500, 5002]

    streams = StreamsByPosition(Letters(2))
    streams.forget_before(5000)
    streams.read_at(np.array([10_002]))
    assert sorted(streams._cursors[0].states) == [0, 5000, 5001, 5002]

    source = Letters(2)
    one = loader(StreamsByPosition(source), batch_size=4, left_out=[(4, 4000)])
    assert [tokens_of(next(one)) for _ in range(2)] == [[0, 1, 1000, 1001], [2000, 2001, 3000, 3001]]
    assert sum(len(cursor._samples) for cursor in one.stream.streams._cursors) < 40
    assert states_of([one]) == {"number": 2002, "states": [{"read": 2002}] * 2}


def test_a_stream_that_ends_begins_anew_and_one_of_nothing_is_refused():
    short = StreamsByPosition(Letters(2, length=3))

    assert short.read_at(np.arange(0, 16, 2))["tokens"].ravel().tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    at_the_end = StreamsByPosition(Letters(2, length=3))
    at_the_end.restart(3, [{"read": 3}, {"read": 3}])
    assert at_the_end.read_at(np.array([6, 7, 8]))["tokens"].ravel().tolist() == [0, 1000, 1]
    with pytest.raises(ConfigError, match=r"stream 1 of 2 \(from 0\) has no sample"):
        StreamsByPosition(Letters(2, length=0)).read_at(np.array([1]))


def test_ranks_and_batches_that_streams_cannot_be_dealt_to_are_refused():
    with pytest.raises(
        ConfigError, match="there are 3 data-parallel ranks and 2 streams, and each rank reads at least"
    ):
        loader(StreamsByPosition(Letters(2)), dp_size=3)
    with pytest.raises(
        ConfigError, match=r"global_batch_size must be a multiple of the number of streams, 4, .* it is 6"
    ):
        loader(StreamsByPosition(Letters(4)), batch_size=3, dp_size=2)


def test_a_state_that_cannot_be_saved_is_refused_at_the_first_sample():
    with pytest.raises(PluginError, match="Letters gives a state that is not made of JSON values"):
        StreamsByPosition(Letters(1, state=lambda number: {"read": np.int64(number)})).read_at(np.array([0]))


def test_what_else_a_source_has_is_found_by_protocols_and_no_source_is_wrapped_twice():
    class Described(Letters):
        names = ("a",)
        entries = refuse_damaged = watch = counts = lambda self, *_: {}
        states = "not those of positions"

    streams = StreamsByPosition(Described(2))

    for protocol in (DescribedSource, MixedSource, CheckedSource):
        assert isinstance(streams, protocol)
    for name in ("entries", "names", "counts", "refuse_damaged", "watch"):
        getattr_static(streams, name)  # as isinstance looks from Python 3.12 on
    assert not isinstance(streams, StreamedSource)
    assert streams.states(0) == {0: None, 1: None}


def test_streams_that_are_copied_give_what_comes_next_and_have_what_their_source_has():
    source = Letters(3)
    source.color = "red"
    streams = StreamsByPosition(source)
    streams.read_at(np.arange(6))

    other = copy.copy(streams)

    assert other.color == "red"
    assert not hasattr(other, "colour")
    assert (
        other.read_at(np.arange(6, 9))["tokens"] == StreamsByPosition(Letters(3)).read_at(np.arange(9))["tokens"][6:]
    ).all()
