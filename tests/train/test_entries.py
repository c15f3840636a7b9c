"""Entries of batches against the model's forward, before anything is built, and the loss of each source."""

import pytest
import torch
from torch import nn

from forge_core.contracts.batch import KNOWN, Entry, bind
from forge_core.contracts.loss import LossSum
from forge_core.errors import ConfigError, PluginError
from forge_core.train.build import _refuse_entries
from forge_core.train.component_checks import CheckedLoss
from forge_core.train.metrics import ABSENT, losses_of_sources

TEXT = {name: KNOWN[name] for name in ("tokens", "targets")}

HIDDEN = torch.zeros(())  # these losses look at targets alone


class Reader(nn.Module):
    def forward(self, tokens, targets=None, loss=None, *, positions=None):
        """Text only."""


class Viewer(nn.Module):
    def forward(self, tokens, image, targets=None, loss=None):
        """Images are needed."""


class Mute(nn.Module):
    def forward(self, tokens):
        """Forgets what it is to be trained for."""


class Taker(nn.Module):
    def forward(self, tokens, targets=None, loss=None, **inputs):
        """Anything goes."""


def test_an_entry_that_forward_does_not_take_is_refused_with_what_it_takes():
    for described in (None, Entry(dims=("sample", "channel", "height", "width"), dtype="float32")):
        with pytest.raises(ConfigError, match=r"have the entry 'image', which the model reader does not take; be"):
            _refuse_entries(Reader(), {**TEXT, "image": described}, "reader")
        _refuse_entries(Taker(), {**TEXT, "image": described}, "taker")


def test_a_model_that_takes_no_targets_is_not_told_to_choose_other_data():
    with pytest.raises(
        PluginError, match="the model mute has a forward without 'targets', which each model's must take"
    ):
        _refuse_entries(Mute(), TEXT, "mute")


def test_an_entry_that_forward_needs_is_missed():
    with pytest.raises(ConfigError, match="the model viewer needs the entry 'image' in batches, which have tokens"):
        _refuse_entries(Viewer(), TEXT, "viewer")


def test_what_is_the_engine_s_and_what_forward_takes_are_no_problem():
    entries = {**TEXT, "positions": KNOWN["positions"], "source": Entry(dims=("sample",), wanted_by="engine")}

    _refuse_entries(Reader(), entries, "reader")
    _refuse_entries(Reader(), {}, "reader")  # a model that is built without data


def test_forward_is_not_given_what_is_the_engine_s_and_the_first_loss_is_added_up_by_source():
    each = torch.tensor([[1.0, 2.0], [3.0, 0.0], [5.0, 6.0]])
    targets = torch.tensor([[1, 1], [1, -100], [1, 1]])
    loss = CheckedLoss(
        lambda hidden, head, targets: LossSum(each.sum(), (targets != -100).sum(), each),
        "the loss",
        {**TEXT, "source": Entry(dims=("sample",), wanted_by="engine")},
    )
    batch = {"tokens": targets, "targets": targets, "source": torch.tensor([2, 0, 2])}

    inputs, unlogged = bind(loss, batch)
    unlogged(HIDDEN, None, targets)
    loss.sums_of_sources = torch.zeros(3, 2, dtype=torch.float64)
    _, bound = bind(loss, batch)
    for _ in range(2):  # a model that looks ahead calls it once more
        assert float(bound(HIDDEN, None, targets).total) == 17

    assert inputs.keys() == {"tokens", "targets"}
    assert loss.sums_of_sources.tolist() == [[3, 1], [0, 0], [14, 4]]
    means = losses_of_sources(["a", "b", "c"], [*loss.sums_of_sources.flatten().unbind()])
    assert {name: float(value) for name, value in means.items()} == {"loss/a": 3, "loss/b": ABSENT, "loss/c": 3.5}


def weighing(hidden, head, targets, weights=None):
    each = torch.ones(targets.shape) if weights is None else weights
    return LossSum(each.sum(), torch.tensor(targets.numel()), torch.ones(targets.shape))


weighing.takes_weights = True


def test_weights_of_targets_reach_the_loss_in_training_and_not_in_evaluations():
    loss = CheckedLoss(weighing, "the loss", {**TEXT, "weights": KNOWN["weights"]})
    targets = torch.ones(2, 4, dtype=torch.int64)
    inputs, bound = bind(loss, {"tokens": targets, "targets": targets, "weights": torch.arange(8.0).view(2, 4)})

    assert inputs.keys() == {"tokens", "targets"}
    assert float(bound(HIDDEN, None, targets).total) == 28
    assert float(bound.of_part(lambda entry: entry[:, :1])(HIDDEN, None, targets[:, :1]).total) == 4
    with torch.no_grad():
        assert float(bound(HIDDEN, None, targets).total) == 8


