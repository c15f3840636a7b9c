"""One of two ranks that save, and then read what they have saved, while some calls to the file system fail.

Started by ``test_failing_disk.py`` with a folder, ``background`` or ``foreground``, and the number of saves. Prints
what it sees as JSON, a line each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from forge_core.checkpoint.saver import Saver, Snapshot
from forge_core.checkpoint.store import Checkpoint, CheckpointStore
from forge_core.errors import ConfigError
from forge_core.run.process import hard_exit


def main(folder: Path, background: bool, saves: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    store = CheckpointStore(folder / "checkpoints")
    saver = Saver(store, torch.device("cpu"), background=background, timeout=60, may_commit=lambda: None)
    for step in range(1, saves + 1):
        saver.save(
            Snapshot(
                step=step,
                tokens=0,
                tensors={"model.w": _sharded(float(step))},
                state={},
                mesh={"pp": 1},
                versions={},
                metrics={},
                write_more=lambda _: {},
            )
        )
        saved = saver.finish()
        assert saved is not None
        _say(saved=step, error=None if saved.error is None else str(saved.error))
    saver.close()
    newest = _find(store, None)
    older = _find(store, newest.step)
    _read(newest)
    _read(older)
    dist.destroy_process_group()
    hard_exit()


def _sharded(value: float) -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(torch.full((2000, 30), value), mesh, [Shard(0)])


def _find(store: CheckpointStore, before: int | None) -> Checkpoint:
    reported: list[str] = []
    found = store.newest(reported.append, before)
    assert found is not None
    _say(found=found.step, reported=reported)
    return found


def _read(checkpoint: Checkpoint) -> None:
    weight = torch.zeros(2000, 30)  # whole, so that each rank reads the files of both
    try:
        checkpoint.load({"model.w": weight})
    except ConfigError as error:
        _say(read=checkpoint.step, error=str(error))
    else:
        _say(read=checkpoint.step, values=weight.unique().tolist())


def _say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "background", int(sys.argv[3]))
