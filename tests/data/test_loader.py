"""Batches for one rank: the same stream however it is cut and read."""

import gc
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from forge_core.data.loader import BatchLoader, evaluation_batches
from forge_core.data.stream import SampleStream
from forge_core.errors import ConfigError


class NumberedSource:
    """Sample i is the tokens i·10, i·10 + 1, …; reading may take a while, or fail."""

    vocab_size = 10**6
    tokenizer = None
    fingerprint = "numbered"

    def __init__(self, samples, delay=None, fail_at=None):
        self.samples, self.delay, self.fail_at = samples, delay, fail_at
        self.reads = 0

    def __len__(self):
        return self.samples

    def read(self, indices):
        self.reads += 1
        if self.delay is not None:
            time.sleep(self.delay(self.reads))
        if self.fail_at is not None and self.fail_at in indices:
            raise OSError("the disk has gone")
        tokens = indices[:, None] * 10 + np.arange(4)
        return {"tokens": tokens, "targets": tokens + 1}


def loader(
    source, position=0, batch_size=2, grad_accumulation=1, dp_rank=0, dp_size=1, workers=0, shuffle=True, **more
):
    return BatchLoader(
        SampleStream(source, seed=7, shuffle=shuffle),
        position=position,
        batch_size=batch_size,
        grad_accumulation=grad_accumulation,
        dp_rank=dp_rank,
        dp_size=dp_size,
        workers=workers,
        prefetch=more.pop("prefetch", 4),
        pin_memory=False,
    )


