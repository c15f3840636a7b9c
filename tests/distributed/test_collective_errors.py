"""All ranks end when one does, and none waits for one that has failed."""

from pathlib import Path

from forge_core.distributed.collective_errors import run_on_rank0


def test_what_goes_wrong_on_one_rank_ends_all_of_them_however_long_the_others_wait(run_ranks):
    said = run_ranks(Path(__file__).with_name("failing_rank.py"), 2)

    assert (
        said
        == ["True True\nTrue True\ntold\nTrue True\nTrue\nwhile asked True\nTrue\nTrue\nalone True\ntogether\n"] * 2
    )


def test_without_a_process_group_there_is_only_this_process():
    assert run_on_rank0(lambda: 3) == 3
