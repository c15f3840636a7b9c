import pytest

from forge_core.checkpoint.retention import is_due, superfluous
from forge_core.config.sections import CheckpointSection


def _due(until, **keys):
    section = CheckpointSection(**{"interval": 0, **keys})
    return [step for step in range(until) if is_due(step, section)]


def test_every_so_many_steps():
    assert _due(10, interval=3) == [3, 6, 9]
    assert _due(4, interval=1) == [1, 2, 3]


def test_powers_of_two_from_the_untrained_model_on():
    assert _due(600, powers_of_two_until=512) == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert _due(4, powers_of_two_until=1) == [0, 1]


def test_powers_of_two_after_a_later_start():
    window = {"powers_of_two_from": 1000, "powers_of_two_until": 1256}

    assert _due(1300, **window) == [1000, 1001, 1002, 1004, 1008, 1016, 1032, 1064, 1128, 1256]


def test_nothing_is_due_without_a_key():
    assert _due(10) == []


def _left(steps, metrics=None, **keys):
    section = CheckpointSection(**keys)
    there = [(step, {"eval/loss": metrics[step]} if metrics and step in metrics else {}) for step in steps]
    gone = superfluous(there, section)
    return [step for step in sorted(steps) if step not in gone]


def test_all_are_kept_unless_something_else_is_said():
    assert _left([1, 2, 3]) == [1, 2, 3]


def test_the_last_ones_stay():
    assert _left([30, 10, 20, 40], keep_last=2) == [30, 40]


def test_milestones_stay():
    assert _left(range(10, 110, 10), keep_last=1, keep_every=50) == [50, 100]
    assert _left([1, 2, 3], keep_last=1, keep_every=1) == [1, 2, 3]
    assert _left([1, 2, 3, 4, 5, 6], keep_last=1, powers_of_two_until=4) == [1, 2, 4, 6]


@pytest.mark.parametrize(("best_is", "expected"), [("lowest", [20, 30, 50]), ("highest", [10, 40, 50])])
def test_the_best_by_a_metric_stay(best_is, expected):
    losses = {10: 4.0, 20: 2.0, 30: 1.0, 40: 3.0}

    assert _left([10, 20, 30, 40, 50], losses, keep_last=1, keep_best=2, best_is=best_is) == expected


def test_while_none_is_judged_all_may_be_the_best():
    assert _left([10, 20, 30], keep_last=1, keep_best=1) == [10, 20, 30]
    assert _left([10, 20, 30], {20: 1.0}, keep_last=1, keep_best=1) == [20, 30]
    by_another = [(step, {"eval/accuracy": 1.0}) for step in (10, 20, 30)]
    assert superfluous(by_another, CheckpointSection(keep_last=1, keep_best=1)) == []


def test_among_equals_the_older_one_is_the_best():
    assert _left([10, 20, 30], {10: 1.0, 20: 1.0}, keep_last=1, keep_best=1) == [10, 30]