def test_a_pass_that_cuts_targets_and_not_their_weights_is_named():
    loss = CheckedLoss(weighing, "the loss", {**TEXT, "weights": KNOWN["weights"]})
    targets = torch.ones(2, 4, dtype=torch.int64)
    _, bound = bind(loss, {"tokens": targets, "targets": targets, "weights": torch.ones(2, 4)})

    with pytest.raises(PluginError, match=r"cut targets to \(2, 2\) and not the weights of the loss, \(2, 4\)"):
        bound(HIDDEN, None, targets[:, :2])


def test_a_loss_without_weights_is_refused_where_data_have_them():
    with pytest.raises(ConfigError, match="weights of targets, which the loss 'x' does not take"):
        CheckedLoss(lambda hidden, head, targets: None, "the loss 'x'").refuse_model(nn.Identity(), "m", ["weights"])
    CheckedLoss(weighing, "the loss").refuse_model(nn.Identity(), "m", ["weights"])


def comparing(hidden, head, targets, *, hints=None, labels=None):
    each = torch.zeros(targets.shape) if hints is None else hints.float()
    scale = 1 if labels is None else labels.sum()
    return LossSum(each.sum() * scale, torch.tensor(targets.numel()))


comparing.takes_entries = ("hints", "labels")
PAIRED = {
    **TEXT,
    "hints": Entry(dims=("sample", "position"), wanted_by="loss"),
    "labels": Entry(dims=("sample", "label"), wanted_by="loss"),
}


def test_a_loss_is_given_the_entries_that_it_takes_and_the_model_is_not():
    loss = CheckedLoss(comparing, "the loss", PAIRED)
    targets = torch.ones(2, 4, dtype=torch.int64)
    batch = {"tokens": targets, "targets": targets}

    inputs, bound = bind(loss, {**batch, "hints": torch.arange(8).view(2, 4), "labels": torch.ones(2, 3)})
    _, plain = bind(loss, batch)  # a text that is evaluated

    assert inputs.keys() == {"tokens", "targets"}
    assert float(bound(HIDDEN, None, targets).total) == 28 * 6
    assert float(bound.of_part(lambda entry: entry[:, :1])(HIDDEN, None, targets[:, :1]).total) == 4 * 6
    assert float(plain(HIDDEN, None, targets).total) == 0


def test_training_data_without_the_entries_of_the_loss_are_refused_and_so_is_a_loss_without_those_of_the_data():
    with pytest.raises(ConfigError, match="data: the loss 'x' takes 'hints' of batches, which have tokens"):
        CheckedLoss(comparing, "the loss 'x'").refuse_entries(TEXT)
    with pytest.raises(ConfigError, match="data: batches have 'hints' for the loss, and the loss 'y' takes no such"):
        CheckedLoss(weighing, "the loss 'y'").refuse_entries(PAIRED)
    CheckedLoss(comparing, "the loss").refuse_entries(PAIRED)


def test_a_loss_says_whether_it_has_a_perplexity_of_batches_with_its_entries():
    def error(hidden, head, targets):
        """The model's own."""

    def of_pairs(hidden, head, targets):
        """Of a batch with hints alone it is the likelihood."""

    error.has_perplexity = of_pairs.has_perplexity = False
    of_pairs.takes_entries = comparing.takes_entries

    assert CheckedLoss(comparing, "the loss").has_perplexity(PAIRED)
    assert not CheckedLoss(error, "the loss").has_perplexity(TEXT)
    assert not CheckedLoss(of_pairs, "the loss").has_perplexity(PAIRED)
    assert CheckedLoss(of_pairs, "the loss").has_perplexity([*TEXT, "hints"])


def test_the_shape_of_an_entry_is_that_of_a_batch_as_far_as_it_is_known():
    image = Entry(dims=("sample", "image", "height"), sizes=(None, None, 8), dtype="float32")

    assert image.shape(2, 32) == (2, None, 8)
    assert KNOWN["tokens"].shape(2, 32) == (2, 32)
    assert Entry(dims=("sample", "label")).shape(2, 32) == (2, None)


def test_a_loss_that_is_compiled_with_its_model_is_not_looked_into_for_which_the_host_would_read_values():
    def added_up(hidden, head, targets):
        return LossSum(hidden.sum(), (targets != -100).sum())

    loss = CheckedLoss(added_up, "the loss")
    loss.is_watched = True
    compiled = torch.compile(lambda hidden, targets: loss(hidden, None, targets).total, backend="eager", fullgraph=True)

    assert compiled(torch.ones(2, 3), torch.ones(2, 3, dtype=torch.int64)) == 6
    assert not loss.problem
