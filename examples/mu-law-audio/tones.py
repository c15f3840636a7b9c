"""Chords to learn from, since no machine has sound by itself: python tones.py FOLDER."""

import sys
import wave
from pathlib import Path

import numpy as np

RATE, SECONDS = 16_000, 1.0


def main(folder: Path, files: int = 20) -> None:
    """Write files of a chord each, minor or major, which fades."""
    folder.mkdir(parents=True, exist_ok=True)
    moments = np.arange(int(RATE * SECONDS)) / RATE
    for number in range(files):
        rng = np.random.default_rng(number)
        root = 220 * 2 ** (rng.integers(12) / 12)
        pitches = root * 2 ** (np.array([0, rng.choice([3, 4]), 7]) / 12)  # minor or major
        sound = np.sin(2 * np.pi * pitches[:, None] * moments + rng.random((3, 1))).mean(axis=0) * np.exp(-2 * moments)
        with wave.open(str(folder / f"chord_{number:03}.wav"), "wb") as file:
            file.setparams((1, 2, RATE, len(moments), "NONE", ""))
            file.writeframes((sound * 30_000).astype("<i2").tobytes())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
