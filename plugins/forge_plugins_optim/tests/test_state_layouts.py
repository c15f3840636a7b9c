"""Optimizers whose state is not of the parameter's shape: every layout does what one process does, and keeps its state.

Four ranks, in one launch.
"""

import shutil
import tempfile
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, load, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from forge_core.checkpoint.state_dict import empty_optimizer_state, optimizer_state
from forge_core.contracts.optimizer import NamedParameter
from forge_plugins_optim.adafactor import Adafactor
from forge_plugins_optim.adamw_8bit import AdamW8bit
from forge_plugins_optim.config import AdafactorConfig, AdamW8bitConfig
from forge_plugins_optim.state_layout import offset_in
from forge_testing.several_ranks import on_ranks

SHAPES = {"matrix": (12, 520), "wide": (7, 18), "experts": (4, 6, 9), "norm": (10,)}
OPTIMIZERS = {
    "adafactor": lambda parameters: Adafactor(
        AdafactorConfig(lr=0.02, beta1=0.5, scale_parameter=True), parameters=parameters
    ),
    "adamw_8bit": lambda parameters: AdamW8bit(AdamW8bitConfig(lr=0.02, min_elements=20), parameters=parameters),
}
BEFORE, AFTER = 5, 4
"""Steps before a resume on another layout, and after it."""


def started() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def gradient(name: str, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + [*SHAPES].index(name))
    return torch.randn(SHAPES[name], generator=generator)


def plain(values):
    return {name: nn.Parameter(value.clone()) for name, value in values.items()}


