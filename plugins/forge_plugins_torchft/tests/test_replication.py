"""What becomes of sums over replicas that fail; torchft's manager is played, as no network here fails for good."""

import time
from types import SimpleNamespace

import pytest
import torch
from torchft.manager import ExceptionWithTraceback

from forge_core.errors import LostPeerError
from forge_plugins_torchft.config import TorchftConfig
from forge_plugins_torchft.replication import TorchftReplication


class Manager:
    failure = None

    def allreduce(self, tensor, reduce_op):
        return SimpleNamespace(wait=lambda: None)

    def errored(self):
        return self.failure and ExceptionWithTraceback(self.failure)


@pytest.fixture
def said():
    return []


@pytest.fixture
def replication(said):
    made = TorchftReplication(TorchftConfig(lighthouse="http://node0:29510", join_timeout=0.2))
    made._manager = Manager()
    made._run = SimpleNamespace(device=torch.device("cpu"), log=said.append)
    return made


def test_sums_that_fail_each_time_end_the_run(replication, said):
    """Steps were done again for ever, and nothing said why."""
    replication._manager.failure = RuntimeError("NCCL error: unhandled system error\nLast error: no route")

    assert [replication.sum([torch.ones(2)]) for _ in range(3)] == [False] * 3
    time.sleep(0.25)
    with pytest.raises(LostPeerError, match=r"not add up for 0\.2 s \(join_timeout\): RuntimeError: NCCL error: un"):
        replication.sum([torch.ones(2)])

    assert said == ["the replicas could not add up: RuntimeError: NCCL error: unhandled system error"]


def test_a_sum_that_works_in_between_gives_them_their_time_again(replication, said):
    for _ in range(3):
        replication._manager.failure = RuntimeError("connection closed")
        assert not replication.sum([torch.ones(2)])
        time.sleep(0.15)
        replication._manager.failure = None
        assert replication.sum([torch.ones(2)])

    assert said == ["the replicas could not add up: RuntimeError: connection closed"] * 3
