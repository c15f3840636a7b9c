"""The signs of life of a rank."""

import json

import pytest
import torch
import torch.distributed as dist

from forge_core.distributed.heartbeat import Condition, Heartbeat
from forge_core.distributed.mesh import join_process_group


@pytest.fixture
def group():
    join_process_group(torch.device("cpu"), 60.0)
    yield
    dist.destroy_process_group()


def test_a_rank_that_fails_in_the_middle_of_a_beat_still_says_why(group, monkeypatch):
    condition = Condition()
    exchange = Heartbeat._exchange_verdict

    def fail_meanwhile(heartbeat):
        condition.failure = "KeyError: 'a bug'"
        heartbeat._ended.set()  # as ``close`` does, before the beat has come to its end
        heartbeat._wake.set()
        exchange(heartbeat)

    monkeypatch.setattr(Heartbeat, "_exchange_verdict", fail_meanwhile)
    heartbeat = Heartbeat(condition, lambda: False)
    heartbeat.close()

    assert json.loads(heartbeat._store.get("0"))["failure"] == "KeyError: 'a bug'"
