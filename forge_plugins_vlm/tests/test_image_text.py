"""The source ``image_text``: formats, images that cannot be read, what is held out, mixing."""

from __future__ import annotations

import csv
import io
import json
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from forge_core.data.stream import SampleStream
from forge_core.errors import ConfigError
from forge_plugins_vlm.data.config import expanded

X = -100
N = 32


@pytest.fixture
def samples(tmp_path, picture):
    """Names of pictures, and their captions."""
    colours, places = ["red", "green", "blue"], ["top", "left", "right"]
    return [
        (picture(f"pictures/{number:02d}.png", number), f"a {colours[number % 3]} circle {places[number % 2]}")
        for number in range(N)
    ]


def as_jsonl(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return {"path": str(path)}


def llava_record(name, caption):
    turns = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": caption}]
    return {"id": name, "image": name, "conversations": turns}


def message_record(name, caption):
    content = [{"type": "image", "image": name}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": caption}]}


def image_cell(root, name):
    return {"bytes": (root / name).read_bytes(), "path": name}


def llava_json(root, samples):
    (root / "a.json").write_text(json.dumps([llava_record(*one) for one in samples]), encoding="utf-8")
    return {"path": str(root / "a.json"), "format": "llava"}


def llava_lines(root, samples):
    return {**as_jsonl(root / "lines/a.jsonl", [llava_record(*one) for one in samples]), "format": "llava",
            "images": str(root)}  # fmt: skip


def messages(root, samples):
    return as_jsonl(root / "a.jsonl", [message_record(*one) for one in samples])


def captions_csv(root, samples):
    with (root / "a.csv").open("w", newline="", encoding="utf-8") as handle:
        csv.writer(handle).writerows([("file_name", "text"), *samples])
    keys = {"image_field": "file_name", "caption_field": "text"}
    return {"path": str(root / "a.csv"), "format": "captions", **keys}


def captions_jsonl(root, samples):
    records = [{"image": name, "caption": caption} for name, caption in samples]
    return {**as_jsonl(root / "a.jsonl", records), "format": "captions"}


def text_beside(root, samples):
    for name, caption in samples:
        (root / name).with_suffix(".txt").write_text(f"{caption}\n", encoding="utf-8")
    return {"path": str(root / "pictures"), "format": "captions"}


def write_tar(path, members):
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def tar_of_captions(root, samples):
    for shard in range(2):
        members = [
            (f"{name.partition('.')[0]}.{ending}", content)
            for name, caption in samples[shard * 16 : shard * 16 + 16]
            for ending, content in (("png", (root / name).read_bytes()), ("txt", caption.encode()))
        ]
        write_tar(root / f"shard-{shard:03d}.tar", members)
    return {"path": str(root / "shard-{000..001}.tar"), "format": "captions"}


def tar_of_messages(root, samples):
    members = [
        (f"{number:03d}.{ending}", content)
        for number, (name, caption) in enumerate(samples)
        for ending, content in (
            ("json", json.dumps(message_record("png", caption)).encode()),
            ("png", (root / name).read_bytes()),
        )
    ]
    write_tar(root / "all.tar", members)
    return {"path": str(root / "all.tar")}


def parquet_of_captions(root, samples):
    rows = [{"image": image_cell(root, name), "caption": caption} for name, caption in samples]
    pq.write_table(pa.Table.from_pylist(rows), root / "a.parquet", row_group_size=5)
    return {"path": str(root / "a.parquet"), "format": "captions"}


def parquet_of_bytes(root, samples):
    rows = [{"image": (root / name).read_bytes(), "caption": caption} for name, caption in samples]
    pq.write_table(pa.Table.from_pylist(rows), root / "a.parquet", row_group_size=5)
    return {"path": str(root / "a.parquet"), "format": "captions"}


def parquet_of_turns(root, samples):
    rows = [
        {"images": [image_cell(root, name)], "texts": [{"user": "", "assistant": caption}]} for name, caption in samples
    ]
    pq.write_table(pa.Table.from_pylist(rows), root / "a.parquet", row_group_size=7)
    return {"path": str(root / "a.parquet"), "format": "turns"}


def dataset_of_turns(root, samples):
    import datasets

    features = datasets.Features({
        "images": datasets.List(datasets.Image()),
        "texts": datasets.List({"user": datasets.Value("string"), "assistant": datasets.Value("string")}),
    })  # fmt: skip
    rows = {
        "images": [[image_cell(root, name)] for name, _ in samples],
        "texts": [[{"user": "", "assistant": caption}] for _, caption in samples],
    }
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(root / "saved"))
    return {"dataset": {"path": str(root / "saved")}, "format": "turns"}


def dataset_of_captions(root, samples):
    import datasets

    features = datasets.Features({"image": datasets.Image(), "caption": datasets.Value("string")})
    rows = {
        "image": [image_cell(root, name) for name, _ in samples],
        "caption": [caption for _, caption in samples],
    }
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(root / "saved"))
    return {"dataset": {"path": str(root / "saved")}, "format": "captions"}


