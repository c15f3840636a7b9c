"""The sources ``jsonl`` and ``parquet``: documents a line or a row, through the same path as text files."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forge_core.errors import ConfigError
from forge_plugins_data.config import RecordsConfig, TextFilesConfig
from forge_plugins_data.documents import read_records
from forge_plugins_data.records import open_jsonl, open_parquet
from forge_plugins_data.text_files import open_text_files

TEXTS = [f"document number {n}, with {n * n} in it" for n in range(40)]
END = 256


@pytest.fixture
def open_records(build, use_tokenizer):
    def open_records(kind, path, split="train", seq_len=8, **keys):
        config = RecordsConfig(path=str(path), **{"tokenizer": use_tokenizer("bytes"), **keys})
        return {"jsonl": open_jsonl, "parquet": open_parquet}[kind](config, seq_len=seq_len, split=split, build=build)

    return open_records


def write(kind, path, texts=TEXTS, field="text"):
    if kind == "parquet":
        pq.write_table(pa.table({"number": range(len(texts)), field: texts}), path, row_group_size=7)
    else:
        lines = "".join(json.dumps({"number": n, field: text}) + "\n" for n, text in enumerate(texts))
        path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())
    return path


def text_of(source):
    """All tokens but those of a last, incomplete window."""
    return source.read(np.arange(len(source)))["tokens"].ravel()


@pytest.mark.parametrize(("kind", "name"), [("jsonl", "a.jsonl"), ("jsonl", "a.jsonl.gz"), ("parquet", "a.parquet")])
def test_documents_follow_each_other_each_with_an_end(tmp_path, open_records, kind, name):
    write(kind, tmp_path / name)
    (tmp_path / "other.md").write_text("not a record")

    found = text_of(open_records(kind, tmp_path))

    expected = [token for text in TEXTS for token in [*text.encode(), END]]
    assert found.tolist() == expected[: len(found)]
    assert len(expected) - len(found) <= 8


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_samples_are_those_of_the_same_documents_as_text_files(tmp_path, open_records, build, use_tokenizer, kind):
    for n, text in enumerate(TEXTS):
        (tmp_path / f"{n:02}.txt").write_text(text)
    config = TextFilesConfig(path=str(tmp_path), tokenizer=use_tokenizer("bytes"), document_mask=True)
    as_files = open_text_files(config, seq_len=8, split="train", build=build)

    records = open_records(kind, write(kind, tmp_path / f"a.{kind}"), document_mask=True)

    indices = np.arange(len(as_files))
    for name, values in as_files.read(indices).items():
        np.testing.assert_array_equal(records.read(indices)[name], values)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_documents_are_held_out_by_their_number_so_that_more_of_them_move_no_other(tmp_path, open_records, kind):
    def documents(split, texts):
        source = open_records(kind, write(kind, tmp_path / f"a.{kind}", texts), split, validation=0.3, seq_len=1)
        return [part for part in bytes((text_of(source) % 256).astype("u1")).split(b"\0") if part]

    trained, held_out = documents("train", TEXTS), documents("validation", TEXTS)

    assert sorted([*trained, *held_out]) == sorted(text.encode() for text in TEXTS)
    assert 4 <= len(held_out) <= 20
    assert set(documents("validation", [*TEXTS, *TEXTS])) >= set(held_out)


def test_documents_without_text_are_left_out(tmp_path, open_records):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": null}\n\n{"text": "some text"}\n')

    assert bytes(text_of(open_records("jsonl", tmp_path)).astype("u1")) == b"some tex"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b'{"text": "fine"}\n{"text": "cut of', r"a\.jsonl, line 2 is not JSON: .* it may be truncated"),
        (b'{"text": "fine"}\n{"text": 3}\n', r"a\.jsonl, line 2: 'text' must be text, it is 3"),
        (
            b'{"text": "fine"}\n{"body": "x", "id": 1}\n',
            r"line 2 has no 'text'; its keys are body, id .*text_field",
        ),
        (b'{"text": "fine"}\n{"text": "\xff"}\n', r"a\.jsonl, line 2 is not UTF-8 .*encoding_errors"),
        (b'{"text": "fine"}\n{"text": "\\ud800"}\n', r"a\.jsonl, line 2 is not valid UTF-8"),
        (b'{"text": ""}\n', r"the train part of the text \(1 file\) is too small"),
    ],
)
def test_a_line_that_cannot_be_used_is_named_by_file_and_line(tmp_path, open_records, content, sentence):
    (tmp_path / "a.jsonl").write_bytes(content)

    with pytest.raises(ConfigError, match=sentence):
        open_records("jsonl", tmp_path)


@pytest.mark.parametrize("errors", ["replace", "skip"])
def test_text_that_is_no_utf8_may_be_replaced_or_left_out(tmp_path, open_records, errors):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "ab\xff"}\n{"text": "some text"}\n')

    source = open_records("jsonl", tmp_path, encoding_errors=errors, seq_len=1)

    expected = {"replace": "ab\N{REPLACEMENT CHARACTER}".encode() + b"\0", "skip": b""}[errors] + b"some text"
    assert bytes((text_of(source) % 256).astype("u1")).rstrip(b"\0") == expected


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_rows_that_are_no_utf8_are_named_replaced_or_left_out_as_lines_are(tmp_path, open_records, kind):
    """Arrow does not look at what others write as text: it was a traceback, with any encoding_errors."""
    texts = pa.array([b"some text", b"ab\xff", None, "é".encode()]).view(pa.string()).cast(kind)
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")

    with pytest.raises(ConfigError, match=r"a\.parquet, row 2 is not valid UTF-8 .*encoding_errors"):
        open_records("parquet", tmp_path)
    for errors, read in (("replace", ["some text", "ab\N{REPLACEMENT CHARACTER}"]), ("skip", ["some text"])):
        found = text_of(open_records("parquet", tmp_path, encoding_errors=errors, seq_len=1))
        assert found.tolist() == [token for text in [*read, "é"] for token in [*text.encode(), END]][:-1]


def test_a_column_of_a_name_that_two_have_is_refused(tmp_path, open_records):
    pq.write_table(pa.table([TEXTS, TEXTS], names=["text", "text"]), tmp_path / "a.parquet")

    with pytest.raises(ConfigError, match=r"a\.parquet has several columns 'text'; its columns are text, text"):
        open_records("parquet", tmp_path)


def test_a_column_that_is_not_there_or_no_text_is_refused_with_those_there_are(tmp_path, open_records):
    write("parquet", tmp_path / "a.parquet", field="body")

    with pytest.raises(ConfigError, match=r"no column 'text'; its columns are number, body .*the key text_field"):
        open_records("parquet", tmp_path)
    with pytest.raises(ConfigError, match="the column 'number' holds int64, not text"):
        open_records("parquet", tmp_path, text_field="number")
    assert len(open_records("parquet", tmp_path, text_field="body"))
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    with pytest.raises(ConfigError, match=r"a\.parquet is damaged or not a Parquet file"):
        open_records("parquet", tmp_path)


@pytest.mark.parametrize(("kind", "other"), [("jsonl", "parquet"), ("parquet", "jsonl")])
def test_a_file_of_the_other_source_is_sent_there(tmp_path, open_records, kind, other):
    """JSON Lines advised encoding_errors, and with it read half of the rows as no JSON."""
    write(other, tmp_path / f"a.{other}")

    with pytest.raises(ConfigError, match=rf"a\.{other} is .*: the data source '{other}' reads it"):
        open_records(kind, tmp_path / f"a.{other}", encoding_errors="skip")
    (tmp_path / f"a.{other}").rename(tmp_path / f"a.{kind}")
    assert len(open_records(other, tmp_path / f"a.{kind}"))  # the name decides nothing


def test_parquet_among_conversations_is_named(tmp_path):
    """It was said to be not UTF-8, to be converted to that."""
    write("parquet", tmp_path / "a.jsonl")

    with pytest.raises(ConfigError, match=r"a\.jsonl is a Parquet file, not JSON Lines; convert it"):
        [*read_records(tmp_path / "a.jsonl")]


def test_files_of_other_kinds_are_told_of(tmp_path, open_records):
    (tmp_path / "a.txt").write_text("text")

    with pytest.raises(ConfigError, match=r"no files that match '\*\*/\*\.parquet'; it has 1 ending in \.txt"):
        open_records("parquet", tmp_path)
