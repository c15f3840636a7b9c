"""The source ``image_text_streaming``: what ``image_text`` has, once an epoch, from any state."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice, takewhile

import numpy as np
import pytest
from PIL import Image

from forge_core.cli import main
from forge_core.contracts.data_source import CheckedSource
from forge_core.contracts.loss import IGNORED
from forge_core.data.streams import StreamsByPosition
from forge_core.errors import ConfigError

datasets = pytest.importorskip("datasets")

N = 24
COLOURS = ("red", "green", "blue")


@pytest.fixture
def rows(tmp_path, picture):
    """Conversations with one or two images, each with another picture."""
    found = []
    for number in range(N):
        names = [picture(f"{number:02}-{one}.png", 7 * number + one) for one in range(1 + number % 2)]
        texts = [{"user": "what is it ?", "assistant": f"a {COLOURS[number % 3]} circle"}]
        found.append({"images": [str(tmp_path / name) for name in names], "texts": texts})
    return found


def saved(folder, rows):
    features = datasets.Features(
        {
            "images": datasets.List(datasets.Image()),
            "texts": datasets.List({"user": datasets.Value("string"), "assistant": datasets.Value("string")}),
        }
    )
    return datasets.Dataset.from_list(rows, features=features)


@pytest.fixture(params=["saved", "five parquet files", "json of names"])
def corpus(tmp_path, rows, request):
    """Keys of a data set of ``rows``, one way or another."""
    folder = tmp_path / "corpus"
    if request.param == "saved":
        saved(folder, rows).save_to_disk(str(folder), num_shards=3)
        return {"path": str(folder)}
    folder.mkdir()
    if request.param == "json of names":
        (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return {"path": "json", "data_files": str(folder / "a.jsonl")}
    whole = saved(folder, rows)
    for number in range(5):
        embedded = whole.select(range(number, N, 5))
        embedded.to_parquet(str(folder / f"{number}.parquet"), batch_size=2)
    return {"path": str(folder)}


@pytest.fixture
def open_streams(open_source):
    def open_streams(dataset, **keys):
        own = {"streams": 4, "shuffle_buffer": 3, "format": "turns", "max_images": 3, **keys}
        return open_source(**{"name": "image_text_streaming", "dataset": dataset, "split": "train", **own})

    return open_streams


def epoch_of(source, stream):
    return [*takewhile(lambda read: read[1]["epoch"] == 0, source.open(stream, None))]


def content(sample):
    """A row without what fills up its tiles."""
    n_tiles = int(sample["image_range"][:, 2].max())
    return tuple(
        (name, values[:n_tiles].tobytes() if name == "pixels" else values.tobytes())
        for name, values in sorted(sample.items())
    )


def test_streams_have_what_the_indexed_source_has_once_an_epoch(open_streams, open_source, corpus):
    indexed = open_source(dataset=corpus, format="turns", max_images=3)
    expected = Counter(
        content({name: values[0] for name, values in indexed.read(np.array([index])).items()})
        for index in range(len(indexed))
    )

    source = open_streams(corpus)
    streams = [[content(sample) for sample, _ in epoch_of(source, stream)] for stream in range(4)]

    assert Counter(one for stream in streams for one in stream) == expected
    plain = open_streams(corpus, shuffle_buffer=1)
    unshuffled = [[content(sample) for sample, _ in epoch_of(plain, stream)] for stream in range(4)]
    assert streams != unshuffled
    assert [sorted(one) for one in streams] == [sorted(one) for one in unshuffled]


@pytest.mark.parametrize(
    "keys", [{}, {"packing": True, "shuffle_buffer": 5, "seq_len": 32, "max_images": 4}], ids=["plain", "packed"]
)
def test_each_state_continues_the_stream_over_the_ends_of_epochs(open_streams, corpus, keys):
    source = open_streams(corpus, **keys)
    read = [*islice(source.open(1, None), 16)]
    packed = keys and max(int(sample["document"].max()) for sample, _ in read)

    assert {state["epoch"] for _, state in read} >= {0, 1}
    assert not keys or packed > 1
    for number in range(1, len(read)):
        state = json.loads(json.dumps(read[number - 1][1]))
        again = [*islice(open_streams(corpus, **keys).open(1, state), len(read) - number)]
        assert [content(sample) for sample, _ in again] == [content(sample) for sample, _ in read[number:]]


def test_samples_of_a_batch_are_filled_up_to_the_most_tiles(open_streams, corpus):
    source = StreamsByPosition(open_streams(corpus, shuffle_buffer=1))

    batch = source.read_at(np.arange(8))

    n_tiles = batch["image_range"][:, :, 2].max(axis=1)
    assert sorted(set(n_tiles.tolist())) == [1, 2]
    assert batch["pixels"].shape == (8, 2, 3, 8, 8)
    assert not batch["pixels"][n_tiles == 1, 1].any()
    assert batch["pixels"][n_tiles == 2, 1].any(axis=(1, 2, 3)).all()


@pytest.fixture
def damaged(tmp_path, rows):
    """A data set of which one image in three has no picture."""
    for number in range(0, N, 3):
        (tmp_path / f"{number:02}-0.png").write_bytes(b"no picture")
    folder = tmp_path / "corpus"
    saved(folder, rows).save_to_disk(str(folder), num_shards=4)
    return {"path": str(folder)}


def test_an_image_that_cannot_be_read_is_refused_with_its_row(open_streams, damaged):
    with pytest.raises(ConfigError, match=r"stream 0, row 0 \(from 0\): the image .*column images, image 1 cannot be"):
        open_streams(damaged, shuffle_buffer=1)


@pytest.mark.parametrize("processor", ["square", "naflex"])
def test_images_that_cannot_be_read_are_skipped_and_counted(open_streams, damaged, processor):
    keys = {"processor": {"name": "naflex", "size": 8, "patch": 4, "max_patches": 4}} if processor == "naflex" else {}
    source = open_streams(damaged, on_error="skip", **keys)
    by_position, told = StreamsByPosition(source), []
    assert isinstance(by_position, CheckedSource)
    by_position.watch(told.append)

    read = [sample for stream in range(4) for sample, _ in epoch_of(source, stream)]

    learned = sum(bool((sample["targets"] != IGNORED).any()) for sample in read)
    assert learned == N - 8
    assert len(read) == (N if processor == "square" else N - 8)  # whose tokens depend on sizes, and are not known
    assert len(told) == 8
    outcome = "it has no targets" if processor == "square" else "it is left out"
    assert f"{outcome}, the 8. such of this process" in told[-1]


def test_a_run_may_go_on_without_images_that_cannot_be_read(open_streams, corpus):
    one, other = open_streams(corpus), open_streams(corpus, on_error="skip")

    assert one.fingerprint == other.fingerprint
    for keys in ({"max_images": 4}, {"prompt_template": "{prompt} is {answer}"}, {"packing": True}, {"streams": 2}):
        assert open_streams(corpus, **keys).fingerprint != one.fingerprint, keys


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"path": "a.json", "dataset": None}, r"name dataset in its place, or use the source image_text"),
        ({"validation": 0.1}, "hold nothing out, and validation = 0.1 is there"),
        ({"split": "validation"}, "holds nothing out and has no end"),
        ({"max_rows": 5}, "streams: have no last row, and max_rows = 5 is there; remove it, or use image_text"),
        ({"caption_field": "words"}, 'is about format = "captions"'),
        ({"max_images": 0}, "max_images"),
        ({"streams": 30}, "has nothing to learn in stream 29 of 30"),
        ({"format": "llava"}, r"stream 0, row 0 \(from 0\) has no 'conversations'"),
    ],
)
def test_what_cannot_be_streamed_is_refused(open_streams, tmp_path, rows, keys, sentence):
    saved(tmp_path, rows).save_to_disk(str(tmp_path / "corpus"))
    keys = {"dataset": {"path": str(tmp_path / "corpus")}, **keys}

    def read():
        return next(open_streams(**keys).open(29, None))

    with pytest.raises(ConfigError, match=sentence):
        read()


def test_nothing_to_read_at_all_is_refused(open_streams, tmp_path, rows):
    for file in tmp_path.glob("*.png"):
        file.write_bytes(b"no picture")
    saved(tmp_path, rows).save_to_disk(str(tmp_path / "corpus"))

    with pytest.raises(ConfigError, match="none of the first samples has images to read"):
        open_streams({"path": str(tmp_path / "corpus")}, on_error="skip")


def test_a_picture_in_memory_is_what_it_was(tmp_path, picture, open_streams):
    pixels = np.arange(192, dtype=np.uint8).reshape(8, 8, 3)
    Image.fromarray(pixels).save(tmp_path / "one.png")
    content = (tmp_path / "one.png").read_bytes()
    table = {"image": [content] * 4, "caption": ["a red circle"] * 4}
    datasets.Dataset.from_dict(table).save_to_disk(str(tmp_path / "corpus"))

    source = open_streams({"path": str(tmp_path / "corpus")}, format="captions", streams=1)
    sample, _ = next(source.open(0, None))

    assert np.array_equal(sample["pixels"][0], pixels.transpose(2, 0, 1))


JOB = """
[run]
name = "straight"
dir = "{folder}/runs"
[model]
name = "vision_language"
dim = 16
n_layers = 1
n_heads = 2
max_seq_len = 32
[model.encoder]
name = "conv_vit"
size = [8, 8]
patch = 4
dim = 16
n_layers = 1
n_heads = 2
[model.connector]
name = "linear"
[data]
name = "image_text_streaming"
dataset = {{path = "{folder}/corpus"}}
format = "turns"
token_grid = [2, 2]
max_images = 2
streams = 4
shuffle_buffer = 4
processor = {{name = "square", size = 8}}
tokenizer = {{name = "tokenizer_file", path = "{tokenizer}"}}
[train]
steps = 8
seq_len = 24
batch_size = 4
precision = "fp32"
[optimizer]
name = "adamw"
lr = 1e-2
[scheduler]
name = "constant"
[checkpoint]
interval = 3
[metrics]
interval = 1
"""

BESIDE_TEXT = """
[data]
name = "mixture"
[[data.sources]]
name = "text"
weight = 0.5
[data.sources.source]
name = "text_files"
path = "{folder}/texts"
tokenizer = {{name = "tokenizer_file", path = "{tokenizer}"}}
[[data.sources]]
name = "images"
weight = 0.5
[data.sources.source]
"""


@pytest.mark.parametrize("data", ["[data]", BESIDE_TEXT], ids=["alone", "beside text"])
def test_a_run_goes_on_with_the_very_next_sample(tmp_path, rows, tokenizer_path, data):
    saved(tmp_path, rows).save_to_disk(str(tmp_path / "corpus"))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a red circle " * 200)
    job = JOB.replace("[data]", data).format(folder=tmp_path, tokenizer=tokenizer_path)
    (tmp_path / "job.toml").write_text(job)
    assert main(["run", str(tmp_path / "job.toml")]) == 0
    (before,) = (tmp_path / "runs" / "straight" / "checkpoints").glob("*3")
    assert main(["run", str(tmp_path / "job.toml"), "run.name=parted", f"checkpoint.resume={before}"]) == 0

    straight, parted = (losses(tmp_path / "runs" / name) for name in ("straight", "parted"))
    assert len(straight) == 8
    assert parted == {step: loss for step, loss in straight.items() if step > 3}


def losses(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}