FORMATS = [
    llava_json, llava_lines, captions_csv, captions_jsonl, text_beside, tar_of_captions, tar_of_messages,
    parquet_of_captions, parquet_of_bytes, parquet_of_turns, dataset_of_turns, dataset_of_captions,
]  # fmt: skip


def same(first, second):
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("write", FORMATS, ids=lambda one: one.__name__)
@pytest.mark.parametrize("packing", [False, True])
def test_the_same_samples_are_the_same_batches_in_every_format(write, packing, tmp_path, samples, open_source):
    expected = open_source(**messages(tmp_path, samples), packing=packing)

    found = open_source(**write(tmp_path, samples), packing=packing)

    assert len(found) == len(expected)
    assert same(found.read(np.arange(len(found))), expected.read(np.arange(len(found))))


@pytest.mark.parametrize("write", FORMATS, ids=lambda one: one.__name__)
def test_the_first_rows_are_read_of_every_format_and_no_more(write, tmp_path, samples, open_source):
    expected = open_source(**messages(tmp_path, samples[:18]))

    found = open_source(**write(tmp_path, samples), max_rows=18)  # of tars, some of the second

    assert found.counts["conversations"] == 18
    assert same(found.read(np.arange(len(found))), expected.read(np.arange(len(expected))))


def test_files_behind_the_last_row_are_not_opened_and_what_is_held_out_is_of_the_rows(tmp_path, samples, open_source):
    for name, part in (("a", samples[:16]), ("b", samples[16:])):
        as_jsonl(tmp_path / f"rows/{name}.jsonl", [message_record(*one) for one in part])
    (tmp_path / "rows/c.jsonl").write_text("no JSON", encoding="utf-8")
    keys = {"path": str(tmp_path / "rows"), "images": str(tmp_path), "validation": 0.3}
    with pytest.raises(ConfigError, match=r"c\.jsonl"):
        open_source(**keys)

    sizes = [open_source(**keys, max_rows=20, split=split).counts["conversations"] for split in ("train", "validation")]

    assert sum(sizes) == 20
    assert min(sizes) > 0


