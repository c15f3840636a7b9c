"""A keyed pseudo-random permutation of ``0 … n − 1`` in constant memory."""

from __future__ import annotations

import hashlib
import math

import numpy as np

_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)  # the finaliser of SplitMix64 (Steele, Lea & Flood, OOPSLA 2014)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_ONE, _SHIFT_1, _SHIFT_2 = np.uint64(1), np.uint64(30), np.uint64(27)


def permute(indices: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Where a pseudo-random permutation of ``range(n)`` sends ``indices``.

    An alternating Feistel network over the grid ``Z_a × Z_b`` with ``a·b ≥ n``, closed on ``range(n)`` by cycle walking
    (Black & Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002). Each element costs the same for any ``n``,
    and any subset can be asked for: there is no table and no order in which to ask.

    Args:
        indices: any shape, integers from 0 to ``n − 1``.
        n: size of the domain, 1 to ``2**62``.
        seed: with ``epoch`` (and ``n``) chooses the permutation; any integer.
        epoch: any integer.

    Returns:
        int64 of the shape of ``indices``; over all of ``range(n)`` each value occurs once. The result is the same
        on every platform and with every version of numpy.
    """
    if not 1 <= n <= 2**62:
        raise ValueError(f"n must be between 1 and 2**62, got {n}")
    if indices.size and not (indices.min() >= 0 and indices.max() < n):
        raise ValueError(f"indices must be between 0 and n - 1 = {n - 1}, got {indices.min()} to {indices.max()}")
    keys = _round_keys(n, seed, epoch)
    values = indices.astype(np.uint64).reshape(-1)
    outside = np.arange(values.size)
    while outside.size:  # a·b − n < a ≈ √n, so that a second lap is rare, and laps end because walks are cycles
        values[outside] = _encrypt(values[outside], n, keys)
        outside = outside[values[outside] >= n]
    return values.astype(np.int64).reshape(indices.shape)


def _round_keys(n: int, seed: int, epoch: int) -> np.ndarray:
    rounds = 16 if n < 256 else 8  # tiny grids have few round functions and mix slower; see the tests of uniformity
    digest = hashlib.shake_128(f"forge.permutation/{n}/{seed}/{epoch}".encode()).digest(8 * rounds)
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _encrypt(values: np.ndarray, n: int, keys: np.ndarray) -> np.ndarray:
    """One pass of the network over ``range(a·b)``; each round is inverted by subtracting what it has added."""
    a = math.isqrt(n - 1) + 1
    rows, columns = np.uint64(a), np.uint64(-(-n // a))
    left, right = values // columns, values % columns
    for i in range(0, keys.size, 2):
        left = (left + _hash(right, keys[i])) % rows
        right = (right + _hash(left, keys[i + 1])) % columns
    result: np.ndarray = left * columns + right
    return result


def _hash(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """63 well mixed bits: the sum with a coordinate below ``2**32`` must not overflow."""
    mixed = values ^ key
    mixed ^= mixed >> _SHIFT_1
    mixed *= _MULTIPLIER_1
    mixed ^= mixed >> _SHIFT_2
    mixed *= _MULTIPLIER_2
    mixed >>= _ONE
    return mixed
