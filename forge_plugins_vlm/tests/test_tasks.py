"""The tasks that ``forge vlm`` draws."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from forge_plugins_data.tokenizer_config import TokenizerFileConfig
from forge_plugins_data.tokenizer_file import TokenizerFile
from forge_plugins_vlm.commands import vlm
from forge_plugins_vlm.tasks.drawing import COLOURS
from forge_plugins_vlm.tasks.extensions import OPPOSITE, moving
from forge_plugins_vlm.tasks.shapes import CLASSES

SIZES = ["--train", "192", "--held-out", "96"]


def run(*arguments):
    return CliRunner().invoke(vlm, [*map(str, arguments)], catch_exceptions=False)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    out = tmp_path_factory.mktemp("shapes") / "out"
    assert run("shapes", "--out", out, *SIZES).exit_code == 0
    return out


def digest(folder):
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return [(str(file.relative_to(folder)), hashlib.sha256(file.read_bytes()).hexdigest()) for file in files]


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def test_shapes_are_the_same_for_a_seed_and_others_for_another(shapes, tmp_path):
    run("shapes", "--out", tmp_path / "again", *SIZES)
    run("shapes", "--out", tmp_path / "other", *SIZES, "--seed", "1")

    assert digest(shapes) == digest(tmp_path / "again")
    pictures = [
        {content for name, content in digest(one) if name.endswith(".png")} for one in (shapes, tmp_path / "other")
    ]
    assert not pictures[0] & pictures[1]


def test_every_class_is_in_both_parts_as_often(shapes):
    for name, number in (("train", 2), ("held_out", 1)):
        captions = [record["conversations"][1]["value"] for record in read(shapes / f"{name}.json")]
        assert sorted(captions) == sorted(["a " + " ".join(one) for one in CLASSES] * number)
    written = (shapes / "captions.txt").read_text(encoding="utf-8").splitlines()
    assert written == [record["conversations"][1]["value"] for record in read(shapes / "train.json")]


def test_a_picture_shows_what_its_caption_says(shapes):
    for record in read(shapes / "train.json"):
        _, colour, _, row, column = record["conversations"][1]["value"].split()
        image = Image.open(shapes / record["image"])
        assert (image.mode, image.size) == ("RGB", (32, 32))
        pixels = np.asarray(image, dtype=np.float64)
        brightness = pixels.max(axis=2) - np.median(pixels.max(axis=2))
        quadrants = {(r, c): brightness[16 * i : 16 * i + 16, 16 * j : 16 * j + 16].sum()
                     for i, r in enumerate(("top", "bottom")) for j, c in enumerate(("left", "right"))}  # fmt: skip
        assert max(quadrants, key=quadrants.get) == (row, column)
        inside = pixels[brightness > 70].mean(axis=0)
        nearest = min(COLOURS, key=lambda one: np.abs(inside / inside.max() - np.array(COLOURS[one]) / max(COLOURS[one])).sum())  # fmt: skip # noqa: E501
        assert nearest == colour


def test_the_tokenizer_knows_the_captions_the_end_and_the_placeholder(shapes):
    tokenizer = TokenizerFile(TokenizerFileConfig(path=str(shapes / "tokenizer.json")), base=shapes)

    ids = tokenizer.encode("<image> a red circle top left")
    assert tokenizer.end_of_document == 0
    assert len(ids) == 6
    assert 2 not in ids
    assert tokenizer.decode(ids) == "<image> a red circle top left"


def test_shapes_open_as_a_source(shapes, open_source):
    tokenizer = {"name": "tokenizer_file", "path": str(shapes / "tokenizer.json")}
    keys = {
        "format": "llava",
        "tokenizer": tokenizer,
        "processor": {"name": "square", "size": 32},
        "token_grid": [4, 4],
    }

    source = open_source(path=str(shapes / "train.json"), seq_len=24, **keys)

    batch = source.read(np.array([5]))
    expected = np.asarray(Image.open(shapes / "images/train/00005.png")).transpose(2, 0, 1)
    assert np.array_equal(batch["pixels"][0, 0], expected)
    learned = batch["targets"][0][batch["targets"][0] != -100]
    assert source.tokenizer.decode(learned) == read(shapes / "train.json")[5]["conversations"][1]["value"]
    assert learned[-1] == source.tokenizer.end_of_document


def test_a_folder_with_something_in_it_is_refused(shapes):
    result = CliRunner().invoke(vlm, ["shapes", "--out", str(shapes)])

    assert "is there already" in str(result.exception)


def test_swapping_two_images_turns_the_answer_round(tmp_path):
    run("shapes", "--out", tmp_path / "two", "--task", "two_images", "--train", 8, "--held-out", 8)

    for record, control in zip(
        *(read(tmp_path / "two" / f"{one}.json") for one in ("held_out", "control")), strict=True
    ):
        assert record["image"] == control["image"][::-1]
        assert record["conversations"][0] == control["conversations"][0]
        assert {record["conversations"][1]["value"], control["conversations"][1]["value"]} == {"first", "second"}


def test_exchanging_colours_changes_the_answer_and_nothing_else(tmp_path):
    run("shapes", "--out", tmp_path / "two", "--task", "binding", "--train", 8, "--held-out", 8)

    for record, control in zip(
        *(read(tmp_path / "two" / f"{one}.json") for one in ("held_out", "control")), strict=True
    ):
        assert record["conversations"][0] == control["conversations"][0]
        assert record["conversations"][1] != control["conversations"][1]
        first, second = (np.asarray(Image.open(tmp_path / "two" / one["image"])) for one in (record, control))
        assert not np.array_equal(first, second)
        assert (first == second).all(axis=2).mean() > 0.5


def test_a_video_in_reverse_moves_the_other_way(tmp_path, open_source):
    out = tmp_path / "motion"
    run("shapes", "--out", out, "--task", "motion", "--train", 8, "--held-out", 8)
    tokenizer = {"name": "tokenizer_file", "path": str(out / "tokenizer.json")}
    keys = {"tokenizer": tokenizer, "processor": {"name": "square", "size": 32}, "max_frames": 4, "seq_len": 24}
    sources = [open_source(path=str(out / f"{one}.jsonl"), **keys) for one in ("held_out", "control", "single_frame")]

    batch, control, single = (source.read(np.arange(8)) for source in sources)

    answers = [[source.tokenizer.decode([row[row != -100][0]]) for row in one["targets"]]
               for source, one in zip(sources, (batch, control, single), strict=True)]  # fmt: skip
    assert answers[0] == ["left", "right", "up", "down"] * 2 == answers[2]
    assert answers[1] == [OPPOSITE[one] for one in answers[0]]
    assert batch["pixels"].shape[1] == 4
    assert np.array_equal(batch["pixels"], control["pixels"][:, ::-1])
    assert all(
        (one == other).all(axis=(1, 2, 3)).any() for one, other in zip(batch["pixels"], single["pixels"], strict=True)
    )


def test_a_frame_alone_does_not_tell_the_direction():
    places = {direction: [] for direction in OPPOSITE}
    for number in range(8000):
        rng = np.random.default_rng([7, number])
        direction = [*OPPOSITE][number % 4]
        thing = moving(direction, rng)[int(rng.integers(4))]
        places[direction].append((thing.x, thing.y))

    moments = {one: np.concatenate([np.mean(found, axis=0), np.std(found, axis=0)]) for one, found in places.items()}
    for found in moments.values():
        assert np.abs(found - moments["left"]).max() < 0.5  # three deviations of a mean of 2,000


def test_held_out_words_are_no_others(tmp_path):
    run("words", "--out", tmp_path / "words", "--train", 60, "--held-out", 20)
    run("words", "--out", tmp_path / "again", "--train", 60, "--held-out", 20)

    assert digest(tmp_path / "words") == digest(tmp_path / "again")
    train, held_out = ([one["conversations"][1]["value"] for one in read(tmp_path / "words" / f"{name}.json")]
                       for name in ("train", "held_out"))  # fmt: skip
    assert not set(train) & set(held_out)
    tokenizer = TokenizerFile(TokenizerFileConfig(path=str(tmp_path / "words/tokenizer.json")), base=tmp_path)
    assert tokenizer.decode(tokenizer.encode(f"<image> {train[0]}")) == f"<image> {train[0]}"
    assert len(tokenizer.encode(train[0])) == len(train[0])
    image = Image.open(tmp_path / "words/images/train/00000.png")
    assert np.asarray(image).min() < 100 < np.asarray(image).max()
