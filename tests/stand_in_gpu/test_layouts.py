"""Layouts on several GPUs, with collectives on tensors of those, train as one: cells of the matrix on the stand-in."""

import pytest

from parity_matrix.cells import CELLS, TRAININGS
from parity_matrix.launch import Launcher
from parity_matrix.matrix import Matrix

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

BY_DAY = ("fsdp2", "pp2-zero-bubble-v", "moe-ep2")
ON_GPUS = ("run.device=cuda", "model.head_dim=16")
"""FlexAttention, which context parallelism and documents have there, takes no narrower heads."""
NOT_HERE = ("ring", "rope", "latent", "stacked", "auto", "attention-dropout-cp", "replayed")
"""They have sizes of their own, for heads of 4 features, or a budget of memory; a GPU cannot do it; or what they are
made of stays on the host."""


def runs_here(name):
    cell = CELLS[name]
    said = " ".join([name, *cell.layout, *TRAININGS[cell.training]])
    return 1 < cell.ranks <= 4 and not any(word in said for word in NOT_HERE)  # it has four GPUs


BY_NIGHT = [name for name in CELLS if runs_here(name) and name not in BY_DAY]


@pytest.fixture(scope="module")
def on_gpus(request, stand_in, tmp_path_factory):
    launcher = Launcher(tmp_path_factory.mktemp("gpus"), settings=ON_GPUS, environment=stand_in)
    made = Matrix(launcher)
    items = request.session.items
    made.run({item.callspec.params["cell"] for item in items if item.path == request.path})
    return made


@pytest.mark.parametrize("cell", [*BY_DAY, *(pytest.param(name, marks=pytest.mark.nightly) for name in BY_NIGHT)])
def test_ranks_on_gpus_equal_one_process(on_gpus, cell):
    assert on_gpus.problems(cell) == []
