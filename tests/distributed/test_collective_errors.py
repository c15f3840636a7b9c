"""All ranks end when one does, and none waits for one that has failed."""

from pathlib import Path

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from forge_core.distributed import collective_errors
from forge_core.distributed.collective_errors import run_on_all_ranks, run_on_rank0
from forge_core.errors import ConfigError, ExitCode


def test_what_goes_wrong_on_one_rank_ends_all_of_them_however_long_the_others_wait(run_ranks):
    said = run_ranks(Path(__file__).with_name("failing_rank.py"), 2)

    assert (
        said
        == ["True True\nTrue True\ntold\nTrue True\nTrue\nwhile asked True\nTrue\nTrue\nalone True\ntogether\n"] * 2
    )


def test_without_a_process_group_there_is_only_this_process():
    assert run_on_rank0(lambda: 3) == 3


@pytest.mark.parametrize(
    ("sentence", "lines"),
    [
        ("no room", ["no room"]),
        ("no room on node {node}", [f"[rank {n * 8} and 7 more] no room on node {n}" for n in range(10)]),
    ],
)
def test_of_4096_ranks_that_fail_each_sentence_is_said_once_and_ten_at_most(monkeypatch, sentence, lines):
    def fail():
        raise ConfigError(sentence.format(node=0))

    said = [(sentence.format(node=rank // 8), ExitCode.INVALID, "ConfigError") for rank in range(4096)]
    dist.init_process_group("fake", rank=0, world_size=4096, store=FakeStore())
    monkeypatch.setattr(collective_errors, "disseminate", lambda *flags, group: [True, False])
    monkeypatch.setattr(collective_errors, "gather", lambda own, group: said)
    try:
        with pytest.raises(ConfigError) as raised:
            run_on_all_ranks(fail)
    finally:
        dist.destroy_process_group()

    assert str(raised.value).splitlines() == lines + ["and 502 more"] * (len(lines) > 1)