def test_interleaved_documents_are_the_same_in_json_and_parquet(tmp_path, picture, open_source):
    a, b = picture("a.png", 0), picture("b.png", 1)
    lines = as_jsonl(tmp_path / "a.jsonl", [{"images": [None, a, None, b], "texts": ["a", None, "red", None]}])
    rows = [
        {"images": [None, image_cell(tmp_path, a), None, image_cell(tmp_path, b)], "texts": ["a", None, "red", None]}
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")

    sources = [open_source(path=path, format="interleaved") for path in (lines["path"], str(tmp_path / "a.parquet"))]

    batches = [source.read(np.arange(1)) for source in sources]
    assert same(*batches)
    assert batches[0]["targets"][0, :7].tolist() == [X, X, 4, X, X, 0, X]
    assert batches[0]["pixels"].shape[1] == 2


def test_several_images_of_a_tar_are_in_their_order(tmp_path, picture, open_source):
    names = [picture("a.png", 0), picture("b.png", 1)]
    turns = [{"from": "human", "value": "<image> <image>"}, {"from": "gpt", "value": "no"}]
    members = [(f"0.{at}.png", (tmp_path / name).read_bytes()) for at, name in enumerate(names)]
    write_tar(tmp_path / "a.tar", [*members, ("0.json", json.dumps({"conversations": turns}).encode())])

    batch = open_source(path=str(tmp_path / "a.tar"), format="llava").read(np.arange(1))

    for place, name in enumerate(names):
        assert np.array_equal(batch["pixels"][0, place], np.asarray(Image.open(tmp_path / name)).transpose(2, 0, 1))


@pytest.mark.parametrize("processor", ["square", "anyres"])
def test_an_image_that_cannot_be_read_is_refused_by_name(processor, tmp_path, samples, open_source):
    (tmp_path / samples[0][0]).write_bytes(b"no picture")

    sentence = r"line 1: the image .*00\.png cannot be read: it is no picture of a known format; .*set on_error"
    with pytest.raises(ConfigError, match=sentence):
        open_source(**messages(tmp_path, samples), processor={"name": processor, "size": 8}, seq_len=64)


@pytest.mark.parametrize("processor", ["square", "anyres"])
def test_a_corrupt_image_is_skipped_and_counted(processor, tmp_path, samples, open_source):
    (tmp_path / samples[3][0]).write_bytes(b"no picture")
    (tmp_path / samples[5][0]).unlink()
    keys = {"processor": {"name": processor, "size": 8}, "seq_len": 64, "on_error": "skip"}
    source = open_source(**messages(tmp_path, samples), **keys)
    told = []

    source.watch(told.append)
    batch = source.read(np.arange(len(source)))

    # a missing file is known when the data are opened, and so is a damaged one whose size decides its tokens
    assert source.counts["unreadable"] == (1 if processor == "square" else 2)
    assert len(source) == N - source.counts["unreadable"]
    learned = (batch["targets"] != X).any(axis=1)
    assert np.flatnonzero(~learned).tolist() == ([3] if processor == "square" else [])
    assert (batch["pixels"][~learned] == 0).all()
    assert f"{source.counts['unreadable']} of 32 conversations are left out" in told[0]
    if processor == "square":
        assert "line 4: the image" in told[1]
        source.read(np.arange(len(source)))
        assert len(told) == 2
        assert same(source.read(np.array([3])), source.read(np.array([3])))


@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_a_source_without_a_single_image_that_can_be_read_is_refused(damage, tmp_path, samples, open_source):
    for name, _ in samples:
        if damage == "missing":
            (tmp_path / name).unlink()
        else:
            (tmp_path / name).write_bytes(b"no picture")

    with pytest.raises(ConfigError, match="none of"):
        open_source(**messages(tmp_path, samples), on_error="skip")


def test_a_picture_that_changes_under_a_run_is_refused(tmp_path, picture, open_source):
    name = picture("a.png", size=(8, 8))
    source = open_source(**messages(tmp_path, [(name, "a")]), processor={"name": "anyres", "size": 8}, seq_len=64)
    picture("a.png", size=(8, 30))

    with pytest.raises(ConfigError, match="files must not change while a run reads them"):
        source.read(np.arange(1))


def test_the_stream_goes_on_at_any_position(tmp_path, samples, open_source):
    keys = tar_of_captions(tmp_path, samples)
    whole = SampleStream(open_source(**keys), seed=3, shuffle=True)
    resumed = SampleStream(open_source(**keys), seed=3, shuffle=True)

    assert whole.source.fingerprint == resumed.source.fingerprint
    expected = whole.read(np.arange(100))
    for start in (13, 31, 77):  # within a shard, at its end, in another epoch
        found = resumed.read(np.arange(start, start + 8))
        assert all(np.array_equal(found[name], expected[name][start : start + 8]) for name in found)


@pytest.mark.parametrize("write", [captions_jsonl, tar_of_captions, parquet_of_captions, dataset_of_captions])
def test_threads_read_the_same(write, tmp_path, samples, open_source):
    source = open_source(**write(tmp_path, samples))
    expected = source.read(np.arange(N))

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda index: source.read(np.array([index % N])), range(4 * N)))

    for index, batch in enumerate(found):
        assert all(np.array_equal(batch[name][0], expected[name][index % N]) for name in batch)


