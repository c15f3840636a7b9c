import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from forge_core.config.sections import AXES
from forge_core.distributed.mesh import Mesh, join_process_group
from forge_core.train.gradients import Gradients, all_finite, global_norm, squared_norms
from forge_core.train.gradients import clip_gradients as clip_by_norm

CPU = torch.device("cpu")


@pytest.fixture
def mesh():
    join_process_group(CPU)
    device_mesh = init_device_mesh("cpu", (1,) * len(AXES), mesh_dim_names=AXES)
    yield Mesh(device_mesh, dict.fromkeys(AXES, 1))
    torch.distributed.destroy_process_group()


def clip_gradients(parameters, max_norm, mesh):
    gradients = Gradients(dict(enumerate(parameters)), mesh, CPU)
    clip_by_norm(SimpleNamespace(), gradients, max_norm)
    return gradients.norm


def _parameters(*shapes, dtype=torch.float32):
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape).to(dtype)
    return parameters


def _norm_in_float64(parameters):
    return torch.cat([parameter.grad.double().flatten() for parameter in parameters]).norm().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_that_of_all_gradients_together(mesh, dtype):
    parameters = _parameters((30, 40), (7,), (2, 3, 4), dtype=dtype)
    expected = _norm_in_float64(parameters)

    norm = clip_gradients(parameters, 0.0, mesh)

    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(expected, rel=1e-6)


def test_gradients_are_scaled_down_to_the_largest_norm_and_never_up(mesh):
    parameters = _parameters((30, 40), (7,))
    before = [parameter.grad.clone() for parameter in parameters]

    clip_gradients(parameters, 1e6, mesh)
    assert all(torch.equal(p.grad, b) for p, b in zip(parameters, before, strict=True))

    clip_gradients(parameters, 0.5, mesh)
    assert _norm_in_float64(parameters) == pytest.approx(0.5, rel=1e-5)


def test_zero_measures_and_does_not_clip(mesh):
    parameters = _parameters((30, 40))
    before = parameters[0].grad.clone()

    assert clip_gradients(parameters, 0.0, mesh).item() > 1
    assert torch.equal(parameters[0].grad, before)


def test_an_optimizer_that_scales_gradients_is_told_the_factor(mesh):
    parameters = _parameters((30, 40))
    before, optimizer = parameters[0].grad.clone(), SimpleNamespace(scales_gradients=True)
    gradients = Gradients({"weight": parameters[0]}, mesh, CPU)

    clip_by_norm(optimizer, gradients, 0.5)
    assert torch.equal(parameters[0].grad, before)
    assert _norm_in_float64(parameters) * optimizer.gradient_scale.item() == pytest.approx(0.5, rel=1e-5)

    clip_by_norm(optimizer, gradients, 0.0)
    assert optimizer.gradient_scale is None


def test_one_that_does_not_is_told_none(mesh):
    optimizer = SimpleNamespace()

    clip_by_norm(optimizer, Gradients({"weight": _parameters((30, 40))[0]}, mesh, CPU), 0.5)

    assert optimizer.gradient_scale is None


def test_a_parameter_without_gradient_is_passed_over(mesh):
    with_gradient, without = _parameters((3,), (5,))
    without.grad = None

    assert clip_gradients([with_gradient, without], 1.0, mesh).item() > 0
    assert clip_gradients([without], 1.0, mesh).item() == 0


def test_sharded_and_whole_gradients_are_one_norm(mesh):
    parameters = _parameters((6, 4), (6, 4), (5,))
    expected = _norm_in_float64(parameters)
    shards = mesh.device_mesh["dp_replicate", "dp_shard"]
    for parameter, placements in zip(parameters, [(Replicate(), Shard(0)), (Replicate(), Replicate())], strict=False):
        parameter.data = distribute_tensor(parameter.data, shards, placements)
        parameter.grad = distribute_tensor(parameter.grad, shards, placements)

    assert clip_gradients(parameters, 0.0, mesh).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("count", [0, 2])
def test_the_norm_is_where_ranks_talk_wherever_the_gradients_are(mesh, count):
    """Pipeline stages sum it, and one may have no gradient."""
    gradients = [parameter.grad for parameter in _parameters((3,), (5,))[:count]]

    assert global_norm(squared_norms(gradients), mesh, torch.device("meta")).device.type == "meta"


@pytest.mark.parametrize(
    ("tensors", "finite"),
    [
        ([torch.ones(2), torch.tensor(torch.inf)], False),
        ([torch.ones(2, dtype=torch.bfloat16), torch.tensor([1.0, -torch.inf])], False),
        ([torch.empty(0), torch.ones(2), torch.full((2,), 3e38), torch.ones(2, dtype=torch.int64)], True),
        ([torch.empty(0)], True),
        ([], True),
    ],
    ids=["scalar", "two dtypes", "empty shard and integers", "nothing here", "none"],
)
def test_what_is_not_finite_is_found_in_tensors_of_any_size_and_dtype(tensors, finite):
    assert all_finite(tensors, CPU).item() is finite


def test_norms_along_axes_add_up_and_count_copies_in_shares(run_ranks, tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(ALONG_AXES)

    said = run_ranks(script, 4, timeout=280)

    assert len(set(said)) == 1, "all ranks know the same norms"
    norms = json.loads(said[0])
    assert norms["found"] == pytest.approx(norms["expected"], rel=1e-6)
    for axis in ("pp", "tp"):
        squares = sum(norm**2 for name, norm in norms["found"].items() if name.startswith(axis))
        assert squares == pytest.approx(norms["total"] ** 2, rel=1e-6)


# Each of two pipeline stages has a matrix cut by rows over tp (5 rows: 3 and 2) and a vector of which both have a copy.
ALONG_AXES = """
import json, math

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from forge_core.config.sections import AXES
from forge_core.train.gradients import global_norm, norms_along, squared_norms
from forge_core.distributed.mesh import Mesh, join_process_group
from forge_core.run.process import hard_exit

cpu = torch.device("cpu")
join_process_group(cpu)
degrees = {**dict.fromkeys(AXES, 1), "pp": 2, "tp": 2}
mesh = Mesh(init_device_mesh("cpu", tuple(degrees.values()), mesh_dim_names=AXES), degrees)
generator = torch.Generator().manual_seed(0)
stages = [(torch.randn(5, 4, generator=generator), torch.randn(7, generator=generator)) for _ in range(2)]
matrix, vector = stages[mesh.device_mesh.get_local_rank("pp")]
gradients = [distribute_tensor(matrix, mesh.device_mesh["tp"], [Shard(0)], src_data_rank=None), vector]

found = norms_along(squared_norms(gradients), mesh, ("pp", "tp"), cpu)

def square(*tensors):
    return sum(tensor.double().square().sum().item() for tensor in tensors)

copies = sum(square(vector) for _, vector in stages)
expected = {
    "pp0": square(*stages[0]),
    "pp1": square(*stages[1]),
    "tp0": sum(square(matrix[:3]) for matrix, _ in stages) + copies / 2,
    "tp1": sum(square(matrix[3:]) for matrix, _ in stages) + copies / 2,
}
print(json.dumps({
    "found": {name: norm.item() for name, norm in found.items()},
    "expected": {name: math.sqrt(value) for name, value in expected.items()},
    "total": global_norm(squared_norms(gradients), mesh, cpu).item(),
}))
hard_exit()
"""
