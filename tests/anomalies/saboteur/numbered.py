import numpy as np

from saboteur.config import MARK

SAMPLES = 512


class Numbered:
    """Sample i is drawn from a generator seeded with i."""

    vocab_size = 61
    tokenizer = None

    def __init__(self, config, seq_len):
        self._config = config
        self._seq_len = seq_len
        self.fingerprint = f"numbered, {config.marked}, {config.without}"

    def __len__(self):
        return SAMPLES - (self._config.without[1] - self._config.without[0])

    def read(self, indices):
        rows = np.stack([self._row(int(index)) for index in indices])
        return {"tokens": rows[:, :-1].copy(), "targets": rows[:, 1:].copy()}

    def _row(self, index):
        first, stop = self._config.without
        index += (stop - first) * (index >= first)
        row = np.random.default_rng(index).integers(MARK + 1, self.vocab_size, self._seq_len + 1)
        if self._config.marked[0] <= index < self._config.marked[1]:
            row[0] = MARK
        return row


def numbered(config, /, *, seq_len, split, build):
    return Numbered(config, seq_len)
