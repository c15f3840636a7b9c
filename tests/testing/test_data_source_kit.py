"""The data-source kit passes a source that keeps the contract, and has a sentence for each way to break it."""

import itertools
import threading

import numpy as np
import pytest

from forge_core.contracts.batch import Entry
from forge_core.contracts.data_source import DataSourceConfig
from forge_core.errors import ConfigError
from forge_testing.data_source import DataSourceConformance


class Numbers:
    """Documents of random numbers, packed, with a part held out."""

    tokenizer = None
    vocab_size = 50
    held_out = 0.25

    def __init__(self, *, seq_len, split):
        stream = np.random.default_rng(0).integers(self.vocab_size, size=40 * seq_len + 1)
        document = np.arange(len(stream)) // 5
        kept = 40 - int(self.held_out * 40)
        first, last = {"train": (0, kept), "validation": (kept, 40), "all": (0, 40)}[split]
        if first == last:
            raise ConfigError("nothing is held out")
        place = np.arange(first * seq_len, last * seq_len).reshape(-1, seq_len)
        crossing = document[place] != document[place + 1]
        self.samples = {
            "tokens": stream[place],
            "targets": np.where(crossing, -100, stream[place + 1]),
            "document": document[place],
            "positions": place - np.maximum(document[place] * 5, place[:, :1]),
        }
        self.fingerprint = f"numbers {seq_len} {split}"

    def __len__(self):
        return len(self.samples["tokens"])

    def read(self, indices):
        return {name: values[indices] for name, values in self.samples.items()}


class Endless:
    """The samples of ``Numbers`` for ever, in an order of their own."""

    tokenizer = None
    vocab_size = 50

    def __init__(self, *, seq_len, split):
        self.numbers = Numbers(seq_len=seq_len, split=split)
        self.fingerprint = f"endless {seq_len} {split}"

    def read_at(self, positions):
        return self.numbers.read(positions * 7 % 30)


def endless(*, seq_len, split):
    return (Endless if split == "train" else Numbers)(seq_len=seq_len, split=split)


