"""The checker of histories finds what it is there to find."""

import pytest

from faults.history import problems_of


def _event(kind, step, attempt=None):
    return {"event": kind, "step": step, "attempt": attempt}


GOOD = [
    _event("started", 0, "a"),
    _event("saved", 2),
    _event("saved", 4),
    _event("resumed", 4, "b"),
    _event("saved", 6),
]
METRICS = [{"step": step, "loss": 1.0, "tokens": 8 * step} for step in range(1, 7)]


@pytest.mark.parametrize(
    ("events", "metrics", "losses", "said"),
    [
        ([*GOOD, _event("resumed", 4, "c")], METRICS, {}, "step 6 was acknowledged, and the next attempt began at 4"),
        ([*GOOD, _event("saved", 6)], METRICS, {}, "step 6 was saved after 6: by another attempt"),
        ([*GOOD, _event("resumed", 6, "b")], METRICS, {}, "attempt b has started twice"),
        (GOOD, METRICS, {3: {(1.0, 2.0), (1.5, 2.0)}}, "step 3 was done again, and came out otherwise"),
        (GOOD, METRICS[:2] + METRICS[3:], {}, "step 4 is where step 3 should be"),
        (GOOD, [*METRICS[:5], {**METRICS[5], "tokens": 40}], {}, "after step 6, 40 tokens have been consumed, not 48"),
    ],
)
def test_a_history_that_cannot_be_is_told(events, metrics, losses, said):
    assert [problem for problem in problems_of(events, metrics, losses) if said in problem]


def test_a_good_one_and_one_that_went_back_behind_a_damaged_checkpoint_are_not():
    assert list(problems_of(GOOD, METRICS, {3: {(1.0, 2.0)}})) == []
    assert list(problems_of([*GOOD, _event("resumed", 4, "c")], METRICS, {}, damaged={6})) == []