def steps_of(source, steps, position=0, dp_size=1, **cut):
    """The sample numbers of each step, over all ranks, in the order of positions: ``(steps, G)``."""
    ranks = []
    for rank in range(dp_size):
        with loader(source, position, dp_rank=rank, dp_size=dp_size, **cut) as batches:
            ranks.append([[batch["tokens"][:, 0] // 10 for batch in next(batches)] for _ in range(steps)])
    return np.array(
        [
            torch.cat([ranks[r][k][m] for m in range(len(ranks[0][k])) for r in range(dp_size)]).numpy()
            for k in range(steps)
        ]
    )


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize(
    ("batch_size", "grad_accumulation", "dp_size"),
    [(12, 1, 1), (1, 12, 1), (1, 1, 12), (2, 3, 2), (3, 2, 2), (4, 1, 3)],
)
def test_a_step_has_the_same_samples_however_it_is_cut(batch_size, grad_accumulation, dp_size, workers, shuffle):
    source = NumberedSource(50)  # 10 steps of 12: epochs end within steps
    expected = SampleStream(source, seed=7, shuffle=shuffle).indices(np.arange(120)).reshape(10, 12)

    actual = steps_of(
        source,
        10,
        batch_size=batch_size,
        grad_accumulation=grad_accumulation,
        dp_size=dp_size,
        workers=workers,
        shuffle=shuffle,
    )

    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_resumed_at_any_position_and_on_another_cut_continues_the_stream(workers):
    source = NumberedSource(31)
    straight = steps_of(source, 12, batch_size=6, workers=workers)

    for done in range(12):
        rest = steps_of(
            source, 12 - done, position=6 * done, batch_size=1, grad_accumulation=3, dp_size=2, workers=workers
        )
        np.testing.assert_array_equal(rest, straight[done:])


def test_the_position_is_that_of_the_steps_taken_not_of_those_read_ahead():
    with loader(NumberedSource(100), position=40, grad_accumulation=3, dp_size=2, workers=2, prefetch=9) as batches:
        assert batches.position == 40
        next(batches)
        assert batches.position == 40 + 12
        next(batches)
        assert batches.position == 40 + 24


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_goes_on_elsewhere_whatever_it_has_read_ahead(workers):
    source = NumberedSource(100, delay=lambda read: 0.001 * (read % 3))
    with loader(source, grad_accumulation=2, workers=workers, shuffle=False) as batches:
        for _ in range(5):
            next(batches)

        batches.restart(batches.stream.without(8, 12), position=4)

        steps = [torch.cat([batch["tokens"][:, 0] for batch in next(batches)]).tolist() for _ in range(3)]
        assert steps == [[40, 50, 60, 70], [120, 130, 140, 150], [160, 170, 180, 190]]
        assert batches.position == 16


def test_a_loader_that_goes_on_elsewhere_leaves_what_it_has_not_begun_to_read_ahead():
    read, may_go_on = [], threading.Event()

    class Slow(NumberedSource):
        def read(self, indices):
            read.append(int(indices[0]))
            assert indices[0] == 0 or may_go_on.wait(10)
            return super().read(indices)

    with loader(Slow(100), workers=1, shuffle=False) as batches:
        next(batches)
        batches.restart(batches.stream, position=40)
        may_go_on.set()
        next(batches)

    assert {number for number in read if number < 40} <= {0, 2}


def test_where_the_samples_of_a_rank_are_in_the_stream_is_known():
    with loader(NumberedSource(100), grad_accumulation=2, dp_rank=1, dp_size=2) as batches:
        assert batches.numbers_of_step(16) == [18, 19, 22, 23]


@pytest.mark.parametrize(("batch_size", "grad_accumulation", "dp_size"), [(8, 1, 1), (2, 4, 1), (2, 2, 2), (1, 2, 4)])
def test_each_token_of_a_run_has_a_number_of_its_own_however_a_step_is_cut(batch_size, grad_accumulation, dp_size):
    numbers = {}
    for dp_rank in range(dp_size):
        cut = {"batch_size": batch_size, "grad_accumulation": grad_accumulation, "dp_size": dp_size, "dp_rank": dp_rank}
        with loader(NumberedSource(24), position=8, **cut) as batches:
            for _ in range(2):
                for batch in batches.with_noise(next(batches), seed=5):
                    numbers |= {
                        tuple(row.tolist()): noise
                        for row, noise in zip(*(batch[key] for key in ("tokens", "noise")), strict=True)
                    }

    with loader(NumberedSource(24), position=8, batch_size=8, grad_accumulation=1, dp_size=1, dp_rank=0) as batches:
        steps = [batch for _ in range(2) for batch in batches.with_noise(next(batches), seed=5)]
        other = batches.with_noise(steps[-1:], seed=6)[0]["noise"]
    assert len(numbers) == 16
    for batch in steps:
        for row, noise in zip(batch["tokens"], batch["noise"], strict=True):
            assert torch.equal(numbers[tuple(row.tolist())], noise)
    drawn = torch.stack([batch["noise"] for batch in steps])
    assert drawn.dtype == torch.int64
    assert len(drawn.unique()) == drawn.numel()
    assert not torch.isin(other, drawn).any()


def test_microbatches_are_tensors_on_the_cpu():
    with loader(NumberedSource(10), batch_size=3, grad_accumulation=2, workers=1) as batches:
        step = next(batches)

    assert len(step) == 2
    assert {name: (tensor.dtype, tensor.shape, tensor.device.type) for name, tensor in step[0].items()} == {
        "tokens": (torch.int64, (3, 4), "cpu"),
        "targets": (torch.int64, (3, 4), "cpu"),
    }


def test_slow_reads_do_not_change_the_order():
    rng = np.random.default_rng(0)
    uneven = NumberedSource(40, delay=lambda _: rng.random() * 0.005)

    np.testing.assert_array_equal(
        steps_of(uneven, 15, batch_size=4, workers=4), steps_of(NumberedSource(40), 15, batch_size=4)
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_source_is_raised_at_its_step_and_says_where_it_read(workers):
    with loader(NumberedSource(20, fail_at=9), shuffle=False, workers=workers) as batches:
        for _ in range(4):
            next(batches)
        with pytest.raises(OSError, match="the disk has gone") as caught:
            next(batches)
        assert caught.value.__notes__ == ["raised while the samples at positions 8 to 9 were read"]
        assert batches.position == 8
        with pytest.raises(RuntimeError, match="closed"):
            next(batches)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_meant_for_the_user_arrives_as_it_is(workers):
    source = NumberedSource(20)
    source.read = lambda indices: (_ for _ in ()).throw(ConfigError("shard 3 has been truncated meanwhile"))

    with loader(source, workers=workers) as batches, pytest.raises(ConfigError, match="shard 3"):
        next(batches)


def test_at_most_prefetch_microbatches_are_read_ahead():
    source = NumberedSource(100)
    with loader(source, workers=2, prefetch=3) as batches:
        next(batches)
        time.sleep(0.05)
        assert source.reads == 1 + 3


def test_the_time_spent_waiting_is_counted():
    with loader(NumberedSource(100, delay=lambda _: 0.02), workers=0) as batches:
        next(batches)
        next(batches)
        assert 0.04 <= batches.seconds_waiting < 1

    quick = loader(NumberedSource(100), workers=1, prefetch=2)
    with quick as batches:
        next(batches)
        waited = batches.seconds_waiting
        time.sleep(0.1)
        next(batches)
        assert batches.seconds_waiting - waited < 0.05


def test_closing_ends_the_threads_promptly_and_may_be_repeated():
    read = []
    batches = loader(NumberedSource(1000, delay=lambda index: read.append(index) or 0.05), workers=2, prefetch=100)
    next(batches)

    batches.close()
    batches.close()

    assert len(read) < 50, "what was to be read ahead is not waited for"
    assert not data_threads()


def test_a_forgotten_loader_leaves_no_threads():
    batches = loader(NumberedSource(100), workers=2)
    next(batches)
    assert data_threads()

    del batches
    gc.collect()

    deadline = time.monotonic() + 5
    while data_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not data_threads()


def test_the_interpreter_ends_although_a_loader_is_open():
    program = """
import numpy as np
from forge_core.data.loader import BatchLoader
from forge_core.data.stream import SampleStream
class Source:
    vocab_size = 100
    def __len__(self): return 100
    def read(self, indices): return {"tokens": indices[:, None], "targets": indices[:, None]}
batches = BatchLoader(SampleStream(Source(), 0, True), position=0, batch_size=1, grad_accumulation=1, dp_rank=0,
                      dp_size=1, workers=2, prefetch=8, pin_memory=False)
next(batches)
"""
    ended = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


WRONG = {
    "an id beyond": ({"tokens": (2, 99)}, r"token 2 of the sample at position 5 is 99; ids are 0 to 98"),
    "a negative id": ({"tokens": (0, -1)}, r"token 0 of the sample at position 5 is -1; ids are 0 to 98"),
    "a target beyond": ({"targets": (3, 99)}, r"target 3 of the sample at position 5 is 99; ids are 0 to 98"),
    "a negative target": ({"targets": (3, -5)}, r"target 3 of the sample at position 5 is -5; ids are 0 to 98"),
    "ignored": ({"targets": (3, -100)}, None),
    "a negative weight": (
        {"weights": (1, -0.5)},
        r"the weight of target 1 of the sample at position 5 is -0.5; weights must be f",
    ),
    "an infinite weight": (
        {"weights": (1, np.inf)},
        r"the weight of target 1 of the sample at position 5 is inf; weights must be f",
    ),
    "a weight of nothing": ({"weights": (1, 0)}, None),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_sample_that_is_wrong_is_told_before_the_model_is_given_it(case):
    (((name, (column, value)),), sentence) = (tuple(WRONG[case][0].items()), WRONG[case][1])

    class Wrong(NumberedSource):
        vocab_size = 99

        def read(self, indices):
            batch = super().read(indices) | {"weights": np.ones((len(indices), 4), np.float32)}
            batch[name][indices == 1, column] = value
            return batch

    batches = loader(Wrong(4), position=4, batch_size=4, shuffle=False)
    if sentence is None:
        assert next(batches)
        return
    with pytest.raises(ConfigError, match=f"^data: {sentence}"):
        next(batches)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda one: one[:-1], r"4 samples were asked for, and what came has tokens \(3, 4\) and targets \(3, 4\)"),
        (
            lambda one: one.astype(np.float32),
            "tokens and targets must be int64, and are torch.float32 and torch.float32",
        ),
    ],
)
def test_other_samples_than_asked_for_are_refused(change, sentence):
    class Wrong(NumberedSource):
        def read(self, indices):
            return {name: change(one) for name, one in super().read(indices).items()}

    with pytest.raises(ConfigError, match=sentence):
        next(loader(Wrong(8), batch_size=4))


def test_targets_that_are_not_one_for_each_token_are_refused():
    class Wrong(NumberedSource):
        def read(self, indices):
            batch = super().read(indices)
            return {**batch, "targets": batch["targets"][:, :-1]}

    with pytest.raises(ConfigError, match=r"what came has tokens \(4, 4\) and targets \(4, 3\)"):
        next(loader(Wrong(8), batch_size=4))


def test_fewer_samples_than_one_step_needs_is_an_error():
    with pytest.raises(ConfigError, match=r"have 23 samples, fewer than the 24 of one step \(batch_size 2 × grad_acc"):
        loader(NumberedSource(23), batch_size=2, grad_accumulation=3, dp_size=4)
    loader(NumberedSource(24), batch_size=2, grad_accumulation=3, dp_size=4)


@pytest.mark.parametrize(("samples", "batch_size", "dp_size"), [(1, 4, 1), (7, 2, 2), (8, 2, 2), (9, 2, 2), (5, 1, 3)])
def test_evaluation_takes_every_sample_once_and_every_rank_as_many_batches(samples, batch_size, dp_size):
    source = NumberedSource(samples)

    ranks = [
        list(evaluation_batches(source, batch_size=batch_size, dp_rank=rank, dp_size=dp_size, samples=0))
        for rank in range(dp_size)
    ]

    assert len({len(batches) for batches in ranks}) == 1
    batches = [batch for rank in ranks for batch in rank]
    assert {batch["tokens"].shape for batch in batches} == {(batch_size, 4)}
    assert {batch["targets"].dtype for batch in batches} == {torch.int64}
    valid = torch.cat([batch["tokens"][(batch["targets"] != -100).any(1), 0] // 10 for batch in batches])
    assert sorted(valid.tolist()) == list(range(samples))
    assert sum(int((batch["targets"] != -100).sum()) for batch in batches) == 4 * samples


@pytest.mark.parametrize(("batch_size", "dp_size"), [(2, 1), (2, 2), (1, 3), (4, 2)])
def test_evaluation_takes_the_asked_number_of_samples_on_any_number_of_ranks(batch_size, dp_size):
    def counted(samples):
        return sorted(
            row // 10
            for rank in range(dp_size)
            for batch in evaluation_batches(
                NumberedSource(9), batch_size=batch_size, dp_rank=rank, dp_size=dp_size, samples=samples
            )
            for row in batch["tokens"][(batch["targets"] != -100).any(1), 0].tolist()
        )

    assert counted(5) == list(range(5))
    assert counted(50) == list(range(9))


def data_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("forge-data")]


@pytest.mark.parametrize("workers", [0, 2])
def test_other_ranks_from_a_step_on_go_on_where_the_stream_is(workers):
    source = NumberedSource(100)
    with (
        loader(source, workers=workers, shuffle=False) as first,
        loader(source, workers=workers, shuffle=False) as second,
    ):
        read = []
        for ranks in ([first], [first], [first, second], [first, second], [first]):
            second.position = first.position
            for rank, batches in enumerate(ranks):
                batches.deal(rank, len(ranks))
                (batch,) = next(batches)
                read += (batch["tokens"][:, 0] // 10).tolist()

    assert read == [*range(14)]


def test_a_source_that_stops_in_the_middle_is_an_error_and_no_end():
    class Stops(NumberedSource):
        def read(self, indices):
            next(iter(()))

    with pytest.raises(RuntimeError, match="StopIteration left the component") as caught:
        next(loader(Stops(8), shuffle=False))

    assert "positions 0 to 1" in caught.value.__notes__[0]
