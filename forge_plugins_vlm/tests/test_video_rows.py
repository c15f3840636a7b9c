"""Videos of rows: captions and conversations of LLaVA, in every kind of file and data set."""

from __future__ import annotations

import io
import json
import tarfile
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forge_core.errors import ConfigError

av = pytest.importorskip("av")
datasets = pytest.importorskip("datasets")

NAMES, QUESTION, ANSWERS = ("a.mkv", "b.mkv"), "what is it ?", ("a red circle", "a blue square")
CAPTIONS = {"format": "captions", "video_field": "clip", "prompt_field": "question", "caption_field": "answer"}
FRAMES = {"frames_per_second": 1.0, "max_frames": 3}


@pytest.fixture
def rows(tmp_path):
    """Two videos of nine frames, each brighter than the one before, with a question and an answer."""
    for base, name in enumerate(NAMES):
        with av.open(str(tmp_path / name), "w") as container:
            stream = container.add_stream("ffv1", rate=2)
            stream.width, stream.height, stream.pix_fmt = 8, 8, "gray"
            for number in range(9):
                pixels = np.full((8, 8), 20 * number + 10 * base, np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="gray")))
            container.mux(stream.encode())
    return [{"clip": name, "question": QUESTION, "answer": answer} for name, answer in zip(NAMES, ANSWERS, strict=True)]


@pytest.fixture
def expected(tmp_path, rows, open_source):
    """The batch of the same rows as messages."""
    records = []
    for row in rows:
        content = [{"type": "video", "video": row["clip"]}, {"type": "text", "text": row["question"]}]
        turns = [{"role": "user", "content": content}, {"role": "assistant", "content": row["answer"]}]
        records.append({"messages": turns})
    batch = open_source(**lines(tmp_path / "messages.jsonl", records), **FRAMES).read(np.arange(2))
    assert batch["pixels"].mean(axis=(2, 3, 4)).tolist() == [[0, 80, 160], [10, 90, 170]]
    return batch


def lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return {"path": str(path)}


def captions(root, rows):
    return lines(root / "a.jsonl", rows) | CAPTIONS


def arrays_of_one(root, rows):
    return lines(root / "a.jsonl", [{**row, "clip": [row["clip"]]} for row in rows]) | CAPTIONS


def llava(root, rows, sign="<video>"):
    records = [
        {"video": row["clip"], "conversations": [{"from": "human", "value": sign + row["question"]},
                                                 {"from": "gpt", "value": row["answer"]}]}
        for row in rows
    ]  # fmt: skip
    return lines(root / "a.jsonl", records) | {"format": "llava"}


def llava_video(root, rows):
    return llava(root, rows, "<image>")


def write_tar(root, rows, said):
    with tarfile.open(root / "a.tar", "w") as tar:
        for number, row in enumerate(rows):
            content = (root / row["clip"]).read_bytes()
            for ending, one in (("json", json.dumps(said(row, number)).encode()), ("mkv", content)):
                info = tarfile.TarInfo(f"{number}.{ending}")
                info.size = len(one)
                tar.addfile(info, io.BytesIO(one))
    return {"path": str(root / "a.tar")}


def tar_of_captions(root, rows):
    return write_tar(root, rows, lambda row, _: {**row, "clip": "elsewhere"}) | CAPTIONS


def tar_of_messages(root, rows):
    def said(row, number):
        content = [{"type": "video", "video": f"{number}.mkv"}, {"type": "text", "text": row["question"]}]
        return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": row["answer"]}]}

    return write_tar(root, rows, said)


def with_bytes(root, rows):
    return [{**row, "clip": (root / row["clip"]).read_bytes()} for row in rows]


def parquet(root, rows):
    pq.write_table(pa.Table.from_pylist(with_bytes(root, rows)), root / "a.parquet")
    return {"path": str(root / "a.parquet")} | CAPTIONS


def hub(root, rows):
    text = datasets.Value("string")
    features = datasets.Features({"clip": datasets.Video(), "question": text, "answer": text})
    cells = [{**row, "clip": {"bytes": row["clip"], "path": None}} for row in with_bytes(root, rows)]
    datasets.Dataset.from_list(cells, features=features).save_to_disk(str(root / "saved"))
    return {"dataset": {"path": str(root / "saved")}} | CAPTIONS


