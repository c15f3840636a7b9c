"""Requests go with a reduction of the step, and all ranks hear the same."""

from pathlib import Path


def test_what_any_rank_asks_is_heard_by_all_once_on_gpus_a_step_later(run_ranks):
    said = run_ranks(Path(__file__).with_name("voting_rank.py"), 3)

    on_cpu = "cpu w sw sw - c c [1, 1, 1, 0, 0, 0, 0] asked\n"
    on_gpu = "cuda w w sw w - c [1, 1, 1, 0, 0, 0, 0] asked\n"
    assert said == [f"{on_cpu}{on_gpu}True False True False\n"] * 3
