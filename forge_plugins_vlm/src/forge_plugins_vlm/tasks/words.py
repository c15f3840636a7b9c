"""The words task: words drawn with Pillow's own font, to be transcribed."""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from forge_core.errors import ConfigError
from forge_plugins_vlm.tasks.task_folder import TaskFolder

WIDTH, HEIGHT = 64, 32
_WORD = re.compile(r"(?<![A-Za-z0-9_])[a-z]{3,5}(?![A-Za-z0-9_])")
_TIMES = 2
"""A word is taken if it occurs so often."""


def write_words(out: Path, *, train: int, held_out: int, seed: int) -> None:
    """Write pictures of words of three to five letters that stand in the source of the standard library:
    ``train.json``, ``held_out.json``, whose words are no others', ``captions.txt`` of the training part, and a
    ``tokenizer.json`` of letters.

    Raises:
        ConfigError: the folder has something in it; there are too few words to hold some out.
    """
    words = words_of_the_library()
    apart = max(1, len(words) // 8)
    if len(words) < 2 * apart or len(words) < 16:
        raise ConfigError(f"the standard library has {len(words)} words, which are too few to hold some out")
    shuffled = [words[index] for index in np.random.default_rng([seed, 2]).permutation(len(words))]
    folder = TaskFolder(out)
    said: dict[str, list[str]] = {}
    parts = (("train", train, shuffled[apart:]), ("held_out", held_out, shuffled[:apart]))
    for part, (name, number, own) in enumerate(parts):
        records = []
        for index in range(number):
            rng = np.random.default_rng([seed, part, index])
            word = own[index % len(own)]
            picture = folder.picture(f"{name}/{index:05d}", draw_word(word, rng))
            records.append((f"{name}-{index:05d}", [picture], "", word))
        folder.llava(name, records)
        said[name] = [word for *_, word in records]
    folder.texts("captions", said["train"])
    folder.letters(words)


def words_of_the_library() -> list[str]:
    """Words of lower-case letters in the source of the standard library, sorted."""
    counts: Counter[str] = Counter()
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        counts.update(_WORD.findall(file.read_text(encoding="utf-8", errors="replace")))
    return sorted(word for word, count in counts.items() if count >= _TIMES)


def draw_word(word: str, rng: np.random.Generator) -> Image.Image:
    """A picture of a word, with a place, a size, a brightness and noise of its own."""
    font = ImageFont.load_default(size=int(rng.integers(17, 21)))
    ground, ink = int(rng.integers(180, 256)), int(rng.integers(0, 70))
    image = Image.new("L", (WIDTH, HEIGHT), ground)
    on = ImageDraw.Draw(image)
    left, top, right, bottom = on.textbbox((0, 0), word, font=font)
    x = rng.uniform(0, max(1.0, WIDTH - (right - left) - 2)) - left + 1
    y = rng.uniform(0, max(1.0, HEIGHT - (bottom - top) - 2)) - top + 1
    on.text((x, y), word, fill=ink, font=font)
    pixels = np.asarray(image, dtype=np.float64) + rng.normal(0, 6, (HEIGHT, WIDTH))
    return Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8)).convert("RGB")