def hub_of_paths(root, rows):
    cells = [{**row, "clip": str(root / row["clip"])} for row in rows]
    loaded = datasets.Dataset.from_list(cells).cast_column("clip", datasets.Video())
    loaded.save_to_disk(str(root / "saved"))
    return {"dataset": {"path": str(root / "saved")}} | CAPTIONS


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize(
    "store",
    [captions, arrays_of_one, llava, llava_video, tar_of_captions, tar_of_messages, parquet, hub, hub_of_paths],
)
def test_a_video_of_a_row_is_the_frames_of_its_file(store, tmp_path, rows, expected, open_source):
    source = open_source(**store(tmp_path, rows), **FRAMES)

    assert_same(source.read(np.arange(2)), expected)


@pytest.mark.parametrize("store", [hub, hub_of_paths])
def test_a_video_of_a_streamed_row_is_the_frames_of_its_file(store, tmp_path, rows, expected, open_source):
    streamed = {"name": "image_text_streaming", "streams": 1, "shuffle_buffer": 1, "split": "train"}
    source = open_source(**streamed, **store(tmp_path, rows), **FRAMES)

    read = [sample for sample, _ in islice(source.open(0, None), 2)]

    assert_same({name: np.stack([sample[name] for sample in read]) for name in read[0]}, expected)


def test_a_row_has_an_image_and_a_video_or_one_of_them(tmp_path, rows, picture, open_source):
    image = picture("a.png")
    keys = lines(tmp_path / "a.jsonl", [{**rows[0], "image": image}, {**rows[1], "clip": None, "image": image}])

    batch = open_source(**keys, **CAPTIONS, **FRAMES).read(np.arange(2))

    assert batch["image_range"][:, :, 2].max(axis=1).tolist() == [4, 1]
    assert batch["pixels"][0, 1:].mean(axis=(1, 2, 3)).tolist() == [0, 80, 160]


def test_signs_of_llava_take_images_and_videos_in_their_order(tmp_path, rows, picture, open_source):
    turns = [{"from": "human", "value": "<video> a <image>"}, {"from": "gpt", "value": "yes"}]
    record = {"image": picture("a.png"), "video": NAMES[0], "conversations": turns}

    batch = open_source(**lines(tmp_path / "a.jsonl", [record]), format="llava", **FRAMES).read(np.arange(1))

    assert batch["pixels"][0, :3].mean(axis=(1, 2, 3)).tolist() == [0, 80, 160]
    assert batch["tokens"][0, :9].tolist() == [1] * 6 + [3] + [1] * 2


@pytest.mark.parametrize(
    ("record", "keys", "words"),
    [
        ({"image": "a.png", "answer": "a"}, CAPTIONS, r"line 1 has no 'clip'; its keys .* with the key video_field\)"),
        ({"clip": 3}, CAPTIONS, "line 1: a video must be the name of a file, it is 3"),
        ({"clip": "https://x/a.mp4"}, CAPTIONS, "is an address; download it"),
        ({"video": "a.mkv", "conversations": [{"from": "human", "value": "?"}]}, {"format": "llava"},
         "has 0 images and 1 videos, and 0 times '<image>' or '<video>' in its turns"),
        ({"image": "a.png", "video": "a.mkv", "conversations": [{"from": "human", "value": "<image><image>"}]},
         {"format": "llava"}, "has 1 images and 1 videos, and 2 times"),
        ({"video": "a.mkv", "conversations": [{"from": "gpt", "value": "<video>"}]}, {"format": "llava"},
         "'<video>' stands in an answer, turn 1"),
        ({}, {"video_field": "clip"}, 'is about format = "captions"'),
    ],
)  # fmt: skip
def test_a_video_that_is_not_there_is_refused(record, keys, words, tmp_path, rows, open_source):
    with pytest.raises(ConfigError, match=words):
        open_source(**lines(tmp_path / "a.jsonl", [{"question": "?", "answer": "a", **record}]), **keys)


def test_bytes_that_are_no_video_are_refused_by_their_cell(tmp_path, rows, open_source):
    keys = parquet(tmp_path, rows)
    row = {**rows[0], "clip": b"no video"}
    pq.write_table(pa.Table.from_pylist([row]), Path(keys["path"]))

    with pytest.raises(ConfigError, match=r"the video row 1 of group 1 of .*a.parquet, column clip cannot be read"):
        open_source(**keys)
    with pytest.raises(ConfigError, match="none of its 1 conversations has images to read"):
        open_source(**keys, on_error="skip")


def test_a_member_that_a_tar_does_not_have_is_refused(tmp_path, rows, open_source):
    content = [{"type": "video", "video": "c.mkv"}]
    keys = write_tar(tmp_path, rows, lambda *_: {"messages": [{"role": "user", "content": content}]})

    with pytest.raises(ConfigError, match=r"has no image or video 'c.mkv'; it has 0.mkv"):
        open_source(**keys)
