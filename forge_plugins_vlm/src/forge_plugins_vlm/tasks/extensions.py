"""Tasks of several images, of motion and of binding, each with a control whose answers are others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from forge_plugins_vlm.tasks.drawing import COLOURS, SHAPES, SIDE, Thing, draw
from forge_plugins_vlm.tasks.shapes import CLASSES, thing_of
from forge_plugins_vlm.tasks.task_folder import TaskFolder

N_FRAMES = 4
"""Of a video of the task motion."""
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
OPPOSITE = {"left": "right", "right": "left", "up": "down", "down": "up"}
MOTION_QUESTION = "which way does it move ?"
_PARTS = ("train", "held_out")


def write_two_images(out: Path, *, train: int, held_out: int, seed: int) -> None:
    """Write pairs of pictures and the question which of them has a thing. ``control.json`` is the held-out part with
    the pictures of each pair swapped, which turns the answer round.

    Raises:
        ConfigError: the folder has something in it.
    """
    folder = TaskFolder(out)
    control = []
    texts = []
    for part, (name, number) in enumerate(zip(_PARTS, (train, held_out), strict=True)):
        records = []
        for index in range(number):
            rng = np.random.default_rng([seed, part, index])
            first, second = _two_kinds(rng)
            pictures = [
                folder.picture(f"{name}/{index:05d}_{place}", draw([thing_of(which, rng)], rng))
                for place, which in enumerate((first, second))
            ]
            is_first = index % 2 == 0
            colour, shape, *_ = CLASSES[first if is_first else second]
            question = f"which image has the {colour} {shape} ?"
            answer, other = ("first", "second") if is_first else ("second", "first")
            records.append((f"{name}-{index:05d}", pictures, question, answer))
            if name == "held_out":
                control.append((f"control-{index:05d}", pictures[::-1], question, other))
        folder.llava(name, records)
        texts += [f"{question} {answer}" for _, _, question, answer in records]
    folder.llava("control", control)
    folder.words([*texts, *COLOURS, *SHAPES, "first second"])


def write_binding(out: Path, *, train: int, held_out: int, seed: int) -> None:
    """Write pictures of two things and the question for the colour of one. ``control.json`` is the held-out part with
    the colours of each pair exchanged, and so the answer.

    Raises:
        ConfigError: the folder has something in it.
    """
    folder = TaskFolder(out)
    control = []
    texts = []
    for part, (name, number) in enumerate(zip(_PARTS, (train, held_out), strict=True)):
        records = []
        for index in range(number):
            rng = np.random.default_rng([seed, part, index])
            colours = [str(one) for one in rng.choice([*COLOURS], 2, replace=False)]
            shapes = [str(one) for one in rng.choice(SHAPES, 2, replace=False)]
            places = rng.choice(4, 2, replace=False).tolist()
            asked = int(rng.integers(2))
            question = f"what colour is the {shapes[asked]} ?"
            things = [
                attributes(colour, shape, place, rng)
                for colour, shape, place in zip(colours, shapes, places, strict=True)
            ]
            state = rng.bit_generator.state
            picture = folder.picture(f"{name}/{index:05d}", draw(things, rng))
            records.append((f"{name}-{index:05d}", [picture], question, colours[asked]))
            if name == "held_out":
                rng.bit_generator.state = state  # the same noise
                exchanged = [
                    Thing(colour, one.shape, one.x, one.y, one.radius)
                    for colour, one in zip(colours[::-1], things, strict=True)
                ]
                picture = folder.picture(f"control/{index:05d}", draw(exchanged, rng))
                control.append((f"control-{index:05d}", [picture], question, colours[1 - asked]))
        folder.llava(name, records)
        texts += [f"{question} {answer}" for _, _, question, answer in records]
    folder.llava("control", control)
    folder.words([*texts, *COLOURS, *SHAPES])


def write_motion(out: Path, *, train: int, held_out: int, seed: int) -> None:
    """Write videos of four frames, as folders, in which a thing moves, and the question where to. ``control.jsonl`` is
    the held-out part with the frames in reverse, which turns the answer round; ``single_frame.jsonl`` has one frame of
    each video alone, from which nothing better than chance, a quarter, can be told.

    Raises:
        ConfigError: the folder has something in it.
    """
    folder = TaskFolder(out)
    for part, (name, number) in enumerate(zip(_PARTS, (train, held_out), strict=True)):
        records, reversed_records, single = [], [], []
        for index in range(number):
            rng = np.random.default_rng([seed, part, index])
            direction = [*DIRECTIONS][index % 4]
            frames = [draw([thing], rng) for thing in moving(direction, rng)]
            for place, frame in enumerate(frames):
                folder.picture(f"{name}/{index:05d}/{place}", frame)
            records.append(_video(f"{name}-{index:05d}", f"images/{name}/{index:05d}", direction))
            if name == "held_out":
                for place, frame in enumerate(frames[::-1]):
                    folder.picture(f"control/{index:05d}/{place}", frame)
                video = f"images/control/{index:05d}"
                reversed_records.append(_video(f"control-{index:05d}", video, OPPOSITE[direction]))
                frame_name = f"images/{name}/{index:05d}/{int(rng.integers(N_FRAMES))}.png"
                single.append(_asked(f"single-{index:05d}", {"type": "image", "image": frame_name}, direction))
        folder.messages(name, records)
        if name == "held_out":
            folder.messages("control", reversed_records)
            folder.messages("single_frame", single)
    folder.words([MOTION_QUESTION, *DIRECTIONS])


EXTENSIONS: Mapping[str, Callable[..., None]] = {
    "two_images": write_two_images,
    "motion": write_motion,
    "binding": write_binding,
}


def attributes(colour: str, shape: str, quadrant: int, rng: np.random.Generator) -> Thing:
    """A thing in a quadrant, 0 to 3 row by row."""
    x, y = rng.uniform(-1.0, 1.0, 2) + SIDE / 4
    return Thing(
        colour, shape, x + SIDE / 2 * (quadrant % 2), y + SIDE / 2 * (quadrant // 2), float(rng.uniform(4.0, 6.5))
    )


def _two_kinds(rng: np.random.Generator) -> tuple[int, int]:
    """Classes that differ in colour or shape, so that a question tells them apart."""
    first = int(rng.integers(len(CLASSES)))
    others = [number for number, one in enumerate(CLASSES) if one[:2] != CLASSES[first][:2]]
    return first, int(rng.choice(others))


def moving(direction: str, rng: np.random.Generator) -> list[Thing]:
    """A thing at each frame. Across its way, it is as far from the middle as it is along it at some frame, so that no
    frame alone, taken at random, says anything about the direction."""
    colour, shape = str(rng.choice([*COLOURS])), str(rng.choice(SHAPES))
    radius = float(rng.uniform(3.5, 5.0))
    step = np.array(DIRECTIONS[direction]) * 3.0
    across = np.abs(step[::-1]) * (rng.integers(N_FRAMES) - (N_FRAMES - 1) / 2)
    middle = rng.uniform(11.0, SIDE - 11.0, 2) + across
    places = [middle + step * (place - (N_FRAMES - 1) / 2) for place in range(N_FRAMES)]
    return [Thing(colour, shape, float(x), float(y), radius) for x, y in places]


def _video(key: str, video: str, answer: str) -> dict[str, Any]:
    return _asked(key, {"type": "video", "video": video}, answer)


def _asked(key: str, seen: dict[str, Any], answer: str) -> dict[str, Any]:
    question = {"type": "text", "text": f" {MOTION_QUESTION}"}
    return {
        "id": key,
        "messages": [{"role": "user", "content": [seen, question]}, {"role": "assistant", "content": answer}],
    }
