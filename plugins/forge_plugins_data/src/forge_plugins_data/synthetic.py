"""The data source ``synthetic``: samples of a Markov chain, computed when they are read.

Shapes: B = samples, S = sequence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from forge_core.contracts.data_source import Split
from forge_core.errors import ConfigError
from forge_plugins_data.synthetic_config import SyntheticConfig


def open_synthetic(
    config: SyntheticConfig, /, *, seq_len: int, split: Split, seed: int, **_: object
) -> Synthetic | SyntheticSet:
    """The samples of a run, without end; or those to evaluate on.

    Raises:
        ConfigError: samples to evaluate on are asked for, and there are none.
    """
    chain = Chain(config)
    if split == "train":
        return Synthetic(chain, seq_len, seed)
    if config.validation == 0:
        raise ConfigError("validation = 0 holds nothing out; set it to a number of samples (validation = 256)")
    return SyntheticSet(chain, seq_len, seed, config.validation)


class Chain:
    """A Markov chain of order k: what follows a context of k tokens is looked up in a hash of them, so that no table is
    kept for any size."""

    def __init__(self, config: SyntheticConfig) -> None:
        self.config = config
        shares = 0.5 ** np.arange(config.branching)
        self._limits = np.cumsum(shares / shares.sum())[:-1]
        self.key = _key("chain", config.chain)

    def walk(self, key: np.uint64, numbers: np.ndarray, length: int) -> np.ndarray:
        """Walks by their ``numbers`` ``(B,)`` int64, of the walks that ``key`` chooses: ``(B, length)`` int64."""
        order, vocab_size = self.config.order, np.uint64(self.config.vocab_size)
        place: np.ndarray = numbers.astype(np.uint64)[:, None] * np.uint64(length) + np.arange(length, dtype=np.uint64)
        drawn = _mix(place ^ key)
        tokens = drawn % vocab_size
        branches = np.searchsorted(self._limits, (drawn >> np.uint64(11)) * 2.0**-53, side="right").astype(np.uint64)
        for s in range(order, length):
            context = np.full(len(numbers), self.key)
            for back in range(1, order + 1):
                context = _mix(context ^ tokens[:, s - back])
            tokens[:, s] = (context + branches[:, s]) % vocab_size
        return tokens.astype(np.int64)

    def following(self, context: np.ndarray) -> np.ndarray:
        """The tokens that may follow ``context`` ``(order,)``, the likeliest first: ``(branching,)`` int64."""
        mixed: np.ndarray | np.uint64 = self.key
        for token in context[::-1].astype(np.uint64):
            mixed = _mix(mixed ^ token)
        branches = np.arange(self.config.branching, dtype=np.uint64)
        following: np.ndarray = ((mixed + branches) % np.uint64(self.config.vocab_size)).astype(np.int64)
        return following


class Synthetic:
    """Position ``p`` is walk number ``p`` of the run's seed."""

    tokenizer = None

    def __init__(self, chain: Chain, seq_len: int, seed: int) -> None:
        self.vocab_size = chain.config.vocab_size
        self.fingerprint = _fingerprint(chain, seq_len, "train")
        self._chain, self._seq_len, self._key = chain, seq_len, _key("train", seed)

    def read_at(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """Same as ``PositionedSource.read_at``."""
        return _batch(self._chain.walk(self._key, positions, self._seq_len + 1))


class SyntheticSet:
    """A number of walks that are drawn apart from those of training."""

    tokenizer = None

    def __init__(self, chain: Chain, seq_len: int, seed: int, samples: int) -> None:
        self.vocab_size = chain.config.vocab_size
        self.fingerprint = _fingerprint(chain, seq_len, "validation")
        self._chain, self._seq_len, self._key, self._samples = chain, seq_len, _key("validation", seed), samples

    def __len__(self) -> int:
        return self._samples

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Same as ``DataSource.read``."""
        return _batch(self._chain.walk(self._key, indices, self._seq_len + 1))


def _batch(walks: np.ndarray) -> dict[str, np.ndarray]:
    return {"tokens": walks[:, :-1].copy(), "targets": walks[:, 1:].copy()}


def _fingerprint(chain: Chain, seq_len: int, split: str) -> str:
    config = chain.config
    facts: Mapping[str, object] = {"chain": config.chain, "order": config.order, "branching": config.branching}
    content = f"synthetic/{sorted(facts.items())}/{config.vocab_size}/{seq_len}/{split}"
    return hashlib.sha256(content.encode()).hexdigest()


def _key(purpose: str, number: int) -> np.uint64:
    digest = hashlib.sha256(f"forge.synthetic/{purpose}/{number}".encode()).digest()
    key: np.uint64 = np.frombuffer(digest[:8], dtype="<u8").astype(np.uint64)[0]
    return key


def _mix(values: np.ndarray | np.uint64) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea & Flood, OOPSLA 2014)."""
    mixed = np.atleast_1d(values) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
