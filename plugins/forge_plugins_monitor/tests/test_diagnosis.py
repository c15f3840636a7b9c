"""Who is missing, from the signs of life of all ranks."""

import pytest

from forge_plugins_monitor.peers.diagnosis import Diagnosis, Need, Sign
from forge_plugins_monitor.peers.node_watch import _conclude
from forge_plugins_monitor.peers.pulses import SILENCE, Pulses


def sign(age=0.0, *, is_gone=False, **said):
    facts = {"host": "vm", "step": 7, "where": "a.py:1", "failure": "", "process": {"number": 5}, "need": Need.NONE}
    return Sign({**facts, "gave_up": False, "timed_out": False, "done": False, **said}, age, is_gone)


GAVE_UP = {"gave_up": True, "need": Need.LOST}
TIMED_OUT = {"gave_up": True, "timed_out": True, "need": Need.OVERDUE}


@pytest.mark.parametrize(
    ("signs", "sentence", "ranks"),
    [
        ({0: sign(**GAVE_UP), 1: sign(failure="KeyError: 'x'"), 2: sign(is_gone=True)}, "has ended: KeyError", [1]),
        ({0: sign(**GAVE_UP), 1: sign(is_gone=True), 2: sign(SILENCE)}, "ended without a word: its process 5", [1]),
        ({0: sign(**GAVE_UP), 1: sign(SILENCE), 2: sign()}, "no sign of life for 3 s, since step 7", [1]),
    ],
    ids=["a failure before a death", "a death before silence", "silence"],
)
def test_the_surest_is_named_at_once(signs, sentence, ranks):
    found = _conclude(Diagnosis(signs), 0.0)

    assert sentence in found.sentence
    assert found.ranks == ranks


def test_who_has_given_up_or_is_done_is_not_missed():
    signs = {0: sign(**GAVE_UP), 1: sign(60.0, is_gone=True, **GAVE_UP), 2: sign(60.0, is_gone=True, done=True)}

    assert Diagnosis(signs).missing() is None


def test_who_does_not_come_is_named_once_the_others_have_had_time_to_time_out():
    diagnosis = Diagnosis({0: sign(**TIMED_OUT), 1: sign(where="stuck.py:3"), 2: sign(**GAVE_UP)})

    assert _conclude(diagnosis, 1.0) is None
    assert _conclude(diagnosis, 2.0).sentence == (
        "rank 1 on vm is alive and does not come: it is in step 7, at stuck.py:3"
    )


def test_who_does_not_come_and_is_not_late_is_in_an_unknown_place():
    found = _conclude(Diagnosis({0: sign(**TIMED_OUT), 1: sign(where="")}), 2.0)

    assert found.sentence.endswith("it is in step 7, at an unknown place")


def test_a_failed_collective_waits_for_who_may_be_silent():
    diagnosis = Diagnosis({0: sign(**GAVE_UP), 1: sign(SILENCE - 1)})

    assert _conclude(diagnosis, 2.0) is None
    assert _conclude(diagnosis, 5.0).ranks == ()


def test_ranks_that_all_hang_are_told_first_the_one_that_hangs_elsewhere():
    signs = {rank: sign(need=Need.OVERDUE) for rank in range(6)} | {4: sign(need=Need.OVERDUE, where="odd.py:9")}

    found = _conclude(Diagnosis(signs), 2.0)

    assert found.sentence.startswith(
        "all of them still give signs of life, and wait for each other: rank 4 on vm is in step 7, at odd.py:9; rank 0"
    )
    assert found.sentence.endswith("and 2 more")


def test_the_host_of_the_store_is_named_where_nothing_comes_from_it(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "head")

    found = Diagnosis({8: sign(**GAVE_UP), 9: sign(SILENCE)}, store_silent=4.0).missing()

    assert found.sentence.startswith(
        "rank 0 does not answer: nothing has come from head for 4 s; rank 9 on vm has given"
    )
    assert found.ranks == [0, 9]


def test_the_first_that_is_alive_leads():
    pulses, counts = Pulses(), {0: None, 1: 5, 2: 9}
    pulses._last = {1: (5, -1e9), 2: (8, -1e9)}  # rank 1 has said nothing since, rank 2 has

    assert pulses.first_alive([0, 1, 2, 3], 3, counts.get) == 2
    assert pulses.first_alive([0, 1], 1, counts.get) == 1
