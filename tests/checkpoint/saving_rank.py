"""One of two ranks that save twenty checkpoints in the background, one after the other, and train meanwhile.

Started by ``test_background.py`` with a folder; ``default`` as the second argument saves over the group of training.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from forge_core.checkpoint.saver import Saver, Snapshot
from forge_core.checkpoint.store import CheckpointStore
from forge_core.run.process import hard_exit

SAVES = 20


def main(folder: Path, group: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weights = {
        f"model.{name}": distribute_tensor(torch.zeros(1000, 300), mesh, [Shard(0)]) for name in ("first", "second")
    }
    saver = _saver(CheckpointStore(folder / "checkpoints"), group)
    steps, steps_while_writing = 0, 0
    for number in range(1, SAVES + 1):
        for weight in weights.values():
            weight.to_local().fill_(float(number))
        saver.save(
            Snapshot(
                step=number,
                tokens=0,
                tensors=weights,
                state={},
                mesh={"pp": 1},
                versions={},
                metrics={},
                write_more=lambda _: {},
            )
        )
        while True:  # as many steps as all ranks make while one of them is still writing
            writing = torch.tensor(float(saver.is_writing))
            saver.wait_until_copied()
            for weight in weights.values():
                weight.to_local().fill_(-1.0)
            dist.all_reduce(writing)
            time.sleep(0.005)
            steps += 1
            if not writing:
                break
            steps_while_writing += 1
        saved = saver.finish()
        assert saved is not None
        assert saved.error is None, saved.error
    saver.close()
    if dist.get_rank() == 0:
        (folder / "steps").write_text(f"{steps} {steps_while_writing}")
    dist.destroy_process_group()
    hard_exit()


def _saver(store: CheckpointStore, group: str) -> Saver:
    arguments = {"background": True, "timeout": 60, "may_commit": lambda: None}
    if group == "own":
        return Saver(store, torch.device("cpu"), **arguments)
    with patch.object(dist, "new_group", lambda **_: dist.group.WORLD):
        return Saver(store, torch.device("cpu"), **arguments)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
