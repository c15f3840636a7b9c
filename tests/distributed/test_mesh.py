"""Which rank is what on the mesh."""

from collections import defaultdict
from itertools import product
from types import SimpleNamespace

import attrs
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from forge_core.config.sections import AXES, ParallelSection
from forge_core.distributed.mesh import Mesh, build_mesh, emulates_bf16


@attrs.frozen
class Place:
    """Stands in for the device mesh of one rank."""

    coordinate: dict[str, int]

    def get_local_rank(self, axis: str) -> int:
        return self.coordinate[axis]


def test_ranks_draw_the_same_random_numbers_if_and_only_if_they_differ_along_tp_alone():
    degrees = dict(zip(AXES, (2, 2, 3, 2, 2), strict=True))
    drawing: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
    for coordinate in product(*map(range, degrees.values())):
        mesh = Mesh(Place(dict(zip(AXES, coordinate, strict=True))), degrees)
        drawing[mesh.noise_rank].append(coordinate)

    assert sorted(drawing) == list(range(2 * 2 * 3 * 2))
    assert AXES[-1] == "tp"
    for together in drawing.values():
        assert [coordinate[-1] for coordinate in together] == [0, 1]
        assert len({coordinate[:-1] for coordinate in together}) == 1


def test_ranks_that_exchange_rows_of_experts_are_neighbours():
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    try:
        job = SimpleNamespace(parallel=ParallelSection(dp_shard=8, ep=2))
        experts = build_mesh(job, torch.device("cpu")).experts

        assert experts["ep"].mesh.tolist() == [4, 5]
        assert experts["expert_dp"].mesh.tolist() == [1, 3, 5, 7]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("kernels", "emulated"), [(True, False), (False, True), (None, True)])
def test_a_cpu_emulates_bf16_where_its_library_has_no_kernels_for_it(monkeypatch, kernels, emulated):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: kernels is not None)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: kernels, raising=False)

    assert emulates_bf16(torch.device("cpu")) is emulated
    assert not emulates_bf16(torch.device("mps"))


@pytest.mark.parametrize("has_bf16", [True, False])
def test_a_gpu_from_before_ampere_emulates_bf16(monkeypatch, has_bf16):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *, including_emulation: has_bf16 or including_emulation)

    assert emulates_bf16(torch.device("cuda")) is not has_bf16
