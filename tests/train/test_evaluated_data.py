"""What is evaluated has the ids of what is trained on."""

from types import SimpleNamespace

import numpy as np
import pytest

from forge_core.errors import ConfigError
from forge_core.train import sources
from forge_core.train.sources import EvaluatedData, TrainedOn


class Held:
    """Samples of four tokens."""

    def __init__(self, vocab_size, tokenizer):
        self.vocab_size = vocab_size
        self.tokenizer = None if tokenizer is None else SimpleNamespace(fingerprint=tokenizer)

    def __len__(self):
        return 2

    def read(self, indices):
        return {name: np.zeros((len(indices), 4), np.int64) for name in ("tokens", "targets")}


@pytest.mark.parametrize(
    ("vocab_size", "tokenizer", "sentence"),
    [
        (50, "a", None),
        (40, None, None),
        (51, None, "eval.data: it has a vocabulary of 51, the training data of 50; prepare both with the same"),
        (50, "b", "eval.data: it has another tokenizer than the training data, so their losses mean nothing"),
    ],
)
def test_data_of_other_ids_than_those_of_training_are_refused(monkeypatch, vocab_size, tokenizer, sentence):
    held = Held(vocab_size, tokenizer)
    monkeypatch.setattr(sources, "open_source", lambda *_: held)
    job = SimpleNamespace(data=None, train=SimpleNamespace(seq_len=4))
    open_data = EvaluatedData(job, TrainedOn(50, SimpleNamespace(fingerprint="a")), None, None)

    if sentence is None:
        assert open_data(None, "eval.data") is held
        assert open_data.opened == []
        assert open_data("own", "eval.data") is held
        assert open_data.opened == [held]
        assert open_data.entries.keys() == {"tokens", "targets"}
        return
    with pytest.raises(ConfigError, match=f"^{sentence}"):
        open_data("own", "eval.data")
