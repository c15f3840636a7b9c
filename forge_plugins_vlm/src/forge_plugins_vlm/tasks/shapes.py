"""The shapes task: a coloured shape in a quadrant, and a caption that says so."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from forge_plugins_vlm.tasks.drawing import COLOURS, SHAPES, SIDE, Thing, draw
from forge_plugins_vlm.tasks.task_folder import TaskFolder

ROWS, COLUMNS = ("top", "bottom"), ("left", "right")
CLASSES = [(colour, shape, row, column) for colour in COLOURS for shape in SHAPES for row in ROWS for column in COLUMNS]
"""Of which captions are made; chance is one in 96."""


def write_shapes(out: Path, *, train: int, held_out: int, seed: int) -> None:
    """Write pictures with captions ``a {colour} {shape} {row} {column}``: ``train.json``, ``held_out.json``,
    ``captions.txt`` of the training part alone, and ``tokenizer.json``.

    Raises:
        ConfigError: the folder has something in it.
    """
    folder = TaskFolder(out)
    captions: dict[str, list[str]] = {}
    for part, (name, number) in enumerate((("train", train), ("held_out", held_out))):
        classes = np.random.default_rng([seed, part]).permutation(np.arange(number) % len(CLASSES))
        records = []
        for index, which in enumerate(classes.tolist()):
            rng = np.random.default_rng([seed, part, index])
            picture = folder.picture(f"{name}/{index:05d}", draw([thing_of(which, rng)], rng))
            records.append((f"{name}-{index:05d}", [picture], "", caption_of(which)))
        folder.llava(name, records)
        captions[name] = [caption for *_, caption in records]
    folder.texts("captions", captions["train"])
    folder.words(map(caption_of, range(len(CLASSES))))


def caption_of(which: int) -> str:
    """The caption of a class."""
    return "a " + " ".join(CLASSES[which])


def thing_of(which: int, rng: np.random.Generator) -> Thing:
    """A thing of a class, somewhere in its quadrant, of a size of its own."""
    colour, shape, row, column = CLASSES[which]
    radius = rng.uniform(4.0, 6.5)
    x, y = rng.uniform(-1.2, 1.2, 2) + SIDE / 4
    return Thing(colour, shape, x + SIDE / 2 * (column == "right"), y + SIDE / 2 * (row == "bottom"), radius)
