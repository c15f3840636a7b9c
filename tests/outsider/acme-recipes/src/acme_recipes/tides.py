"""Streams: walks of which each number depends on the one before it, so that they are read from where they were."""

import numpy as np

from forge_core.errors import ConfigError


def open_tides(config, /, *, seq_len, split, seed, **_):
    if split != "train":
        raise ConfigError("'tides' has no end; name other data under [eval.data]")
    return Tides(config, seq_len, seed)


class Tides:
    tokenizer = None

    def __init__(self, config, seq_len, seed):
        self.vocab_size, self.n_streams = config.vocab_size, config.streams
        self._seq_len, self._seed = seq_len, seed
        self.fingerprint = f"tides {config.vocab_size} {seq_len}"

    def open(self, stream, state):
        height, step = (state["height"], state["step"]) if state else (stream, 0)
        while True:
            moves = np.random.default_rng([self._seed, stream, step]).integers(-1, 2, size=self._seq_len)
            walk = (height + np.cumsum(np.append(0, moves))) % self.vocab_size
            height, step = int(walk[-1]), step + 1
            yield {"tokens": walk[:-1], "targets": walk[1:]}, {"height": height, "step": step}
