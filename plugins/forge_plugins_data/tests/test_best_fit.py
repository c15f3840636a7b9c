"""Best-fit packing, against the published algorithm written plainly."""

import itertools
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from forge_core.data.loader import BatchLoader
from forge_core.data.stream import SampleStream
from forge_core.errors import ConfigError
from forge_plugins_data.best_fit import PackedDocuments, best_fit, find_documents
from forge_plugins_data.config import TokenFilesConfig
from forge_plugins_data.token_files import open_token_files
from forge_plugins_data.token_samples import TokenFacts

END = 7
ROOM = 16


def plain_best_fit(lengths, room, counts, most):
    """Each piece, the longest first, goes where the least room is left over, and of those where the count is largest;
    one that fills a sample has it for itself."""
    samples = []
    for piece in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        length, count = lengths[piece], counts[piece]
        fitting = [one for one in samples if length < room and one["room"] >= length and one["count"] + count <= most]
        if not fitting:
            samples.append(sample := {"room": room, "count": 0, "pieces": []})
        else:
            sample = min(fitting, key=lambda one: (one["room"], -one["count"]))
        sample["room"] -= length
        sample["count"] += count
        sample["pieces"].append(piece)
    return samples


@pytest.mark.parametrize("most", [0, 1, 4])
@pytest.mark.parametrize("seed", range(100))
def test_pieces_are_packed_as_the_published_algorithm_packs_them(seed, most):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, ROOM + 1, rng.integers(1, 60))
    counts = rng.integers(0, most + 1, len(lengths))

    order, bounds = best_fit(lengths, ROOM, counts, most)
    samples = [order[start:stop].tolist() for start, stop in itertools.pairwise(bounds)]

    expected = plain_best_fit(lengths.tolist(), ROOM, counts.tolist(), most)
    found = sorted((ROOM - lengths[one].sum(), counts[one].sum()) for one in samples)
    assert found == sorted((one["room"], one["count"]) for one in expected)
    assert all(counts[one].sum() <= most for one in samples)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    assert all(lengths[one].sum() <= ROOM for one in samples)
    assert [one[0] for one in samples] == sorted(min(one) for one in samples)


def documents(seed, n=40, longest=50):
    rng = np.random.default_rng(seed)
    return [[*rng.integers(0, END, size).tolist(), END] for size in rng.integers(0, longest, n)]


def packed(texts, *, mask, seq_len=ROOM, last_is_open=False):
    tokens = np.array([token for text in texts for token in text], dtype=np.uint16)
    tokens = tokens[:-1] if last_is_open else tokens
    return PackedDocuments([find_documents(tokens, END)], facts(seq_len, END if mask else None), end_of_document=END)


def facts(seq_len, separator=END):
    return TokenFacts(seq_len=seq_len, vocab_size=END + 1, tokenizer=None, separator=separator, identity=[])


