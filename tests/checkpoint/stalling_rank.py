"""One of three ranks, of which two come too late to a save, one after the other.

Started by ``test_slow_save.py`` with a folder, and seconds that a rank waits for the others. Prints how each save has
ended, as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from forge_core.checkpoint.saver import Saver, Snapshot
from forge_core.checkpoint.store import CheckpointStore
from forge_core.run.process import hard_exit


def main(folder: Path, timeout: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    stalls: set[str] = set()

    def stall(where: str) -> None:
        if where in stalls:
            stalls.remove(where)
            time.sleep(1.5 * timeout)

    def written(*given: Any) -> Any:
        entries = write(*given)
        stall("before it tells of its files")
        return entries

    saver = Saver(
        CheckpointStore(folder / "checkpoints"),
        torch.device("cpu"),
        background=True,
        timeout=timeout,
        may_commit=lambda: stall("before the checkpoint gets its name"),
    )
    write: Callable[..., Any] = saver._write_tensors
    with patch.object(saver, "_write_tensors", written):
        _save(saver, 1)
        if dist.get_rank() == 0:
            stalls.add("before the checkpoint gets its name")
        _save(saver, 2)
        _save(saver, 3)
        if dist.get_rank() == 1:
            stalls.add("before it tells of its files")
        _save(saver, 4)
        _save(saver, 5)
    saver.close()
    dist.destroy_process_group()
    hard_exit()


def _save(saver: Saver, step: int) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    saver.save(
        Snapshot(
            step=step,
            tokens=0,
            tensors={"model.w": distribute_tensor(torch.full((300, 10), float(step)), mesh, [Shard(0)])},
            state={},
            mesh={"pp": 1},
            versions={},
            metrics={},
            write_more=lambda _: {},
        )
    )
    saved = saver.finish()
    assert saved is not None
    print(json.dumps([step, None if saved.error is None else str(saved.error)]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
