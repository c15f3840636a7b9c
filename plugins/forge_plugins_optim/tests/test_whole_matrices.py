"""Matrices that are spread over ranks are computed as whole ones: on four ranks in every layout, in one launch."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from forge_core.errors import PluginError
from forge_plugins_optim import whole_matrices
from forge_plugins_optim.whole_matrices import map_whole
from forge_testing.several_ranks import on_ranks

SHAPES = [(8, 6), (5, 12), (8, 6), (8, 6), (3, 4), (5, 12), (8, 6)]
STACKS = [(4, 8, 6), (4, 6, 8), (4, 8, 6)]


def drawn(shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def of_all_rows(matrices):
    """Cannot be computed from a part, nor from a transposed, permuted or padded matrix."""
    rows = torch.arange(1, matrices.shape[-2] + 1, dtype=matrices.dtype).unsqueeze(1)
    return (matrices @ matrices.mT) @ (rows * matrices) / matrices.norm(dim=(-2, -1), keepdim=True)


class Layouts:
    """Each compares with one process, and returns how many matrices this rank has computed."""

    def all(self):
        line = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        return {
            "rows": self.compare([distribute_tensor(one, line, [Shard(0)]) for one in drawn()]),
            "columns": self.compare([distribute_tensor(one, line, [Shard(1)]) for one in drawn()]),
            "copies": self.compare([distribute_tensor(one, line, [Replicate()]) for one in drawn()]),
            "copies of rows": self.compare([distribute_tensor(one, grid, [Replicate(), Shard(0)]) for one in drawn()]),
            "rows and columns": self.compare([distribute_tensor(one, grid, [Shard(0), Shard(1)]) for one in drawn()]),
            "rows of rows": self.compare([distribute_tensor(one, grid, [Shard(0), Shard(0)]) for one in drawn()]),
            "fsdp of rows": self.compare(fully_sharded(grid, Shard(0), (8, 16))),
            "fsdp of columns": self.compare(fully_sharded(grid, Shard(1), (7, 16))),
            "fsdp of rows and of columns": self.compare(
                [*fully_sharded(grid, Shard(0), (8, 16)), *fully_sharded(grid, Shard(1), (7, 16))]
            ),
            "uneven experts and a matrix": self.compare(
                [distribute_tensor(one, grid, [Shard(0), Shard(1)]) for one in drawn([(3, 8, 6), (8, 6)])]
            ),
            "plain": self.compare(drawn()),
            "plain and rows": self.compare([*drawn(), distribute_tensor(drawn()[0], line, [Shard(0)])]),
            "experts": self.compare([distribute_tensor(one, line, [Shard(0)]) for one in drawn(STACKS)]),
            "rows of experts": self.compare([distribute_tensor(one, line, [Shard(1)]) for one in drawn(STACKS)]),
            "experts and rows": self.compare(
                [distribute_tensor(one, grid, [Shard(0), Shard(1)]) for one in drawn(STACKS)]
            ),
            "rows and experts": self.compare(
                [distribute_tensor(one, grid, [Shard(1), Shard(0)]) for one in drawn(STACKS)]
            ),
            "bfloat16": self.compare([distribute_tensor(one.bfloat16(), line, [Shard(0)]) for one in drawn()]),
        }

    def compare(self, tensors):
        computed = []

        def function(matrices):
            computed.append(matrices.shape)
            return of_all_rows(matrices)

        results = map_whole(tensors, function)

        for tensor, result in zip(tensors, results, strict=True):
            is_spread = isinstance(tensor, DTensor)
            whole = tensor.full_tensor() if is_spread else tensor
            assert isinstance(result, DTensor) is is_spread
            if is_spread:
                assert (result.placements, result.stride()) == (tensor.placements, tensor.stride())
                assert result.to_local().shape == tensor.to_local().shape
            found = result.full_tensor() if is_spread else result
            assert found.dtype == tensor.dtype
            tolerance = 1e-6 if tensor.dtype == torch.float32 else 2e-2
            torch.testing.assert_close(found, of_all_rows(whole), rtol=tolerance, atol=tolerance)
        return sum(shape[0] for shape in computed)

    def exchanges(self):
        """How often ranks exchange parts of small matrices, and of ones that count as large."""
        line = init_device_mesh("cpu", (dist.get_world_size(),))
        rows = [distribute_tensor(one, line, [Shard(0)]) for one in drawn()]
        counts = []
        for large in (whole_matrices._LARGE, 0):
            with (
                mock.patch.object(whole_matrices, "_LARGE", large),
                mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchange,
            ):
                self.compare(rows)
            counts.append(exchange.call_count)
        return counts

    def wrong(self):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        said = []
        for tensor, function in (
            (distribute_tensor(torch.ones(4), mesh, [Shard(0)]), of_all_rows),
            (DTensor.from_local(torch.ones(4, 4), mesh, [Partial()]), of_all_rows),
            (distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)]), lambda matrices: matrices.mT),
            (torch.ones(4, 6), lambda matrices: matrices.double()),
        ):
            with pytest.raises(PluginError) as error:
                map_whole([tensor], function)
            said.append(str(error.value))
        return said


def fully_sharded(grid: DeviceMesh, placement, shape):
    """Parameters as tensor parallelism and then FSDP leave them."""
    layers = nn.Sequential(*(nn.Linear(shape[1], shape[0], bias=False) for _ in range(3)))
    torch.manual_seed(0)
    for layer in layers:
        part = distribute_tensor(torch.randn(shape), grid["inner"], [placement])
        layer.weight = nn.Parameter(part)
    fully_shard(layers, mesh=grid["outer"])
    return [layer.weight for layer in layers]


@pytest.fixture(scope="module")
def computed():
    """How many matrices each of four ranks has computed in each layout."""
    of_ranks = on_ranks(Layouts, "all", 4)
    return {layout: [one[layout] for one in of_ranks] for layout in of_ranks[0]}


SPREAD = ["rows", "columns", "copies", "copies of rows", "rows and columns", "rows of rows", "bfloat16"]


@pytest.mark.parametrize("layout", SPREAD)
def test_each_matrix_is_computed_once_and_the_work_is_shared_out(computed, layout):
    assert sum(computed[layout]) == len(SHAPES)
    assert max(computed[layout]) == 2, "seven matrices of three shapes on four ranks"


@pytest.mark.parametrize("layout", ["fsdp of rows", "fsdp of columns"])
def test_tensor_parallelism_and_fsdp_share_the_work_too(computed, layout):
    assert sorted(computed[layout]) == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("layout", "n_matrices"), [("fsdp of rows and of columns", 6), ("uneven experts and a matrix", 4)]
)
def test_matrices_that_pass_axes_in_another_order_do_not_part_the_ranks(computed, layout, n_matrices):
    """Ranks took turns by what each had computed before, and waited for parts that none sent."""
    assert sum(computed[layout]) == n_matrices
    assert max(computed[layout]) <= 2


@pytest.mark.parametrize("layout", ["experts", "rows of experts", "experts and rows", "rows and experts"])
def test_experts_are_matrices_of_their_own(computed, layout):
    assert computed[layout] == [3, 3, 3, 3]


def test_a_plain_tensor_is_computed_where_it_is(computed):
    assert computed["plain"] == [len(SHAPES)] * 4
    assert sum(computed["plain and rows"]) == 4 * len(SHAPES) + 1


def test_small_matrices_of_several_shapes_travel_together_and_large_ones_apart():
    assert on_ranks(Layouts, "exchanges", 2) == [[2, 6], [2, 6]], "there and back, of three shapes"


def test_misuse_is_a_sentence():
    (said,) = on_ranks(Layouts, "wrong", 1)

    assert "a tensor of shape (4,)" in said[0]
    assert "a sum that is not reduced yet" in said[1]
    assert "was given (1, 4, 6) in torch.float32 and returned (1, 6, 4)" in said[2]
    assert "returned (1, 4, 6) in torch.float64; it must return the same shape and dtype" in said[3]
