"""The source ``huggingface_streaming``: every document once an epoch, in an order of its own, from any state."""

import json
from collections import Counter
from itertools import islice, takewhile

import numpy as np
import pytest

from forge_core.contracts.loss import IGNORED
from forge_core.errors import ConfigError
from forge_plugins_data.hub_config import HuggingFaceStreamingConfig
from forge_plugins_data.hub_dataset import local_files
from forge_plugins_data.huggingface_streaming import open_huggingface_streaming

datasets = pytest.importorskip("datasets")

TEXTS = [f"<{n:03}>" for n in range(60)]
END = 256


@pytest.fixture
def open_streams(build, use_tokenizer):
    def open_streams(path, seq_len=1, split="train", seed=0, **keys):
        given = {"tokenizer": use_tokenizer("bytes"), "streams": 4, "shuffle_buffer": 7, **keys}
        config = HuggingFaceStreamingConfig(path=str(path), **given)
        return open_huggingface_streaming(config, seq_len=seq_len, split=split, build=build, seed=seed)

    return open_streams


@pytest.fixture(params=["saved", "two parquet files", "json without a schema", "ten parquet files"])
def corpus(tmp_path, request):
    """Keys of a data set of ``TEXTS``, one way or another."""
    folder = tmp_path / "corpus"
    if request.param == "saved":
        datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(folder), num_shards=3)
        return {"path": folder}
    folder.mkdir()
    if "json" in request.param:
        (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
        return {"path": "json", "data_files": str(folder / "*.jsonl")}
    files = 2 if "two" in request.param else 10
    for number in range(files):
        part = {"id": [*range(number, 60, files)], "text": TEXTS[number::files]}
        datasets.Dataset.from_dict(part).to_parquet(str(folder / f"{number:02}.parquet"), batch_size=4)
    return {"path": folder}


def documents_of(samples):
    """Whole documents among the tokens of windows of one token."""
    tokens = [sample["tokens"].item() for sample, _ in samples]
    return bytes(token % 256 for token in tokens).decode().split("\0")[:-1]


def epoch_of(source, stream):
    """The samples of the first epoch of a stream."""
    return [*takewhile(lambda read: read[1]["epoch"] == 0, source.open(stream, None))]


def test_streams_have_every_document_once_an_epoch_shuffled_within_a_block(open_streams, corpus):
    streams = [epoch_of(open_streams(**corpus), stream) for stream in range(4)]
    found = [documents_of(samples) for samples in streams]

    last = [documents[-1] for documents in found]  # its end is no window's first token
    assert Counter(text for documents in found for text in documents) <= Counter(TEXTS)
    assert 60 - sum(map(len, found)) <= 4, last
    unshuffled = [documents_of(epoch_of(open_streams(**corpus, shuffle_buffer=1), stream)) for stream in range(4)]
    assert found != unshuffled
    for documents, plain in zip(found, unshuffled, strict=True):
        assert sorted(documents[:7]) == sorted(plain[:7])


def test_epochs_and_seeds_have_orders_of_their_own(open_streams, corpus):
    source = open_streams(**corpus)
    n = len(epoch_of(source, 1)) + 1
    texts = documents_of(islice(source.open(1, None), 3 * n))

    per_epoch = len(texts) // 3
    assert texts[:7] != texts[per_epoch : per_epoch + 7]
    assert documents_of(islice(open_streams(**corpus, seed=1).open(1, None), 40)) != texts[:8]


@pytest.mark.parametrize("seq_len", [1, 6, 23])
def test_each_state_continues_the_stream_over_the_ends_of_epochs(open_streams, corpus, seq_len):
    source = open_streams(**corpus, seq_len=seq_len)
    read = [*islice(source.open(2, None), 30 if seq_len > 1 else 120)]

    assert {state["epoch"] for _, state in read} >= {0, 1}
    for number in [*range(1, len(read), 7), len(read) - 1]:
        state = json.loads(json.dumps(read[number - 1][1]))
        again = [*islice(open_streams(**corpus, seq_len=seq_len).open(2, state), len(read) - number)]
        for (expected, _), (found, _) in zip(read[number:], again, strict=True):
            np.testing.assert_array_equal(expected["tokens"], found["tokens"])
            np.testing.assert_array_equal(expected["targets"], found["targets"])


def test_a_stream_that_is_opened_again_after_each_few_samples_is_the_same(open_streams, corpus):
    source = open_streams(**corpus, seq_len=3)
    straight = [sample["tokens"].tolist() for sample, _ in islice(source.open(1, None), 60)]

    state, found = None, []
    for number in range(20):
        read = [*islice(source.open(1, state), 1 + number % 5)]
        found += [sample["tokens"].tolist() for sample, _ in read]
        state = json.loads(json.dumps(read[-1][1]))

    assert found == straight


def test_windows_follow_each_other_and_documents_may_be_kept_apart(tmp_path, open_streams):
    texts = ["a" * 50, "", "bcd", None, "e" * 9]
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(tmp_path / "corpus"))
    keys = {"streams": 1, "shuffle_buffer": 1, "seq_len": 8}
    whole = [token for text in texts if text for token in [*text.encode(), END]]

    plain = [sample for sample, _ in epoch_of(open_streams(tmp_path / "corpus", **keys), 0)]
    apart = [sample for sample, _ in epoch_of(open_streams(tmp_path / "corpus", **keys, document_mask=True), 0)]

    for number, sample in enumerate(plain):
        assert sample["tokens"].tolist() == whole[8 * number : 8 * number + 8]
        assert sample["targets"].tolist() == whole[8 * number + 1 : 8 * number + 9]
    assert len(plain) >= 7
    sample = apart[6]  # 48 to 56: aa|bcd|e
    assert sample["document"].tolist() == [0, 0, 0, 1, 1, 1, 1, 2]
    assert sample["positions"].tolist() == [0, 1, 2, 0, 1, 2, 3, 0]
    assert sample["targets"].tolist() == [97, END, IGNORED, *b"cd", END, IGNORED, *b"e"]


