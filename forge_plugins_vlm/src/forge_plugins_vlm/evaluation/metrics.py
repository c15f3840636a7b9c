"""Metrics of answers: texts against the texts of references."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

_NOTHING = re.compile(r"(?<=\d),(?=\d)|\.(?!\d)|(?<=n)'(?=t\b)|'(?=(?:d|ll|m|re|ve)\b)")
"""What is left out of a word: 2,000; a.m.; don't."""
_BETWEEN = re.compile(r"[;/\[\]\"{}()=+\\_\-<>@`,?!]")
"""What parts words. Other signs are of words, as in $5, 50% and 4:30."""
_ARTICLES = {"a", "an", "the"}
_NUMBERS = {"none": "0", "zero": "0", "one": "1", "two": "2", "three": "3", "four": "4", "five": "5"}
_NUMBERS |= {"six": "6", "seven": "7", "eight": "8", "nine": "9", "ten": "10"}


def exact_match(answers: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """The fraction of answers that are one of their references, without spaces around."""
    hits = sum(one.strip() in {each.strip() for each in own} for one, own in zip(answers, references, strict=True))
    return {"exact_match": hits / len(answers)}


def vqa_accuracy(answers: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """The mean of ``min(1, agreeing / 3)`` over all choices of all people but one (Antol et al. 2015, arXiv
    1505.00468); of a question with a single reference, whether it is that.

    Texts are compared as ``plain_words``, which are those of the authors' code. That takes texts as they are where all
    people say the same.
    """
    scores = []
    for answer, own in zip(answers, references, strict=True):
        given, said = plain_words(answer), [plain_words(one) for one in own]
        if len(said) == 1:
            scores.append(float(given == said[0]))
            continue
        left_out = [sum(one == given for j, one in enumerate(said) if j != i) for i in range(len(said))]
        scores.append(sum(min(1.0, agreeing / 3) for agreeing in left_out) / len(said))
    return {"vqa_accuracy": sum(scores) / len(scores)}


def yes_no_f1(answers: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """F1 of yes, with its precision and recall, and the share of yes, over questions whose first reference is yes or no
    (Li et al. 2023, arXiv 2305.10355). An answer is its first word; none of the two counts as no."""
    pairs = [
        (_words(answer)[:1] == ["yes"], _words(own[0]) == ["yes"])
        for answer, own in zip(answers, references, strict=True)
        if _words(own[0]) in (["yes"], ["no"])
    ]
    hits = sum(given and wanted for given, wanted in pairs)
    given, wanted = sum(one for one, _ in pairs), sum(one for _, one in pairs)
    precision, recall = hits / max(given, 1), hits / max(wanted, 1)
    f1 = 2 * precision * recall / max(precision + recall, 1e-9)
    return {"f1": f1, "precision": precision, "recall": recall, "yes": given / max(len(pairs), 1)}


def cider(answers: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """CIDEr-D (Vedantam et al. 2015, arXiv 1411.5726): 10 times the mean over n = 1 … 4 of the similarity of n-grams,
    weighted by how few questions' references have them; differences of length are penalised (σ = 6). Words are in lower
    case, without punctuation, unstemmed."""
    grams = [[_grams(one) for one in own] for own in references]
    having: Counter[tuple[str, ...]] = Counter()
    for own in grams:
        having.update({gram for one in own for gram in one})
    log_total = math.log(max(len(references), 1))
    weights = {gram: log_total - math.log(count) for gram, count in having.items()}
    scores = []
    for answer, own in zip(answers, grams, strict=True):
        given = _grams(answer)
        each = [_similarity(given, one, weights, log_total) for one in own]
        scores.append(10 * sum(each) / len(each))
    return {"cider": sum(scores) / len(scores)}


def plain_words(text: str) -> str:
    """Words in lower case, without punctuation and articles, numbers to ten as digits."""
    words = _BETWEEN.sub(" ", _NOTHING.sub("", text.lower())).split()
    return " ".join(_NUMBERS.get(word, word) for word in words if word not in _ARTICLES)


def _words(text: str) -> list[str]:
    return re.sub(r"[^\w\s]", " ", text.lower()).split()


def _grams(text: str) -> Counter[tuple[str, ...]]:
    words = _words(text)
    return Counter(tuple(words[i : i + n]) for n in range(1, 5) for i in range(len(words) - n + 1))


def _similarity(
    given: Mapping[tuple[str, ...], int],
    reference: Mapping[tuple[str, ...], int],
    weights: Mapping[tuple[str, ...], float],
    unknown: float,
) -> float:
    lengths = [sum(count for gram, count in one.items() if len(gram) == 1) for one in (given, reference)]
    penalty = math.exp(-((lengths[0] - lengths[1]) ** 2) / (2 * 6.0**2))
    total = 0.0
    for n in range(1, 5):
        mine, theirs = (
            {gram: count * weights.get(gram, unknown) for gram, count in one.items() if len(gram) == n}
            for one in (given, reference)
        )
        shared = sum(min(value, theirs[gram]) * theirs[gram] for gram, value in mine.items() if gram in theirs)
        norms = [math.sqrt(sum(value**2 for value in one.values())) for one in (mine, theirs)]
        total += shared / (norms[0] * norms[1]) if all(norms) else 0.0
    return penalty * total / 4


METRICS = {"cider": cider, "exact_match": exact_match, "vqa_accuracy": vqa_accuracy, "yes_no_f1": yes_no_f1}
"""By their names in configurations."""
