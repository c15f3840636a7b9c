"""How data are opened, and that what is evaluated has the ids of what is trained on."""

from types import SimpleNamespace

import numpy as np
import pytest

from forge_core.errors import ConfigError
from forge_core.train import sources
from forge_core.train.sources import EvaluatedData, TrainedOn, open_source


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


class Watched(Held):
    checked = 0

    def refuse_damaged(self):
        self.checked += 1

    def watch(self, report):
        """Nothing turns out to be damaged."""


@pytest.mark.parametrize("data_seed", [None, 7])
def test_each_part_of_the_data_is_asked_for_by_its_name(monkeypatch, data_seed):
    """Files that are held out are those of training, and are verified with them; phases are of training alone."""
    for name in ("run_slowly_on_all_ranks", "run_slowly_on_rank0"):
        monkeypatch.setattr(sources, name, lambda work, beat: work())
    monkeypatch.setattr(sources, "data_phase", lambda use, phase: phase.data)
    phases = [SimpleNamespace(data="more", first_step=lambda train: 11), SimpleNamespace(data=None)]
    train = SimpleNamespace(seed=3, data_seed=data_seed, seq_len=4, global_batch_size=8)
    job = SimpleNamespace(data=SimpleNamespace(config=None), train=train, phases=phases)
    opened = []

    def build(use, **given):
        opened.append((Watched(50, "a"), given))
        return opened[-1][0]

    open_source(job, job.data, "data", "train", build, None)
    evaluated = EvaluatedData(job, TrainedOn(50, None), build, None)
    evaluated(None, "eval.data")
    evaluated(SimpleNamespace(config=None), "eval.data")

    given = [given for _, given in opened]
    assert [one["split"] for one in given] == ["train", "validation", "all"]
    assert [one["phases"] for one in given] == [[(80, "more")], (), ()]
    assert [one.checked for one, _ in opened] == [1, 0, 1]
    assert {(one["seed"], one["seq_len"], one["samples_per_step"]) for one in given} == {(data_seed or 3, 4, 8)}