@cache
def grid():
    """One for all layouts: equal meshes of their own would have process groups of their own."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))


def cut(placements):
    """A layout on a mesh of two axes, with ``placements`` on them."""

    def lay_out(values):
        own = {
            name: [Shard(0) if one.is_shard() and one.dim >= value.ndim else one for one in placements]
            for name, value in values.items()
        }
        return {name: nn.Parameter(distribute_tensor(one.clone(), grid(), own[name])) for name, one in values.items()}

    return lay_out


def fsdp_of(placement):
    """As tensor parallelism and FSDP leave parameters: cut by ``tp`` first."""

    def lay_out(values):
        module = nn.Module()
        for name, value in values.items():
            own = Shard(0) if placement.dim >= value.ndim else placement
            module.register_parameter(name, nn.Parameter(distribute_tensor(value.clone(), grid()["tp"], [own])))
        fully_shard(module, mesh=grid()["dp_shard"])
        return dict(module.named_parameters())

    return lay_out


LAYOUTS = {
    "rows": cut([Shard(0), Replicate()]),
    "columns": cut([Replicate(), Shard(1)]),
    "last": cut([Replicate(), Shard(2)]),
    "rows and columns": cut([Shard(0), Shard(1)]),
    "columns and rows": cut([Shard(1), Shard(0)]),
    "fsdp of rows": fsdp_of(Shard(0)),
    "fsdp of columns": fsdp_of(Shard(1)),
    "one rank": plain,
}


_ADAFACTOR = {"rows": 2, "columns": 3, "last": 3, "fsdp of rows": 4, "one rank": 0}
COLLECTIVES = {
    "adafactor": {layout: _ADAFACTOR.get(layout, 5) for layout in LAYOUTS},
    "adamw_8bit": {layout: int("columns" in layout or layout == "last") for layout in LAYOUTS},
}
"""Of a step of all parameters."""


def held_of(whole, like):
    """What this rank holds of ``whole``, laid out as ``like``, also where FSDP of TP cuts unevenly, as
    ``distribute_tensor`` does not."""
    if not isinstance(like, DTensor):
        return whole.clone()
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    part = whole[tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))].clone()
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def steps(optimizer, parameters, first, last) -> None:
    for step in range(first, last):
        for name, parameter in parameters.items():
            parameter.grad = held_of(gradient(name, step), parameter)
        optimizer.step()


def whole_of(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def made(optimizer, parameters):
    roles = {"experts": "expert", "norm": "norm"}
    named = [NamedParameter(name, one, roles.get(name, "matrix")) for name, one in parameters.items()]
    return OPTIMIZERS[optimizer](named)


def contents(optimizer, parameters):
    return {name: whole_of(one.detach()).clone() for name, one in parameters.items()} | {
        key: whole_of(tensor).clone() for key, tensor in optimizer_state(optimizer, parameters)[0].items()
    }


class Layouts:
    def offsets(self):
        """Where each part begins, by torch's arithmetic and by ours."""
        return [
            (offset_in(one, dim), theirs[dim])
            for layout in LAYOUTS
            for one in LAYOUTS[layout](started()).values()
            if isinstance(one, DTensor) and one.to_local().numel()
            for theirs in [compute_local_shape_and_global_offset(one.shape, one.device_mesh, one.placements)[1]]
            for dim in range(one.ndim)
        ]

    def all(self):
        """By optimizer and layout: the largest difference to one process, and after a resume from another layout."""
        folder = tempfile.mkdtemp() if dist.get_rank() == 0 else None
        folders = [folder]
        dist.broadcast_object_list(folders)
        folder = Path(folders[0])
        found = {}
        for name in OPTIMIZERS:
            alone = plain(started())
            optimizer = made(name, alone)
            steps(optimizer, alone, 0, BEFORE)
            middle = contents(optimizer, alone)
            steps(optimizer, alone, BEFORE, BEFORE + AFTER)
            end = contents(optimizer, alone)
            written = [self._write(name, layout, folder / f"{name} {layout}", middle) for layout in LAYOUTS]
            for i, layout in enumerate(LAYOUTS):
                _, path = written[i - 1]
                differences = written[i][0], self._read(name, layout, path, end)
                found[name, layout] = *differences, self._collectives(name, layout)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
        return found

    def _write(self, name, layout, path, expected):
        parameters = LAYOUTS[layout](started())
        optimizer = made(name, parameters)
        steps(optimizer, parameters, 0, BEFORE)
        tensors, facts = optimizer_state(optimizer, parameters)
        tensors.update({f"model.{key}": one.detach() for key, one in parameters.items()})
        save(tensors, checkpoint_id=path)
        return difference(contents(optimizer, parameters), expected), (path, facts)

    def _read(self, name, layout, written, expected):
        path, facts = written
        parameters = LAYOUTS[layout]({key: torch.zeros(shape) for key, shape in SHAPES.items()})
        optimizer = made(name, parameters)
        metadata = FileSystemReader(path).read_metadata().state_dict_metadata
        tensors = empty_optimizer_state(optimizer, parameters, metadata, facts)
        tensors.update({f"model.{key}": one.detach() for key, one in parameters.items()})
        load(tensors, checkpoint_id=path)
        steps(optimizer, parameters, BEFORE, BEFORE + AFTER)
        return difference(contents(optimizer, parameters), expected)

    def _collectives(self, name, layout):
        """How many a step costs."""
        parameters = LAYOUTS[layout](started())
        optimizer = made(name, parameters)
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
            steps(optimizer, parameters, 0, 1)
        return all_reduce.call_count


def difference(found, expected):
    assert found.keys() == expected.keys()
    return max(float((found[key].double() - expected[key].double()).abs().max()) for key in expected)


@pytest.fixture(scope="module")
def differences():
    return on_ranks(Layouts, "all", 4)


@pytest.mark.slow
def test_a_part_begins_where_torch_says() -> None:
    of_ranks = on_ranks(Layouts, "offsets", 4)

    assert len({ours for pairs in of_ranks for ours, _ in pairs}) > 5
    for pairs in of_ranks:
        assert [ours for ours, _ in pairs] == [theirs for _, theirs in pairs]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_layout_does_what_one_process_does_and_goes_on_from_another_one(differences, optimizer, layout) -> None:
    for of_rank in differences:
        here, after_a_resume, n_collectives = of_rank[optimizer, layout]
        assert here <= 2e-6
        assert after_a_resume <= 4e-6
        assert n_collectives == COLLECTIVES[optimizer][layout]
