"""The mu-law: levels that lie closer to each other where sound is quiet."""

import numpy as np

LEVELS = 256
_MU = LEVELS - 1
_LOUDEST = 32_768  # of 16 bits


def encode(samples: np.ndarray) -> np.ndarray:
    """Levels, uint8, of samples in 16 bits, int16: 0 is the lowest value, 128 silence, 255 the highest.

    ``F(x) = sign(x) · ln(1 + µ|x|) / ln(1 + µ)`` with µ = 255 and x in [−1, 1), rounded to the nearest of 256 levels
    (van den Oord et al., "WaveNet", section 2.2, https://arxiv.org/abs/1609.03499; ITU-T G.711 has straight pieces).
    """
    x = samples.astype(np.float64) / _LOUDEST
    compressed = np.sign(x) * np.log1p(_MU * np.abs(x)) / np.log1p(_MU)
    return np.floor((compressed + 1) / 2 * _MU + 0.5).astype(np.uint8)


def decode(levels: np.ndarray) -> np.ndarray:
    """The samples in 16 bits, int16, of levels."""
    compressed = 2 * (levels.astype(np.float64) / _MU) - 1
    x = np.sign(compressed) * np.expm1(np.abs(compressed) * np.log1p(_MU)) / _MU
    return np.clip(np.round(x * _LOUDEST), -_LOUDEST, _LOUDEST - 1).astype(np.int16)
