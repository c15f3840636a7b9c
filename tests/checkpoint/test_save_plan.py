"""The plan of a save is made once, and again when what is saved is laid out otherwise: on two ranks, in one launch."""

import gc
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

from forge_core.checkpoint.file_system import TensorWriter
from forge_core.checkpoint.saver import Saver, Snapshot
from forge_core.checkpoint.store import CheckpointStore, whole_problem
from forge_core.distributed.mesh import join_process_group
from forge_testing.several_ranks import on_ranks

ROWS = torch.arange(24.0).view(6, 4)


class Saves:
    def all(self) -> tuple[str, list[int], list[str]]:
        """The folder of checkpoints; by save, how many parts of tensors this rank has told rank 0 of; what failed."""
        rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
        rows, columns, copies = (distribute_tensor(ROWS, mesh, [one]) for one in (Shard(0), Shard(1), Replicate()))
        first, second = {"model.a": rows, "model.b": copies}, {"model.a": columns, "model.b": copies}
        said = [tempfile.mkdtemp() if rank == 0 else None]
        dist.broadcast_object_list(said)
        store = CheckpointStore(Path(str(said[0])))
        self.saver = Saver(store, torch.device("cpu"), background=True, timeout=60, may_commit=lambda: None)
        thresholds = gc.get_threshold()
        with planned() as parts:
            self.save(1, first)
            self.save(2, {key: tensor + 1 for key, tensor in first.items()})
            self.save(3, second)
            self.save(4, second if rank == 0 else {**second, "model.mine": torch.ones(3)})
            with patch.object(TensorWriter, "prepare_global_plan", side_effect=OSError("no plan")):
                failed = [self.save(5, first)]
            with patch.object(TensorWriter, "write_data", side_effect=OSError("no disk")):
                failed.append(self.save(6, first))
            self.save(7, first)
        self.saver.close()
        assert gc.get_threshold() == thresholds
        assert not self.saver._plan.state_dict, "tensors that training may free"
        return str(said[0]), parts, failed

    def save(self, step: int, tensors: Mapping[str, torch.Tensor]) -> str:
        self.saver.save(Snapshot(step=step, tokens=0, tensors=tensors, state={}, versions={}))
        return str(self.saver.finish().error)


@contextmanager
def planned() -> Iterator[list[int]]:
    """How many parts of tensors this rank tells rank 0 of in each save."""
    parts = []
    prepare = TensorWriter.prepare_local_plan

    def counted(writer, plan):
        parts.append(len(plan.items))
        return prepare(writer, plan)

    with patch.object(TensorWriter, "prepare_local_plan", counted):
        yield parts


@pytest.fixture(scope="module")
def saves():
    ranks = on_ranks(Saves, "all", 2)
    yield ranks
    shutil.rmtree(ranks[0][0])


def test_it_is_made_again_on_all_ranks_when_tensors_are_others_on_one(saves):
    (_, parts_0, _), (_, parts_1, _) = saves

    assert parts_0 == [2, 0, 2, 2, 2, 2, 0]
    assert parts_1 == [2, 0, 2, 3, 2, 2, 0]


def test_it_is_made_again_after_a_save_that_got_none(saves):
    (_, _, failed), _ = saves

    assert "no plan" in failed[0]
    assert "no disk" in failed[1]


def test_what_is_saved_by_it_is_read_back(saves):
    join_process_group(torch.device("cpu"))
    try:
        store = CheckpointStore(Path(saves[0][0]))
        read = {
            step: {key: store.at(step, print).read(key) for key in ("model.a", "model.b")} for step in store.steps()
        }
        mine = store.at(4, print).read("model.mine")
    finally:
        dist.destroy_process_group()

    assert [*read] == [1, 2, 3, 4, 7]
    assert [whole_problem(store.folder(step)) for step in read] == [None] * 5
    for step, tensors in read.items():
        for tensor in tensors.values():
            assert torch.equal(tensor, ROWS + 1 if step == 2 else ROWS)
    assert torch.equal(mine, torch.ones(3))
