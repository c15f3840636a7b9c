"""Metrics of answers against formulas and known values."""

from __future__ import annotations

import math

import pytest

from forge_plugins_vlm.evaluation.metrics import cider, exact_match, plain_words, vqa_accuracy, yes_no_f1


def test_an_answer_matches_one_of_its_references():
    assert exact_match([" red ", "blue"], [["red"], ["green", "cyan"]]) == {"exact_match": 0.5}


@pytest.mark.parametrize(("agreeing", "expected"), [(0, 0.0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1.0), (10, 1.0)])
def test_vqa_accuracy_is_that_of_ten_people_leaving_one_out(agreeing, expected):
    people = ["two"] * agreeing + [f"other {number}" for number in range(10 - agreeing)]

    assert vqa_accuracy(["The 2."], [people])["vqa_accuracy"] == pytest.approx(expected)


def test_of_one_reference_vqa_accuracy_is_whether_it_is_the_same():
    assert vqa_accuracy(["A cat!", "dog"], [["cat"], ["cat"]]) == {"vqa_accuracy": 0.5}


def test_yes_is_found_among_yes_and_no():
    answers = ["Yes: it is", "no", "yes", "perhaps", "blue"]
    references = [["yes"], ["yes"], ["no"], ["no"], ["blue"]]

    found = yes_no_f1(answers, references)

    assert found == pytest.approx({"precision": 0.5, "recall": 0.5, "f1": 0.5, "yes": 0.5})


def test_cider_is_ten_for_the_references_themselves_and_nothing_for_other_words():
    references = [["a cat sits on the mat"], ["two dogs run over green grass"], ["the red car is parked outside"]]

    assert cider([one[0] for one in references], references)["cider"] == pytest.approx(10)
    assert cider(["x y z w"] * 3, references)["cider"] == 0


def test_cider_follows_its_formula():
    references = [["red cat"], ["blue dog"]]
    weight = math.log(2)  # each n-gram is in one of two questions
    one, two = (
        (2 * weight**2) / (math.sqrt(2) * weight * math.sqrt(3) * weight),
        weight**2 / (weight * math.sqrt(2) * weight),
    )
    penalty = math.exp(-1 / 72)  # three words for two

    found = cider(["red cat here", "blue dog"], references)["cider"]

    exact = (1 + 1 + 0 + 0) / 4  # neither has three words
    assert found == pytest.approx(10 * (penalty * (one + two) / 4 + exact) / 2)


def test_words_are_compared_without_case_punctuation_and_articles():
    assert plain_words("The Two cats, an owl.") == "2 cats owl"


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("10 a.m.", "10 AM", True),
        ("U.S.A.", "usa", True),
        ("2,000", "2000", True),
        ("don't", "dont", True),
        ("black/white", "black white", True),
        ("t-shirt", '"t shirt"', True),
        ("red,white", "red, white", True),
        ("3.5", "3 5", False),
        ("4:30", "4 30", False),
        ("$5", "5", False),
        ("50%", "50", False),
        ("man's", "mans", False),
    ],
)
def test_words_are_those_of_the_code_of_vqa(one, other, alike):
    assert (plain_words(one) == plain_words(other)) == alike