class Mixed(Endless):
    """Turn by turn of two sources."""

    names = ("even", "odd")

    def entries(self):
        return {"source": Entry(dims=("sample",), wanted_by="engine")}

    def read_at(self, positions):
        return {**super().read_at(positions), "source": positions % 2}

    def counts(self, position):
        return [(position + 1) // 2, position // 2]


class Streams:
    """The samples of ``Numbers`` as three streams."""

    tokenizer, vocab_size, n_streams = None, 50, 3

    def __init__(self, *, seq_len, split):
        self.numbers = Numbers(seq_len=seq_len, split=split)
        self.fingerprint = f"streams {seq_len} {split}"

    def open(self, stream, state):
        number = state["read"] if state else 0
        while True:
            number += 1
            yield self.sample(stream, number), self.state(number)

    def sample(self, stream, number):
        batch = self.numbers.read(np.array([(7 * number + 11 * stream) % 30]))
        return {name: values[0] for name, values in batch.items()}

    def state(self, number):
        return {"read": number}


def streams(*, seq_len, split):
    return (Streams if split == "train" else Numbers)(seq_len=seq_len, split=split)


class OneState(Streams):
    """Gives the same mapping again and again, with another number in it."""

    def open(self, stream, state):
        shared = {}
        for sample, after in super().open(stream, state):
            shared.update(after)
            yield sample, shared


class OneReader(Streams):
    """Has one place in the data for all of its streams."""

    def sample(self, stream, number):
        self.place = getattr(self, "place", 0) + 1
        return super().sample(0, self.place)


class Ending(Streams):
    """Ends after six samples, counted from wherever it is opened."""

    def open(self, stream, state):
        number = state["read"] if state else 0
        return itertools.islice(super().open(stream, state), 6 + (0 if number == 0 else -number - 1))


class Miscounted(Mixed):
    def counts(self, position):
        return [position // 2, (position + 1) // 2]


def describing(entry):
    """``Numbers`` with pictures of a height of 8."""

    class Pictured(Numbers):
        def entries(self):
            return {"image": entry}

        def read(self, indices):
            return {**super().read(indices), "image": np.zeros((len(indices), 8), dtype=np.float32)}

    return Pictured


class WronglyDescribed(Mixed):
    def entries(self):
        return {"source": Entry(dims=("sample", "position"), wanted_by="engine")}


def mixed(*, seq_len, split):
    return (Mixed if split == "train" else Numbers)(seq_len=seq_len, split=split)


class Case(DataSourceConformance):
    source = Numbers

    def make(self, *, seq_len, split):
        return self.source(seq_len=seq_len, split=split)


class TestEndless(Case):
    source = staticmethod(endless)


class TestNumbers(Case):
    pass


class TestStreams(Case):
    source = staticmethod(streams)


class TestMixed(Case):
    source = staticmethod(mixed)


class TestNothingHeldOut(Case):
    source = type("Whole", (Numbers,), {"held_out": 0.0})
    holds_out = False


class TestConfigured(DataSourceConformance):
    component = "forge-plugins-data:text_files"

    @pytest.fixture(autouse=True)
    def _files(self, tmp_path):
        rng = np.random.default_rng(0)
        for number in range(8):
            (tmp_path / f"{number}.txt").write_text(str(rng.integers(10**15, size=4)))
        self.config = {"path": str(tmp_path), "validation": 0.4}


def faulty(**attributes):
    return type("Faulty", (Numbers,), attributes)


def reading(change):
    """The source whose batches go through ``change(source, batch, indices)``."""
    return faulty(read=lambda self, indices: change(self, Numbers.read(self, indices), indices))


def replaced(**changes):
    return reading(lambda _, batch, __: batch | {name: change(batch[name]) for name, change in changes.items()})


class Torn(Numbers):
    """Keeps what it reads in a place that all threads share."""

    def read(self, indices):
        self.place = indices
        threading.Event().wait(0.0002)
        return super().read(self.place)


class Counted(Numbers):
    number = itertools.count()

    def __init__(self, **given):
        super().__init__(**given)
        self.fingerprint = f"{next(self.number)}"


class Drifting(Numbers):
    number = itertools.count()

    def __init__(self, **given):
        super().__init__(**given)
        self.samples["tokens"] = (self.samples["tokens"] + next(self.number)) % 50


class Remembering(Numbers):
    """A stream in disguise: what it gives depends on how much it has given."""

    def read(self, indices):
        self.given = getattr(self, "given", 0) + len(indices)
        return super().read((indices + self.given // 32) % len(self))


class Growing(Numbers):
    def __len__(self):
        return super().__len__() // (2 if "all" in self.fingerprint else 1)


def in_place(source, batch, indices):
    indices += 0
    indices[...] = 0
    return batch


FAULTS = [
    (faulty(__len__=lambda self: 0), "test_states_its_sizes", "at least one sample"),
    (faulty(vocab_size=np.int64(50)), "test_states_its_sizes", "vocab_size must be an int, got int64"),
    (reading(lambda s, batch, i: {"tokens": batch["tokens"]}), "test_samples_are_well_formed", r"got \['tokens'\]"),
    (replaced(tokens=lambda t: t.astype(np.int32)), "test_samples_are_well_formed", "tokens must be int64, got int32"),
    (
        replaced(targets=lambda t: t[:, :-1]),
        "test_samples_are_well_formed",
        r"targets must be \(B, S\) = \(7, 8\), got \(7, 7\)",
    ),
    (replaced(tokens=lambda t: t + 10), "test_samples_are_well_formed", "they must lie between 0 and 49"),
    (
        replaced(targets=lambda t: np.where(t < 0, -1, t)),
        "test_samples_are_well_formed",
        "targets has ids from -1 to .* they must be -100 or",
    ),
    (replaced(targets=lambda t: t * 0 - 100), "test_samples_are_well_formed", "no target of the first samples"),
    (
        reading(lambda s, batch, i: batch | {"targets": batch["tokens"]}),
        "test_targets_are_the_next_tokens",
        "the source shifts them, not the loss",
    ),
    (
        replaced(document=lambda d: np.arange(d.size).reshape(d.shape)),
        "test_targets_are_the_next_tokens",
        "a target is the first token of the next document",
    ),
    (
        replaced(positions=lambda p: p * 0 + np.arange(8)),
        "test_positions_start_again_with_each_document",
        "must start at 0 where a new document does",
    ),
    (replaced(positions=lambda p: p * 2), "test_positions_start_again_with_each_document", "count up by 1"),
    (replaced(positions=lambda p: p * 0 - 1), "test_padding_has_no_targets", "targets must be -100 at padding"),
    (replaced(positions=lambda p: p - 2), "test_padding_has_no_targets", "positions must be -1 at padding, and else"),
    (reading(in_place), "test_reading_has_no_side_effects", "read changes the indices it is given"),
    (
        reading(lambda s, batch, i: s.samples),
        "test_reading_has_no_side_effects",
        "reading the same samples twice gives different ones",
    ),
    (
        reading(lambda s, batch, i: batch | {"tokens": batch["tokens"] + len(i)}),
        "test_samples_do_not_depend_on_their_neighbours",
        "sample 29 differs when it is read together with others",
    ),
    (Torn, "test_reading_is_safe_from_threads", "differs when several threads read"),
    (Counted, "test_opening_again_gives_the_same_samples", "two sources of one configuration differ in fingerprint"),
    (Drifting, "test_opening_again_gives_the_same_samples", "two sources of one configuration differ in samples"),
    (
        type("Constant", (Numbers,), {"fingerprint": property(lambda self: "same", lambda self, value: None)}),
        "test_fingerprint_tells_lengths_apart",
        "the fingerprint is the same for another seq_len",
    ),
    (
        reading(lambda s, batch, i: batch | {"tokens": Numbers(seq_len=8, split="all").samples["tokens"][i]}),
        "test_validation_is_held_out",
        "10 of 10 validation samples are in the training samples too",
    ),
    (
        reading(lambda s, batch, i: batch | {"image": np.zeros((len(i), 3, 8, 8))}),
        "test_entries_are_as_they_are_described",
        r"entries\(\) must describe \['image'\]",
    ),
    (WronglyDescribed, "test_entries_are_as_they_are_described", "source has 1 dimensions, described with"),
    *(
        (
            describing(Entry(dims=("sample", "height"), sizes=sizes, dtype="float32")),
            "test_entries_are_as_they_are_described",
            sentence,
        )
        for sizes, sentence in [
            ((None, 7), "image has 8 along 'height', and is described with 7"),
            ((8,), "has the sizes"),
        ]
    ),
    (Miscounted, "test_sources_within_are_counted_as_they_come", r"counts\(\) has \[48, 49\] .* gives \[49, 48\]"),
    *(
        (type("Faulty", (Streams,), {"state": state}), "test_a_stream_goes_on_from_each_of_its_states", sentence)
        for state, sentence in [
            (
                lambda self, number: {"read": number - 1},
                "opened with the state after sample 1, gives another sample 2 than",
            ),
            (lambda self, number: {"read": np.int64(number)}, "the state after sample 1 is not made of JSON values"),
            (lambda self, number: {"read": number, 3: 4}, "comes back from JSON as .*'3': 4"),
        ]
    ),
    (
        OneState,
        "test_a_stream_goes_on_from_each_of_its_states",
        "with the state after sample 1, gives another sample 2",
    ),
    (Ending, "test_a_stream_goes_on_from_each_of_its_states", "state after sample 1, ends 1 samples earlier than when"),
    (
        OneReader,
        "test_streams_do_not_depend_on_each_other",
        "differs when other streams, or itself, are read meanwhile",
    ),
    (Remembering, "test_samples_do_not_depend_on_what_was_read_before", "a resumed run would get others"),
    (Endless, "test_validation_is_held_out", "for the split 'validation', return a source with __len__ and read"),
    (Endless, "test_everything_can_be_opened_at_once", "for the split 'all', return a source with __len__ and read"),
    (Growing, "test_everything_can_be_opened_at_once", "split 'all' has 20 samples and 'train' has 30"),
]


@pytest.mark.parametrize(("source", "check", "sentence"), FAULTS)
def test_a_fault_is_found_and_told(source, check, sentence):
    case = Case()
    case.source = source

    with pytest.raises(AssertionError, match=sentence):
        getattr(case, check)()


def test_a_config_without_the_common_keys_is_found_and_told():
    case = TestConfigured()
    case.use = lambda: type("Chosen", (), {"config": object()})

    with pytest.raises(AssertionError, match="object must extend DataSourceConfig"):
        case.test_config_has_the_common_keys()


def test_a_config_that_accepts_shuffle_for_a_source_with_its_own_order_is_found_and_told():
    case = TestConfigured()
    case.use = lambda: type("Chosen", (), {"config": DataSourceConfig()})
    case.open = lambda: Endless(seq_len=8, split="train")

    with pytest.raises(AssertionError, match="has_own_order must be True, as the source has read_at"):
        case.test_config_has_the_common_keys()


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ({"image": Entry(dims=("sample",))}, r"names 'image', which batches do not have"),
        (
            {"tokens": Entry(dims=("sample", "n"), sizes=(None, 7))},
            r"gives 'tokens' the shape \(1, 7\); it is \(1, 8\)",
        ),
    ],
)
def test_a_config_that_knows_of_other_entries_is_found_and_told(entries, sentence):
    config = type("Config", (DataSourceConfig,), {"entries": lambda self: entries})
    case = TestConfigured()
    case.use = lambda: type("Chosen", (), {"config": config()})
    case.open = lambda: Numbers(seq_len=8, split="train")

    with pytest.raises(AssertionError, match=sentence):
        case.test_config_has_the_common_keys()


def test_every_check_has_a_fault_that_it_finds():
    checks = {name for name in vars(DataSourceConformance) if name.startswith("test_")}

    assert {check for _, check, _ in FAULTS} | {"test_config_has_the_common_keys"} == checks
