"""The format ``captions`` with what is asked of each image, in every kind of file and data set."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forge_core.errors import ConfigError

datasets = pytest.importorskip("datasets")

QUESTIONS = ("what is it ?", "is it a red circle ?", "what is it ?")
ANSWERS = ("a blue circle", "no", "a red square")
NAMES = {"image_field": "picture", "prompt_field": "question", "caption_field": "answer"}
VQA = {"format": "captions", **NAMES}


@pytest.fixture
def rows(tmp_path, picture):
    """A picture, a question and an answer each."""
    names = [picture(f"{number}.png", number) for number in range(3)]
    return [dict(zip(NAMES.values(), row, strict=True)) for row in zip(names, QUESTIONS, ANSWERS, strict=True)]


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def write_tar(path, members):
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return str(path)


def with_bytes(root, rows, key="picture"):
    return [{**row, key: {"bytes": (root / row[key]).read_bytes(), "path": row[key]}} for row in rows]


def lines(root, rows):
    return {"path": write_lines(root / "a.jsonl", rows)}


def table(root, rows):
    with (root / "a.csv").open("w", newline="", encoding="utf-8") as handle:
        csv.writer(handle).writerows([NAMES.values(), *(row.values() for row in rows)])
    return {"path": str(root / "a.csv")}


def shards(root, rows):
    members = []
    for number, row in enumerate(rows):
        said = {"question": row["question"], "answer": row["answer"]}
        members.append((f"{number}.json", json.dumps(said).encode()))
        members.append((f"{number}.png", (root / row["picture"]).read_bytes()))
    return {"path": write_tar(root / "a.tar", members)}


def parquet(root, rows):
    pq.write_table(pa.Table.from_pylist(with_bytes(root, rows)), root / "a.parquet")
    return {"path": str(root / "a.parquet")}


def hub(root, rows):
    text = datasets.Value("string")
    features = datasets.Features({"picture": datasets.Image(), "question": text, "answer": text})
    datasets.Dataset.from_list(with_bytes(root, rows), features=features).save_to_disk(str(root / "saved"))
    return {"dataset": {"path": str(root / "saved")}}


@pytest.fixture
def asked(tmp_path, rows, open_source):
    """The batch of the same rows as messages."""
    records = []
    for row in rows:
        content = [{"type": "image", "image": row["picture"]}, {"type": "text", "text": row["question"]}]
        turns = [{"role": "user", "content": content}, {"role": "assistant", "content": row["answer"]}]
        records.append({"messages": turns})
    return open_source(path=write_lines(tmp_path / "messages.jsonl", records)).read(np.arange(3))


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("store", [lines, table, shards, parquet, hub])
def test_a_prompt_of_a_row_stands_behind_its_image(store, tmp_path, rows, asked, open_source):
    source = open_source(**store(tmp_path, rows), **VQA)

    assert_same(source.read(np.arange(3)), asked)


@pytest.mark.parametrize("store", [parquet, hub])
def test_a_row_whose_text_is_no_utf8_is_refused_by_its_file(store, tmp_path, rows, open_source):
    """Arrow does not look at what others write as text: it was a traceback."""
    keys = store(tmp_path, rows)
    if store is parquet:
        whole = pq.read_table(tmp_path / "a.parquet")
        questions = pa.array([b"what", b"\xff", b"what"]).view(pa.string())
        pq.write_table(whole.set_column(1, "question", questions), tmp_path / "a.parquet")
    else:
        (file,) = tmp_path.rglob("*.arrow")
        file.write_bytes(file.read_bytes().replace(QUESTIONS[1].encode(), b"\xff" * len(QUESTIONS[1])))

    with pytest.raises(ConfigError, match=r"(saved|a\.parquet).*can't decode byte 0xff"):
        open_source(**keys, **VQA)


@pytest.mark.parametrize("store", [hub, parquet])
def test_a_prompt_of_a_streamed_row_stands_behind_its_image(store, tmp_path, rows, asked, open_source):
    keys = store(tmp_path, rows)
    dataset = keys.get("dataset") or {"path": "parquet", "data_files": keys["path"]}
    streamed = {"name": "image_text_streaming", "dataset": dataset, "streams": 1, "shuffle_buffer": 1}
    source = open_source(**streamed, **VQA, split="train")

    read = [sample for sample, _ in islice(source.open(0, None), 3)]

    assert_same({name: np.stack([sample[name] for sample in read]) for name in read[0]}, asked)
    other = open_source(**streamed, **{**VQA, "prompt_field": "answer"}, split="train")
    assert other.fingerprint != source.fingerprint


def test_a_prompt_of_a_row_is_written_by_the_template(tmp_path, rows, tokenizer_path, open_source):
    template = "<user> {prompt} <bot> {answer}"
    batch = open_source(**lines(tmp_path, rows[:1]), **VQA, prompt_template=template).read(np.arange(1))

    words = json.loads(tokenizer_path.read_text())["model"]["vocab"]
    said = "<user> <image> <image> what is it ? <bot> a blue circle <eos>"
    ids = [words[word] for word in said.split()]
    assert batch["tokens"][0, : len(ids)].tolist() == ids
    assert batch["targets"][0].tolist() == [-100] * 7 + ids[8:] + [-100] * 5


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({**VQA, "prompt_field": "query"}, r"line 1 has no 'query'; its keys are picture, .* the key prompt_field\)"),
        ({**VQA, "prompt_field": "n"}, "line 1: 'n' must be text, it is 3"),
        ({**VQA, "prompt_field": ""}, "prompt_field"),
        ({"prompt_field": "question"}, "is about format = \"captions\", and has no effect with 'messages'; remove it"),
    ],
)
def test_a_prompt_that_is_not_there_is_refused(keys, words, tmp_path, rows, open_source):
    with pytest.raises(ConfigError, match=words):
        open_source(**lines(tmp_path, [{**row, "n": 3} for row in rows]), **keys)


def test_a_slice_of_a_split_is_so_many_rows(tmp_path, rows, open_source):
    absolute = [{**row, "picture": str(tmp_path / row["picture"])} for row in rows]
    files = write_lines(tmp_path / "a.jsonl", absolute)

    source = open_source(dataset={"path": "json", "data_files": files, "split": "train[:2]"}, **VQA)

    assert len(source) == 2
