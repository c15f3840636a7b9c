"""Probes: a small classifier of rows, and what it is worth (Alain and Bengio 2016; Hewitt and Liang 2019).

Shapes: n = rows, p = features, c = classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import attrs
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from forge_core.errors import ConfigError
from forge_plugins_interp.neuro.regression import Ridge

Kind = Literal["logistic", "ridge", "mlp"]
PENALTIES = (1e-4, 1e-2, 1.0, 100.0)
"""Of squared weights; the one with the best accuracy on validation rows is taken."""
_RESAMPLES = 1000
_HIDDEN = 64
_FIRST = 8
"""Rows, at least, of the first part of a code."""
_PENALTY_OF_CODE = 1.0


@attrs.frozen
class ProbeScore:
    """Accuracies on test rows, which are of documents that the probe has not seen."""

    accuracy: float
    low: float
    high: float
    """The 95 % interval of a bootstrap over test documents."""
    majority: float
    """Of always saying the commonest class of the training rows."""
    chance: float
    """``Σ share²``, of drawing classes by their shares."""
    control: float | None
    """Of a probe for a control task: every word has a random class."""
    balanced: float
    """The mean over classes of the share of its test rows that is right: a rare class counts as much as others."""
    bits: float
    """Of a label of the training rows by online coding (``code_length``); a uniform code has log₂ of the classes."""
    shares: tuple[float, ...]
    """Of the classes among the test rows."""
    penalty: float

    @property
    def selectivity(self) -> float | None:
        """``accuracy − control``: high if the site has the classes, and not only the words."""
        return None if self.control is None else self.accuracy - self.control


@attrs.frozen(kw_only=True)
class Labelled:
    """Rows and their labels."""

    values: torch.Tensor
    """``(n, p)``."""
    labels: torch.Tensor
    """``(n,)`` int64, from 0."""
    documents: np.ndarray
    """``(n,)``: the sample that a row is of."""
    words: np.ndarray | None = None
    """``(n,)`` int64: the token of a row, for the control task."""


def probe(data: Labelled, *, kind: Kind = "logistic", seed: int = 0) -> ProbeScore:
    """Train on 60 % of the documents, choose the penalty by 20 %, and measure on the rest.

    Raises:
        ConfigError: fewer than 5 documents, a single class, or a value that is not finite.
    """
    if not bool(data.values.isfinite().all()):
        raise ConfigError("a probe cannot read values that are not finite")
    train, chosen_by, test = _split(data, seed)
    if len(np.unique(data.labels[train].numpy())) < 2:
        raise ConfigError("the training documents have a single class, so that there is nothing to tell")
    values = _standardised(data.values, train)
    predicted, penalty = _best(values, data.labels, train, chosen_by, test, kind, seed)
    right = (predicted == data.labels[test]).double()
    low, high = _interval(right, data.documents[test.numpy()], seed)
    counts = torch.bincount(data.labels[train])
    shares = torch.bincount(data.labels[test], minlength=len(counts)).double() / len(test)
    return ProbeScore(
        accuracy=float(right.mean()),
        low=low,
        high=high,
        majority=float((data.labels[test] == counts.argmax()).double().mean()),
        chance=float(shares.square().sum()),
        balanced=float(right_by_class(right, data.labels[test]).mean()),
        bits=code_length(values[train], data.labels[train], int(data.labels.max()) + 1, seed) / len(train),
        control=_control(values, data, train, chosen_by, test, kind, seed),
        shares=tuple(shares.tolist()),
        penalty=penalty,
    )


def right_by_class(right: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The share that is right of each class that is there, float64."""
    counts = labels.bincount()
    sums = torch.zeros(len(counts), dtype=torch.float64).index_add(0, labels, right)
    return (sums / counts)[counts > 0]


