"""The description of a checkpoint's tensors is read, by any version of torch that wrote it."""

import pickle

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from forge_core.checkpoint.safe_reader import saved_tensors, unpickled


def test_a_description_that_torch_2_15_has_written_is_read_by_any_and_can_be_written_again(tmp_path, monkeypatch):
    """It has the strides of a tensor, too. Ranks tell it to others, and that of frozen tensors is written again."""
    before = TensorProperties.__getstate__
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda self: (*before(self)[:5], (3, 1)))
    tensor = TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size([2, 3]), [])
    file = tmp_path / ".metadata"
    file.write_bytes(pickle.dumps(Metadata({"model.w": tensor})))
    monkeypatch.undo()

    read = unpickled(file)
    file.write_bytes(pickle.dumps(read))

    for one in (read, pickle.loads(pickle.dumps(read)), unpickled(file)):
        entry = saved_tensors(one)["model.w"]
        assert (entry.properties.dtype, tuple(entry.size)) == (torch.bfloat16, (2, 3))
