"""Vision-language models: how fast images become tiles.

    python benchmarks/vlm.py preprocessing

``preprocessing``: images a second of one core, from the bytes of a JPEG to tiles of 224 pixels. Wanted: at least 400 of
640 × 480.
"""

from __future__ import annotations

import argparse
import io
import statistics
import time

import numpy as np
from PIL import Image

from forge_plugins_vlm.contracts.image_processor import ImageProcessor, ImageProcessorConfig
from forge_plugins_vlm.images.anyres import Anyres
from forge_plugins_vlm.images.config import AnyresConfig, NaflexConfig, SquareConfig, TilesConfig
from forge_plugins_vlm.images.naflex import Naflex
from forge_plugins_vlm.images.picture import at_least_for, open_picture
from forge_plugins_vlm.images.square import Square
from forge_plugins_vlm.images.tiles import Tiles

SIZES = ((640, 480), (1024, 768), (320, 240))
RUNS, IMAGES_A_RUN = 9, 32


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("section", choices=["preprocessing"])
    parser.parse_args()
    preprocessing()


def preprocessing() -> None:
    processors = {
        "square, stretch": (square := SquareConfig(size=224), Square(square)),
        "square, crop": (crop := SquareConfig(size=224, fit="crop"), Square(crop)),
        "anyres": (anyres := AnyresConfig(size=224), Anyres(anyres)),
        "tiles": (tiles := TilesConfig(size=224, longest=3), Tiles(tiles)),
        "naflex, 256 patches": (naflex := NaflexConfig(), Naflex(naflex)),
    }
    print(f"images a second of one core, median of {RUNS} runs of {IMAGES_A_RUN} JPEGs\n")
    print(f"{'':24}" + "".join(f"{f'{width} × {height}':>14}" for width, height in SIZES))
    for name, (config, processor) in processors.items():
        rates = [images_a_second(config, processor, jpeg(*size)) for size in SIZES]
        print(f"{name:24}" + "".join(f"{rate:14,.0f}" for rate in rates))


def jpeg(width: int, height: int) -> bytes:
    """Of smooth noise with edges, which compresses about as photographs do."""
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (height // 16, width // 16, 3), dtype=np.uint8))
    pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
    pixels = pixels + rng.normal(0, 6, pixels.shape)
    pixels[:, width // 3 : width // 2] //= 2
    stream = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(stream, "JPEG", quality=85)
    return stream.getvalue()


def images_a_second(config: ImageProcessorConfig, processor: ImageProcessor, content: bytes) -> float:
    at_least = at_least_for(config)
    rates = []
    for _ in range(RUNS):
        start = time.perf_counter()
        for _ in range(IMAGES_A_RUN):
            processor(open_picture(content, at_least), (14, 14))
        rates.append(IMAGES_A_RUN / (time.perf_counter() - start))
    return statistics.median(rates)


if __name__ == "__main__":
    main()