def test_the_fingerprint_tells_processors_and_pictures_apart(tmp_path, samples, open_source, picture):
    keys = messages(tmp_path, samples)
    prints = [
        open_source(**keys, **more).fingerprint
        for more in ({}, {"packing": True}, {"processor": {"name": "square", "size": 8, "fit": "crop"}},
                     {"token_grid": [2, 1]}, {"seq_len": 20}, {"one_token_an_image": True})
    ]  # fmt: skip
    picture(samples[0][0], 99, size=(9, 9))
    prints.append(open_source(**keys).fingerprint)

    assert len(set(prints)) == len(prints)


def test_what_is_held_out_is_in_no_other_part(tmp_path, samples, open_source):
    keys = {**messages(tmp_path, samples), "validation": 0.3}
    parts = [open_source(**keys, split=split) for split in ("train", "validation", "all")]

    pixels = [{row.tobytes() for row in part.read(np.arange(len(part)))["pixels"]} for part in parts]

    assert not pixels[0] & pixels[1]
    assert pixels[0] | pixels[1] == pixels[2]
    with pytest.raises(ConfigError, match="validation = 0 holds nothing out"):
        open_source(**messages(tmp_path, samples), split="validation")


def test_sources_of_other_numbers_of_images_mix(tmp_path, samples, build, tokenizer_path):
    two = [{"messages": [{"role": "user", "content": [{"type": "image", "image": name}] * 2},
                         {"role": "assistant", "content": caption}]} for name, caption in samples]  # fmt: skip
    common = {
        "name": "image_text", "tokenizer": {"name": "tokenizer_file", "path": str(tokenizer_path)},
        "processor": {"name": "square", "size": 8}, "token_grid": [1, 2],
    }  # fmt: skip
    paths = messages(tmp_path, samples), as_jsonl(tmp_path / "two.jsonl", two)
    sources = [{"name": name, "weight": 1.0, "source": {**common, **path}}
               for name, path in zip("ab", paths, strict=True)]  # fmt: skip
    use = build.resolve("data_source", {"name": "mixture", "sources": sources})

    mixture = build(use, seq_len=16, split="train", seed=0, samples_per_step=4)

    batch = mixture.read_at(np.arange(8))
    assert batch["pixels"].shape == (8, 2, 3, 8, 8)
    assert (batch["pixels"][batch["source"] == 0, 1] == 0).all()
    assert (batch["pixels"][batch["source"] == 1, 1] != 0).any()


@pytest.fixture
def beside_text(tmp_path, samples, build, tokenizer_path):
    """Open a mixture of images and of files of text, whose keys are given."""
    (tmp_path / "texts").mkdir()
    for name in "abcde":
        (tmp_path / "texts" / f"{name}.txt").write_text(f"a red circle {name} " * 50)
    tokenizer = {"name": "tokenizer_file", "path": str(tokenizer_path)}

    def open_both(images=(), texts=(), split="train"):
        sources = {
            "images": {
                "name": "image_text", "processor": {"name": "square", "size": 8}, "token_grid": [1, 2],
                "tokenizer": tokenizer, **messages(tmp_path, samples), **dict(images),
            },
            "texts": {"name": "text_files", "path": str(tmp_path / "texts"), "tokenizer": tokenizer, **dict(texts)},
        }  # fmt: skip
        parts = [{"name": name, "weight": 1.0, "source": one} for name, one in sources.items()]
        use = build.resolve("data_source", {"name": "mixture", "sources": parts})
        alone = build(build.resolve("data_source", sources["texts"]), seq_len=16, split=split)
        return build(use, seq_len=16, split=split, seed=0, samples_per_step=4), alone

    return open_both


def test_text_alone_mixes_with_images(beside_text):
    mixture, texts = beside_text()

    batch = mixture.read_at(np.arange(40))

    is_text = batch["source"] == 1
    assert is_text.sum() == 20
    assert batch["pixels"].shape == (40, 1, 3, 8, 8)
    assert (batch["pixels"][~is_text] != 0).any(axis=(1, 2, 3, 4)).all()
    for name, absent in (("pixels", 0), ("image_slots", -1), ("image_range", 0)):
        assert (batch[name][is_text] == absent).all(), name
    of_texts = {row.tobytes() for row in texts.read(np.arange(len(texts)))["tokens"]}
    assert {row.tobytes() for row in batch["tokens"][is_text]} <= of_texts


