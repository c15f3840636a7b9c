"""One rank of three: asks, and prints what all have asked for after each of seven steps, as a CPU and as a GPU hears
it."""

from datetime import timedelta

import torch
import torch.distributed as dist

from forge_core.contracts.callback import Requests
from forge_core.distributed.collective_errors import any_rank
from forge_core.distributed.consensus import Consensus
from forge_core.run.process import hard_exit

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank = dist.get_rank()
for device in ("cpu", "cuda"):  # decides how late votes are heard; the flags are in host memory here
    requests = Requests()
    consensus = Consensus(requests, torch.device(device))
    heard, verdicts = [], []
    for step in range(7):
        consensus.is_writing = rank == 1 and step < 4
        requests.save_now |= (rank, step) in ((1, 1), (2, 1), (2, 2))
        if (rank, step) == (0, 5):
            requests.stop = "asked"
        verdicts.append(int(consensus.reduce(torch.tensor(float(rank == step)))))
        if step != 3:  # a step that does not count asks for no answer; nothing that was asked is lost
            votes = consensus.votes()
            heard.append(
                "".join(
                    letter for letter in "swc" if getattr(votes, {"s": "save", "w": "is_writing", "c": "stop"}[letter])
                )
                or "-"
            )
    print(device, *heard, verdicts, consensus.reason())
print(*any_rank(rank == 2, False, True), consensus.any_rank(False))
hard_exit(0)
