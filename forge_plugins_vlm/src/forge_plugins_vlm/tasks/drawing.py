"""Coloured shapes on noisy pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
from PIL import Image, ImageDraw

SIDE = 32
"""Pixels of a picture's height and width."""
COLOURS: Mapping[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "green": (40, 190, 60),
    "blue": (50, 80, 225),
    "yellow": (225, 210, 50),
    "purple": (165, 55, 205),
    "white": (235, 235, 235),
}
SHAPES = ("circle", "square", "triangle", "cross")
_FINE = 4
"""Drawn so many times as large, so that edges are smooth."""
_GROUND = 45.0
"""The mean of the background."""


@attrs.frozen
class Thing:
    """A shape in a picture."""

    colour: str
    shape: str
    x: float
    """Of its middle, in pixels."""
    y: float
    radius: float


def draw(things: Sequence[Thing], rng: np.random.Generator) -> Image.Image:
    """A picture of things, with brightness and noise of its own."""
    background = Image.new("RGB", (SIDE * _FINE, SIDE * _FINE), (0, 0, 0))
    mask = Image.new("L", background.size, 0)
    for thing in things:
        _draw(ImageDraw.Draw(background), thing, COLOURS[thing.colour])
        _draw(ImageDraw.Draw(mask), thing, 255)
    small, inside = (one.resize((SIDE, SIDE), Image.Resampling.BOX) for one in (background, mask))
    share = np.asarray(inside, dtype=np.float64)[..., None] / 255
    pixels = np.asarray(small, dtype=np.float64) * rng.uniform(0.8, 1.1)
    pixels = pixels + (1 - share) * (_GROUND + rng.uniform(-15, 15)) + rng.normal(0, 8, pixels.shape)
    return Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8))


def _draw(on: ImageDraw.ImageDraw, thing: Thing, fill: int | tuple[int, int, int]) -> None:
    x, y, r = thing.x * _FINE, thing.y * _FINE, thing.radius * _FINE
    if thing.shape == "circle":
        on.ellipse((x - r, y - r, x + r, y + r), fill=fill)
    elif thing.shape == "square":
        r *= 0.9
        on.rectangle((x - r, y - r, x + r, y + r), fill=fill)
    elif thing.shape == "triangle":
        on.polygon([(x, y - r), (x - r, y + r * 0.8), (x + r, y + r * 0.8)], fill=fill)
    else:
        arm = r * 0.32
        on.rectangle((x - arm, y - r, x + arm, y + r), fill=fill)
        on.rectangle((x - r, y - arm, x + r, y + arm), fill=fill)