def test_a_batch_without_an_image_has_the_entries_of_one_with_images(beside_text):
    """Ranks compute the same layers, whichever samples they get."""
    mixture, _ = beside_text()
    both = mixture.read_at(np.arange(40))

    alone = mixture.read_at(np.flatnonzero(both["source"] == 1)[:3])

    assert {name: (values.dtype, values.ndim) for name, values in alone.items()} == {
        name: (values.dtype, values.ndim) for name, values in both.items()
    }
    assert alone["pixels"].shape == (3, 1, 3, 8, 8)
    assert (alone["image_slots"] == -1).all()


def test_both_are_evaluated(beside_text):
    mixture, _ = beside_text(images={"validation": 0.3}, texts={"validation": 0.3}, split="validation")

    batch = mixture.read(np.arange(len(mixture)))

    assert set(batch["source"]) == {0, 1}
    assert (batch["image_slots"][batch["source"] == 1] == -1).all()


def test_documents_of_text_are_kept_apart_where_conversations_are(beside_text):
    with pytest.raises(ConfigError, match=r"entry 'document'.*; set document_mask or packing alike in all of them"):
        beside_text(images={"packing": True})
    mixture, _ = beside_text(images={"packing": True}, texts={"document_mask": True})

    assert {"document", "positions", "pixels"} <= set(mixture.read_at(np.arange(8)))


@pytest.mark.parametrize("content", ["<image> ?", "?", [{"type": "image"}, {"type": "text", "text": "?"}]])
def test_images_beside_messages_are_refused_with_the_formats_that_are_read(tmp_path, picture, open_source, content):
    """They were left out without a word, or the placeholder was refused without a word of them."""
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "yes"}]
    keys = as_jsonl(tmp_path / "a.jsonl", [{"messages": turns, "images": [picture("a.png")]}])

    with pytest.raises(
        ConfigError, match=r"a\.jsonl, line 1: 'images' stands beside 'messages'.*\"image\": .*\"llava\""
    ):
        open_source(**keys)


def test_images_in_messages_may_stand_beside_them_too(tmp_path, picture, open_source):
    keys = as_jsonl(tmp_path / "a.jsonl", [{**message_record(picture("a.png"), "yes"), "images": ["a.png"]}])

    assert open_source(**keys).n_tiles(np.arange(1)).tolist() == [1]


def test_a_video_is_its_frames_at_equal_distances(tmp_path, picture, open_source):
    for frame in range(10):
        picture(f"video/{frame}.png", frame)
    content = [{"type": "video", "video": "video", "fps": 5}, {"type": "text", "text": " ?"}]
    record = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "yes"}]}
    keys = as_jsonl(tmp_path / "a.jsonl", [record])

    for rate, frames in ((1.0, [0, 9]), (2.0, [0, 3, 6, 9]), (0.1, [0, 9]), (50.0, [0, 2, 4, 7, 9])):
        source = open_source(**keys, frames_per_second=rate, min_frames=2, max_frames=5)
        batch = source.read(np.arange(1))
        expected = [np.asarray(Image.open(tmp_path / f"video/{one}.png")).transpose(2, 0, 1) for one in frames]
        assert np.array_equal(batch["pixels"][0], np.stack(expected))


def test_a_folder_of_frames_lasts_as_long_as_its_rate_says(tmp_path, picture, open_source):
    for frame in range(3):
        picture(f"video/{frame}.png", frame)

    def opened(rate):
        parts = f'[{{"type": "video", "video": "video", "fps": {rate}}}]'
        turns = f'{{"role": "user", "content": {parts}}}, {{"role": "assistant", "content": "yes"}}'
        (tmp_path / "a.jsonl").write_text(f'{{"messages": [{turns}]}}')
        return open_source(path=str(tmp_path / "a.jsonl"), max_frames=2)

    assert opened("1e-320").n_tiles(np.arange(1)).tolist() == [2]  # it lasts for ever
    for rate in ("NaN", "0", '"8"'):
        with pytest.raises(ConfigError, match="'fps' must be a number above 0"):
            opened(rate)