@pytest.mark.parametrize("last_is_open", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_every_pair_of_tokens_in_a_document_is_trained_on_once(seed, last_is_open):
    texts = documents(seed)
    source = packed(texts, mask=True, last_is_open=last_is_open)
    batch = source.read(np.arange(len(source)))

    valid = batch["targets"] != -100
    found = sorted(zip(batch["tokens"][valid].tolist(), batch["targets"][valid].tolist(), strict=True))
    if last_is_open:
        texts[-1] = texts[-1][:-1]
    assert found == sorted(pair for text in texts for pair in itertools.pairwise(text))


@pytest.mark.parametrize("seed", range(20))
def test_documents_that_fit_are_whole_and_apart(seed):
    texts = [text for text in documents(seed, longest=ROOM - 1) if len(text) > 1]
    source = packed(texts, mask=True)
    batch = source.read(np.arange(len(source)))

    rows = zip(batch["tokens"], batch["targets"], batch["document"], batch["positions"], strict=True)
    found = []
    for tokens, targets, document, positions in rows:
        for number in range(document.max() + 1):
            own = document == number
            assert targets[own][-1] == -100
            if (targets[own] != -100).any():
                np.testing.assert_array_equal(positions[own], np.arange(own.sum()))
                found.append(tokens[own].tolist())
                assert targets[own][:-1].tolist() == found[-1][1:]
            else:  # padding
                assert set(positions[own].tolist()) == {-1}
                assert set(tokens[own].tolist()) == {END}
                assert number == document.max()
    assert sorted(found) == sorted(texts)


def test_without_a_mask_documents_follow_each_other_as_in_windows():
    source = packed([[1, 2, END], [3, 4, 5, END], [6, END]], mask=False, seq_len=10)

    batch = source.read(np.array([0]))

    assert batch["tokens"].tolist() == [[1, 2, END, 3, 4, 5, END, 6, END, END]]
    assert batch["targets"].tolist() == [[2, END, 3, 4, 5, END, 6, END, -100, -100]]
    assert batch["positions"].tolist() == [[*range(9), -1]]
    assert batch.keys() == {"tokens", "targets", "positions"}


def test_a_long_document_is_cut_into_whole_samples_and_a_rest():
    source = packed([[*range(6), 0, 1, END], [2, END]], mask=True, seq_len=4)

    batch = source.read(np.arange(len(source)))

    assert batch["tokens"].tolist() == [[0, 1, 2, 3], [4, 5, 0, 1], [2, END, END, END]]
    assert batch["targets"].tolist() == [[1, 2, 3, 4], [5, 0, 1, END], [END, -100, -100, -100]]


def test_little_is_left_empty_of_documents_of_the_standard_library(stdlib_documents):
    source = packed(stdlib_documents, mask=True, seq_len=2048)

    assert source.filled > 0.98


@pytest.fixture
def stdlib_documents():
    """As long as the files of the standard library, of one token each but their ends."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return [[1] * file.stat().st_size + [END] for file in files]


def test_an_id_that_comes_while_it_is_read_is_named_with_its_position():
    tokens = np.array([1, 2, END, 3, 4, 5, END], dtype=np.uint16)
    source = PackedDocuments([find_documents(tokens, END, "a.bin")], facts(8), end_of_document=END)
    tokens[4] = 900

    with pytest.raises(ConfigError, match=r"a\.bin: token 4 \(from 0\) has the id 900"):
        source.read(np.array([0]))


def test_a_target_behind_a_cut_is_named_with_its_position():
    tokens = np.array([1, 2, 3, 4, 5, END], dtype=np.uint16)
    source = PackedDocuments([find_documents(tokens, END, "a.bin")], facts(4), end_of_document=END)
    tokens[4] = 900

    with pytest.raises(ConfigError, match=r"a\.bin: token 4 \(from 0\) has the id 900"):
        source.read(np.array([0]))


def test_documents_without_an_end_are_apart_too():
    files = [find_documents(np.full(5, i, dtype=np.uint16), END) for i in (1, 2, 3)]
    source = PackedDocuments(files, facts(16), end_of_document=END)

    batch = source.read(np.array([0]))

    assert batch["document"].tolist() == [[0] * 5 + [1] * 5 + [2] * 5 + [3]]
    assert batch["positions"].tolist() == [[*range(5), *range(5), *range(5), -1]]
    assert batch["targets"].tolist() == [[1, 1, 1, 1, -100, 2, 2, 2, 2, -100, 3, 3, 3, 3, -100, -100]]


def open_files(build, folder, **keys):
    config = TokenFilesConfig(path=f"{folder}/*.npy", vocab_size=300, packing="best_fit", **keys)
    return {split: open_token_files(config, seq_len=8, split=split, build=build) for split in ("train", "validation")}


def test_about_the_share_of_documents_is_held_out_also_of_files_of_one(tmp_path, build):
    for i in range(100):
        np.save(tmp_path / f"{i:03}.npy", np.array([i + 10] * 7 + [END], dtype=np.uint16))
    opened = open_files(build, tmp_path, validation=0.03, end_of_document=END)

    firsts = {
        split: set(source.read(np.arange(len(source)))["tokens"][:, 0].tolist()) for split, source in opened.items()
    }
    assert firsts["validation"] == {26, 60, 93}, "at equal distances"
    assert firsts["train"] == {*range(10, 110)} - firsts["validation"]


@pytest.mark.parametrize("validation", [1e-6, 1 - 1e-6])
def test_one_of_two_documents_is_held_out_and_one_is_not(tmp_path, build, validation):
    np.save(tmp_path / "two.npy", np.array([*[1] * 7, END, *[2] * 7, END], dtype=np.uint16))

    opened = open_files(build, tmp_path, validation=validation, end_of_document=END)

    assert {split: len(source) for split, source in opened.items()} == {"train": 1, "validation": 1}


@pytest.mark.parametrize(("seed", "workers"), [(0, 2), (1, 0)])
def test_a_sample_is_the_same_in_each_opening_for_any_seed_and_workers(tmp_path, build, seed, workers):
    """Many documents are of one length, so that what decides between them must be the same too."""
    for i in range(3):
        ids = [token for text in documents(i, n=60, longest=6) for token in text]
        np.save(tmp_path / f"{i}.npy", np.array(ids, dtype=np.uint16))

    def opened():
        return open_files(build, tmp_path, end_of_document=END, document_mask=True, validation=0.1)["train"]

    one, other = opened(), opened()
    n = len(one) // 4 * 4
    stream = SampleStream(other, seed=seed, shuffle=True)
    keys = {"batch_size": 4, "grad_accumulation": 1, "dp_rank": 0, "dp_size": 1, "prefetch": 3, "pin_memory": False}
    loader = BatchLoader(stream, position=0, workers=workers, **keys)
    steps = [batch for _ in range(n // 4) for batch in next(loader)]
    loader.close()

    assert one.fingerprint == other.fingerprint
    expected = one.read(stream.indices(np.arange(n)))
    for name, array in expected.items():
        np.testing.assert_array_equal(np.concatenate([batch[name].numpy() for batch in steps]), array)


def test_another_end_of_document_is_other_data(tmp_path, build):
    np.save(tmp_path / "a.npy", np.arange(64, dtype=np.uint16) % 9)
    one, other = (open_files(build, tmp_path, validation=0.2, end_of_document=end)["train"] for end in (0, 1))
    assert one.fingerprint != other.fingerprint

    with pytest.raises(ConfigError, match="end_of_document = 300 is beyond the vocabulary of 300"):
        open_files(build, tmp_path, validation=0.2, end_of_document=300)


def test_an_id_at_the_beginning_of_a_later_document_is_named_with_its_position():
    tokens = np.array([1, 2, END, 3, 3, 3, 3, 3, END, 4, 5, END], dtype=np.uint16)
    source = PackedDocuments([find_documents(tokens, END, "a.bin")], facts(6), end_of_document=END)
    tokens[9] = 900

    with pytest.raises(ConfigError, match=r"a\.bin: token 9 \(from 0\) has the id 900"):
        source.read(np.arange(2))


def test_documents_of_their_end_alone_take_no_room():
    tokens = np.array([END, END, 1, 2, END, END], dtype=np.uint16)

    source = PackedDocuments([find_documents(tokens, END, "a.bin")], facts(6), end_of_document=END)

    assert (len(source), source.filled) == (1, 0.5)