def code_length(values: torch.Tensor, labels: torch.Tensor, classes: int, seed: int) -> float:
    """Bits that send the labels to one who has the values: minimum description length by online coding (Voita and
    Titov 2020, arXiv 2003.12298). Rows are sent in parts that double; the first has a uniform code, and each other
    that of a logistic probe of the parts before it."""
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(values)))
    values, labels = values[order], labels[order]
    end = min(len(values), max(_FIRST, len(values) // 1024))
    bits = end * math.log2(classes)
    while end < len(values):
        start, end = end, min(2 * end, len(values))
        model = _model(values[:start], labels[:start], classes, _PENALTY_OF_CODE, "logistic", seed)
        nats = F.cross_entropy(model(values[start:end]), labels[start:end], reduction="sum")
        bits += float(nats.detach()) / math.log(2)
    return bits


def _split(data: Labelled, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    documents = np.unique(data.documents)
    if len(documents) < 5:
        raise ConfigError(f"a probe needs at least 5 documents to hold some out, and there are {len(documents)}")
    order = np.random.default_rng(seed).permutation(documents)
    first, second = int(0.6 * len(order)), int(0.8 * len(order))
    parts = (order[:first], order[first:second], order[second:])
    train, chosen_by, test = (torch.from_numpy(np.flatnonzero(np.isin(data.documents, part))) for part in parts)
    return train, chosen_by, test


def _standardised(values: torch.Tensor, train: torch.Tensor) -> torch.Tensor:
    values = values.float()
    mean, deviation = values[train].mean(0), values[train].std(0)
    return (values - mean) / deviation.clamp(min=1e-6)


def _best(
    values: torch.Tensor,
    labels: torch.Tensor,
    train: torch.Tensor,
    chosen_by: torch.Tensor,
    test: torch.Tensor,
    kind: Kind,
    seed: int,
) -> tuple[torch.Tensor, float]:
    """The predictions for test rows, and the penalty."""
    best: tuple[float, float, Callable[[torch.Tensor], torch.Tensor]] | None = None
    for penalty in PENALTIES:
        model = _fit(values[train], labels[train], int(labels.max()) + 1, penalty, kind, seed)
        accuracy = float((model(values[chosen_by]) == labels[chosen_by]).double().mean())
        if best is None or accuracy > best[0]:
            best = accuracy, penalty, model
    assert best is not None, "there are penalties"
    return best[2](values[test]), best[1]


def _fit(
    x: torch.Tensor, y: torch.Tensor, classes: int, penalty: float, kind: Kind, seed: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    """From rows to classes."""
    if kind == "ridge":
        alphas = (2 * penalty,)  # of ‖w‖² beside the sum of squared errors, halved as cross-entropy's is
        linear = Ridge(alphas=alphas).of(x.double())(F.one_hot(y, classes).double())
        return lambda rows: linear(rows.double()).argmax(1)
    model = _model(x, y, classes, penalty, kind, seed)

    @torch.no_grad()
    def predict(rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(rows).argmax(1)
        return found

    return predict


def _model(x: torch.Tensor, y: torch.Tensor, classes: int, penalty: float, kind: Kind, seed: int) -> nn.Module:
    """By L-BFGS on all rows: cross-entropy, and the penalty on squared weights over n."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        layers = [nn.Linear(x.shape[1], classes)]
        if kind == "mlp":
            layers = [nn.Linear(x.shape[1], _HIDDEN), nn.GELU(), nn.Linear(_HIDDEN, classes)]  # type: ignore[list-item]
        model = nn.Sequential(*layers)
    if kind == "logistic":
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=100, line_search_fn="strong_wolfe")
    weights = [one for one in model.parameters() if one.ndim == 2]

    def closure() -> float:
        optimizer.zero_grad()
        squares = torch.stack([one.square().sum() for one in weights]).sum()
        loss = F.cross_entropy(model(x), y) + penalty * squares / len(x)
        torch.autograd.backward(loss)
        return float(loss.detach())

    with torch.enable_grad():
        optimizer.step(closure)  # type: ignore[no-untyped-call]  # torch's
    return model


def _control(
    values: torch.Tensor,
    data: Labelled,
    train: torch.Tensor,
    chosen_by: torch.Tensor,
    test: torch.Tensor,
    kind: Kind,
    seed: int,
) -> float | None:
    """The accuracy for random classes of words, with the shares of the real ones."""
    if data.words is None:
        return None
    words, inverse = np.unique(data.words, return_inverse=True)
    rng = np.random.default_rng(seed)
    drawn = rng.choice(data.labels.numpy(), size=len(words))
    labels = torch.from_numpy(drawn[inverse])
    if len(np.unique(labels[train].numpy())) < 2:
        return None
    predicted, _ = _best(values, labels, train, chosen_by, test, kind, seed)
    return float((predicted == labels[test]).double().mean())


def _interval(right: torch.Tensor, documents: np.ndarray, seed: int) -> tuple[float, float]:
    names, inverse = np.unique(documents, return_inverse=True)
    sums, counts = np.zeros(len(names)), np.zeros(len(names))
    np.add.at(sums, inverse, right.numpy())
    np.add.at(counts, inverse, 1)
    drawn = np.random.default_rng(seed).integers(len(names), size=(_RESAMPLES, len(names)))
    low, high = np.percentile(sums[drawn].sum(1) / counts[drawn].sum(1), [2.5, 97.5])
    return float(low), float(high)