def test_what_cannot_be_streamed_is_refused(tmp_path, open_streams):
    datasets.Dataset.from_dict({"text": TEXTS, "n": [*range(60)]}).save_to_disk(str(tmp_path / "corpus"))
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n{"body": 3}\n')

    with pytest.raises(ConfigError, match=r"column = 'txt': .* it has text, n; did you mean 'text'"):
        open_streams(tmp_path / "corpus", column="txt")
    with pytest.raises(ConfigError, match=r"it holds Value\('int64'\), not text"):
        open_streams(tmp_path / "corpus", column="n")
    with pytest.raises(ConfigError, match=r"column = 'text': .* it has body"):
        next(open_streams("json", data_files=str(tmp_path / "a.jsonl")).open(0, None))
    with pytest.raises(ConfigError, match="holds nothing out and has no end"):
        open_streams(tmp_path / "corpus", split="validation")
    with pytest.raises(ConfigError, match="has less than a sample of 4000 tokens in stream 1 of 4"):
        next(open_streams(tmp_path / "corpus", seq_len=4000).open(1, None))


@pytest.mark.parametrize("kind", ["json", "csv"])
def test_a_file_that_is_cut_short_is_told_where_it_is_read(tmp_path, open_streams, kind):
    lines = [json.dumps({"text": text}) if kind == "json" else f'"{text}"' for text in ("text", *TEXTS)]
    (tmp_path / "a").write_text("\n".join(lines)[:-3])

    with pytest.raises(ConfigError, match=r"a file of stream 0 is damaged at row \d+ or later \(from 0\): \w+: "):
        epoch_of(open_streams(kind, data_files=str(tmp_path / "a")), 0)


def test_the_fingerprint_is_that_of_the_data_set(tmp_path, open_streams):
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(tmp_path / "corpus"))
    one = open_streams(tmp_path / "corpus").fingerprint

    assert open_streams(tmp_path / "corpus").fingerprint == one
    assert open_streams(tmp_path / "corpus", shuffle_buffer=8).fingerprint != one
    datasets.Dataset.from_dict({"text": TEXTS * 2}).save_to_disk(str(tmp_path / "corpus"))
    assert open_streams(tmp_path / "corpus").fingerprint != one


def test_the_fingerprint_is_that_of_the_files_that_are_read(tmp_path, open_streams, monkeypatch):
    def lines(file, texts):
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    folder = tmp_path / "files"
    folder.mkdir()
    lines(folder / "a.jsonl", TEXTS)
    lines(folder / "b.jsonl", TEXTS * 2)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    def fingerprint(path=folder, **keys):
        return open_streams(path, **keys).fingerprint

    made = [fingerprint(), *(fingerprint(data_files=name) for name in ("a.jsonl", "b.jsonl", "*.jsonl"))]
    made += [fingerprint("json", data_files=str(folder / name)) for name in ("a.jsonl", "b.jsonl")]
    both = [str(folder / "a.jsonl"), str(folder / "b.jsonl")]
    made += [fingerprint("json", data_files=tuple(both)), fingerprint("json", data_files=tuple(both[::-1]))]
    assert len({*made}) == len(made)

    (folder / "README.md").write_text("About these files.")
    (tmp_path / "elsewhere" / "a.jsonl").write_text("not one of the data set")
    assert [fingerprint(), fingerprint(data_files="a.jsonl")] == made[:2]
    assert local_files(HuggingFaceStreamingConfig(path="a/b", data_files="a.jsonl", tokenizer=None)) == []
    lines(folder / "a.jsonl", TEXTS[1:])
    changed = [fingerprint(), *(fingerprint(data_files=name) for name in ("a.jsonl", "b.jsonl"))]
    assert [one == other for one, other in zip(changed, made[:3], strict=True)] == [False, False, True]


@pytest.mark.parametrize("split", [None, "train"])
def test_what_the_library_has_cached_beside_a_saved_data_set_does_not_count(tmp_path, open_streams, split):
    saved = datasets.Dataset.from_dict({"text": TEXTS})
    whole = saved if split is None else datasets.DatasetDict({split: saved, "test": saved})
    whole.save_to_disk(str(tmp_path / "corpus"))
    one = open_streams(tmp_path / "corpus", split="train").fingerprint

    folder = tmp_path / "corpus" / (split or "")
    (folder / "cache-0123456789abcdef.arrow").write_bytes(b"of a map")
    (tmp_path / "corpus" / "README.md").write_text("About it.")
    assert open_streams(tmp_path / "corpus").fingerprint == one
    (file,) = folder.glob("data-*.arrow")
    with file.open("ab") as handle:
        handle.write(b"\0" * 8)
    assert open_streams(tmp_path / "corpus").fingerprint != one
