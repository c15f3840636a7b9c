"""Other replicas of a model, as the training loop sees them."""

from contextlib import nullcontext
from types import SimpleNamespace

import torch

from forge_core.contracts.replication import Share
from forge_core.train import replication
from forge_core.train.replication import JoinedReplicas


class Others:
    """Gives the state of another replica before the first step."""

    def __init__(self, done):
        self.done, self.shares = done, [Share(0, 1, 5), Share(0, 1, 5), Share(1, 2, 6)]

    def join(self, handover):
        self.handover = handover

    def begin_step(self):
        self.done.append("begun")
        if len(self.shares) == 3:
            self.handover.take({"facts": "theirs"})
        return self.shares.pop(0)

    def sum(self, tensors):
        self.done.append("compared")
        digests, _ = tensors
        digests.fill_(7)
        return True


def test_a_state_is_taken_over_once_and_after_earlier_steps_have_been_told(monkeypatch):
    monkeypatch.setattr(replication, "_digest", lambda job, catalog, mesh: 7)
    done, said, dealt = [], [], []
    run = SimpleNamespace(
        job=SimpleNamespace(run=SimpleNamespace(first_step_timeout=1.0)),
        mesh=SimpleNamespace(dp_size=4, dp_rank=3),
        device=torch.device("cpu"),
        loader=SimpleNamespace(deal=lambda *cut: dealt.append(cut)),
        supervisor=SimpleNamespace(patient=lambda seconds: nullcontext()),
        directory=SimpleNamespace(write_event=lambda event, **facts: None),
        log=said.append,
    )
    replicas = JoinedReplicas(Others(done), run, None)
    replicas.join(3, dict, lambda state: 9)

    for step in (3, 9, 10):
        assert replicas.begin_step(step, lambda: done.append("told"))

    assert done == ["told", "begun", "compared", "told", "begun", "told", "begun", "compared"]
    assert dealt == [(3, 4), (7, 8)]
    assert said == [
        "took over the state of another replica, at step 9; this one was at 3",
        "from step 10 on alone",
        "from step 11 on as number 2 of 2 replicas",
    ]
