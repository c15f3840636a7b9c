"""Optimizers that need whole matrices are not given parts of them."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from forge_core.errors import ConfigError
from forge_core.train.build import BuiltModel, build_optimizer
from forge_core.train.component_checks import CheckedLoss
from forge_core.train.executor import PlainExecutor
from forge_testing.small_model import small_job


class WholeMatrices(torch.optim.SGD):
    compute_layout = "full_matrix"


@pytest.fixture
def two_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def built(axis, placement) -> BuiltModel:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [placement]))
    return BuiltModel(
        parts=[nn.Identity()],
        applied=[],
        roles={"weight": "matrix"},
        parameters={"weight": weight},
        n_parameters=16,
        flops_per_token=1.0,
        executor=PlainExecutor(nn.Identity(), None),
        loss=CheckedLoss(None, "none"),
    )


def build(use, *, parameters):
    return WholeMatrices([one.parameter for one in parameters], lr=0.1)


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("axis", ["dp_shard", "tp"])
def test_they_are_refused_where_any_axis_shards_matrices(axis):
    with pytest.raises(ConfigError, match=r"this mesh shards them; set parallel\.dp_shard, cp, tp and ep to 1"):
        build_optimizer(small_job(), built(axis, Shard(0)), build)


@pytest.mark.usefixtures("two_ranks")
def test_copies_of_the_model_are_fine():
    assert isinstance(build_optimizer(small_job(), built("dp_replicate", Replicate()), build), WholeMatrices)