def video_record(tmp_path, name):
    content = [{"type": "video", "video": name}]
    return as_jsonl(
        tmp_path / "a.jsonl",
        [{"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "yes"}]}],
    )


def broken_videos(tmp_path, monkeypatch):
    """A folder without a frame, and a file that the decoder does not take, each in a conversation."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.mp4").write_bytes(b"no video")

    class FFmpegError(Exception):
        pass

    def refuse(path):
        raise FFmpegError("Invalid data found when processing input")

    monkeypatch.setitem(sys.modules, "av", SimpleNamespace(open=refuse, FFmpegError=FFmpegError))
    return [
        {"messages": [{"role": "user", "content": [{"type": "video", "video": name}]},
                      {"role": "assistant", "content": "yes"}]}
        for name in ("empty", "a.mp4")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("which", "sentence"),
    [(0, r"empty cannot be read: it is a folder without images"), (1, r"a.mp4 cannot be read: Invalid data found")],
)
def test_a_video_that_cannot_be_read_is_refused_with_what_to_do(tmp_path, open_source, monkeypatch, which, sentence):
    record = broken_videos(tmp_path, monkeypatch)[which]

    with pytest.raises(ConfigError, match=rf"line 1: the video .*{sentence}.*set on_error = \"skip\""):
        open_source(**as_jsonl(tmp_path / "a.jsonl", [record]))


def test_a_video_of_a_name_that_no_file_can_have_is_refused(tmp_path, open_source):
    with pytest.raises(ConfigError, match=r"line 1: the video .*xxx cannot be read: File name too long; mend"):
        open_source(**video_record(tmp_path, "x" * 300))


def test_videos_that_cannot_be_read_are_skipped_and_counted(tmp_path, picture, open_source, monkeypatch):
    picture("good/0.png", 1)
    good = {"messages": [{"role": "user", "content": [{"type": "video", "video": "good"}]},
                         {"role": "assistant", "content": "yes"}]}  # fmt: skip
    records = [*broken_videos(tmp_path, monkeypatch), good]

    source = open_source(**as_jsonl(tmp_path / "a.jsonl", records), on_error="skip")

    assert len(source) == 1
    assert source.counts["unreadable"] == 2


def test_a_video_file_without_a_decoder_says_what_to_install(tmp_path, open_source, monkeypatch):
    (tmp_path / "a.mp4").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "av", None)

    with pytest.raises(ConfigError, match=r'pip install "forge-plugins-vlm\[video\]"'):
        open_source(**video_record(tmp_path, "a.mp4"))


def test_a_video_file_is_decoded_frame_by_frame(tmp_path, open_source):
    av = pytest.importorskip("av")
    with av.open(str(tmp_path / "a.mkv"), "w") as container:
        stream = container.add_stream("ffv1", rate=2)
        stream.width, stream.height, stream.pix_fmt = 16, 16, "gray"
        for number in range(9):
            frame = av.VideoFrame.from_ndarray(np.full((16, 16), 20 * number, np.uint8), format="gray")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())

    batch = open_source(**video_record(tmp_path, "a.mkv"), frames_per_second=1.0, max_frames=3).read(np.arange(1))

    assert batch["pixels"][0].mean(axis=(1, 2, 3)).round().tolist() == [0, 80, 160]


@pytest.mark.parametrize(
    ("record", "keys", "words"),
    [
        ({"conversations": [{"from": "human", "value": "?"}]}, {"format": "llava"}, "no message of the role"),
        ({"image": "a.png", "conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "a"}]},
         {"format": "llava"}, r"has 1 images, and 0 times '<image>' in its turns"),
        ({"conversations": [{"from": "me", "value": "?"}]}, {"format": "llava"}, "'from' as one of human"),
        ({"conversations": [{"from": "gpt", "value": "<image>"}]}, {"format": "llava"}, "stands in an answer, turn 1"),
        ({"messages": [{"role": "user", "content": [{"type": "sound"}]}]}, {}, "the type text, image or video"),
        ({"image": "a.png"}, {"format": "captions"}, r"has no 'caption'; its keys are image \(choose with"),
        ({"image": 3, "caption": "a"}, {"format": "captions"}, "an image must be the name of a file, it is 3"),
        ({"image": "http://x/a.png", "caption": "a"}, {"format": "captions"}, "is an address; download it"),
        ({"image": "a\0.png", "caption": "a"}, {"format": "captions"}, "an image must be the name of a file"),
        ({"image": "\ud800.png", "caption": "a"}, {"format": "captions"}, "an image must be the name of a file"),
        ({"images": [None], "texts": []}, {"format": "interleaved"}, "1 images and 0 texts"),
        ({"images": [None], "texts": [None]}, {"format": "interleaved"}, "neither an image nor a text at place 1"),
        ({"texts": [{"user": "?"}]}, {"format": "turns"}, "text 1 must have 'user' and 'assistant'"),
        ({"messages": [{"role": "assistant", "content": ""}]}, {}, "has nothing to learn"),
    ],
)  # fmt: skip
def test_what_is_not_in_the_format_is_refused_by_its_line(record, keys, words, tmp_path, open_source, picture):
    picture("a.png")
    with pytest.raises(ConfigError, match=words) as caught:
        open_source(**as_jsonl(tmp_path / "a.jsonl", [record]), **keys)
    assert "a.jsonl, line 1" in str(caught.value)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("a.png,a red,circle", "row 1 of .*a.csv has more values than the first line has names"),
        (f"a.png,{'a' * 200_000}", "row 1 of .*a.csv is not CSV: field larger than field limit"),
    ],
    ids=["a comma", "too long"],
)
def test_a_damaged_row_of_a_csv_is_refused_by_its_number(row, words, tmp_path, open_source, picture):
    picture("a.png")
    (tmp_path / "a.csv").write_text(f"image,caption\n{row}\n")

    with pytest.raises(ConfigError, match=words):
        open_source(path=str(tmp_path / "a.csv"), format="captions")


@pytest.mark.parametrize(
    ("said", "expected"), [(["b.png", "a.png"], [1, 0]), (["elsewhere/1.png", "elsewhere/2.png"], [0, 1])]
)
def test_images_of_a_tar_are_in_the_order_in_which_its_json_names_them(said, expected, tmp_path, picture, open_source):
    turns = [{"from": "human", "value": "<image><image>"}, {"from": "gpt", "value": "a"}]
    contents = [(tmp_path / picture(f"{seed}.png", seed)).read_bytes() for seed in range(2)]
    members = [("0.a.png", contents[0]), ("0.b.png", contents[1])]
    members.append(("0.json", json.dumps({"images": said, "conversations": turns}).encode()))
    write_tar(tmp_path / "a.tar", members)

    (pixels,) = open_source(path=str(tmp_path / "a.tar"), format="llava").read(np.arange(1))["pixels"]

    pictures = [np.asarray(Image.open(tmp_path / f"{seed}.png")).transpose(2, 0, 1) for seed in expected]
    assert np.array_equal(pixels, np.stack(pictures))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"caption_field": "text"}, 'is about format = "captions"'),
        ({"prompt_template": "{answer} {prompt}"}, 'must have one "{prompt}" and end with its one "{answer}"'),
        ({"prompt_template": "<image>{prompt} {answer}"}, "has the placeholder '<image>'"),
        ({"prompt_template": "{prompt}: {answer}", "chat_template": True}, "has no effect with chat_template = true"),
        ({"date": "2026-01-31"}, "has no effect without chat_template = true"),
        ({"max_frames": 2, "min_frames": 3}, "must be at least min_frames = 3"),
        ({"token_grid": [0, 2]}, "rows and columns from 1 on"),
        ({"processor": {"name": "sqare"}}, "square"),
    ],
)
def test_keys_that_cannot_be_are_refused(keys, words, tmp_path, open_source):
    with pytest.raises(ConfigError) as caught:
        open_source(path=str(tmp_path), **keys)
    assert words in str(caught.value)


def test_an_empty_placeholder_is_one_problem(tmp_path, open_source):
    with pytest.raises(ConfigError, match="must not be empty") as refused:
        open_source(path=str(tmp_path), placeholder="")

    assert "prompt_template" not in str(refused.value)


def test_braces_for_more_files_than_there_can_be_are_refused():
    with pytest.raises(ConfigError, match=r"path: 'a-0-\{000\.\.999999999\}\.tar' would be more than 1,000,000 files"):
        expanded("a-{0..99}-{000..999999999}.tar")
