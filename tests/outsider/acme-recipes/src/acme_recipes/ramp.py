"""A curriculum: what stands at a position depends on the step that reads it."""

import numpy as np

from forge_core.errors import ConfigError


def open_ramp(config, /, *, seq_len, split, seed, samples_per_step, **_):
    if split != "train":
        raise ConfigError("'ramp' holds nothing out; name other data under [eval.data]")
    return Ramp(config.vocab_size, seq_len, seed, samples_per_step)


class Ramp:
    tokenizer = None

    def __init__(self, vocab_size, seq_len, seed, samples_per_step):
        self.vocab_size, self._seq_len = vocab_size, seq_len
        self._seed, self._samples_per_step = seed, samples_per_step
        self.fingerprint = f"ramp {vocab_size} {seq_len}"

    def read_at(self, positions):
        stride = 1 + positions[:, None] // self._samples_per_step % (self.vocab_size - 1)
        numbers = (self._seed + positions[:, None] + stride * np.arange(self._seq_len + 1)) % self.vocab_size
        return {"tokens": numbers[:, :-1], "targets": numbers[:, 1:]}
