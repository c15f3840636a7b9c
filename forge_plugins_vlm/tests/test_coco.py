"""``forge vlm prepare-coco``: captions of COCO become rows that sources and evaluations read."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from forge_core.cli import main
from forge_core.errors import ConfigError
from forge_plugins_vlm.commands import vlm
from forge_plugins_vlm.evaluation.questions import Questions

IMAGES = (
    ("train2014", "train", ["a red circle", "a red circle top"]),
    ("val2014", "restval", ["a green square left"]),
    ("val2014", "test", ["a blue circle ", "a blue circle left", "is it a circle"]),
    ("val2014", "test", ["a green circle", "a square"]),
)


@pytest.fixture
def coco(tmp_path, picture):
    """A ``dataset_coco.json`` of four images, which are in ``coco``."""
    images = [
        {
            "filepath": folder,
            "filename": f"COCO_{folder}_{number:012d}.jpg",
            "imgid": number,
            "cocoid": 9 + number,
            "split": split,
            "sentids": [],
            "sentences": [{"raw": caption, "tokens": caption.split(), "imgid": number} for caption in captions],
        }
        for number, (folder, split, captions) in enumerate(IMAGES)
    ]
    for number, image in enumerate(images):
        picture(f"coco/{image['filepath']}/{image['filename']}", number)
    path = tmp_path / "dataset_coco.json"
    path.write_text(json.dumps({"images": images, "dataset": "coco"}), encoding="utf-8")
    return path


@pytest.fixture
def prepare(coco, tmp_path):
    def prepare(*options):
        arguments = [str(coco), "--images", str(tmp_path / "coco"), "--out", str(tmp_path / "out"), *options]
        return CliRunner().invoke(vlm, ["prepare-coco", *arguments], catch_exceptions=False)

    return prepare


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_line_is_a_caption_with_its_image_and_all_references(prepare, tmp_path):
    assert "test.jsonl: captions of 2 images" in prepare().output

    assert [one.name for one in (tmp_path / "out").iterdir()] == ["test.jsonl"]
    found = rows(tmp_path / "out/test.jsonl")
    assert [one["caption"] for one in found] == [caption.strip() for _, split, all_ in IMAGES[2:] for caption in all_]
    assert found[1] == {
        "caption": "a blue circle left",
        "image": "val2014/COCO_val2014_000000000002.jpg",
        "image_id": 11,
        "references": ["a blue circle", "a blue circle left", "is it a circle"],
    }


@pytest.mark.parametrize(
    ("options", "images"),
    [
        (["--samples", "1"], {"test": 1}),
        (["--all-splits"], {"train": 1, "restval": 1, "test": 2}),
        (["--all-splits", "--samples", "1"], {"train": 1, "restval": 1, "test": 1}),
        (["--split", "train", "--split", "restval", "--samples", "0"], {"train": 1, "restval": 1}),
    ],
)
def test_splits_and_images_are_those_that_are_asked_for(prepare, tmp_path, options, images):
    prepare(*options)

    found = {file.stem: len({one["image_id"] for one in rows(file)}) for file in (tmp_path / "out").iterdir()}
    assert found == images


def test_the_command_of_the_page_writes_all(coco, tmp_path, monkeypatch, capfd):
    page = (Path(__file__).parents[2] / "docs" / "image-data.md").read_text(encoding="utf-8")
    [command] = re.findall(r"^\$ (forge vlm prepare-coco .*)$", page, re.M)
    monkeypatch.chdir(tmp_path)

    assert main(shlex.split(command)[1:]) == 0
    assert capfd.readouterr().out.splitlines() == [
        f"captions/{split}.jsonl: captions of {number} images"
        for split, number in (("train", 1), ("restval", 1), ("test", 2))
    ]


def test_the_first_images_of_a_split_are_500_unless_more_are_asked_for(prepare, coco, tmp_path):
    content = json.loads(coco.read_text(encoding="utf-8"))
    content["images"] = content["images"][2:] * 300
    coco.write_text(json.dumps(content), encoding="utf-8")

    assert "captions of 500 images" in prepare().output


def test_a_source_reads_them_and_an_evaluation_finds_all_references(prepare, tmp_path, open_source):
    prepare()
    keys = {"format": "captions", "images": str(tmp_path / "coco")}

    source = open_source(path=str(tmp_path / "out/test.jsonl"), **keys)

    assert len(source) == 5
    captions = [one["caption"] for one in rows(tmp_path / "out/test.jsonl")]
    references = Questions(source, 0, source.tokenizer.end_of_document).references(captions)
    assert [sorted(one) for one in references] == [sorted(captions[:3])] * 3 + [sorted(captions[3:])] * 2
    assert source.read(np.arange(5))["pixels"].any(axis=(1, 2, 3, 4)).all()


def test_what_is_not_there_is_refused_and_nothing_is_written(prepare, coco, tmp_path):
    with pytest.raises(ConfigError, match=r"has no split 'tset'; it has train, restval, test$"):
        prepare("--split", "tset")
    (tmp_path / "coco/val2014/COCO_val2014_000000000002.jpg").unlink()
    with pytest.raises(ConfigError, match=r"1 images are not in .*coco, of which the first is val2014/COCO_.*002.jpg$"):
        prepare()
    coco.write_text('{"images": [{"split": "test"}]}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"is no dataset_coco.json of Karpathy: 'filepath'"):
        prepare()
    coco.write_text("no JSON", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"cannot read .*dataset_coco.json"):
        prepare()

    assert not (tmp_path / "out").exists()
