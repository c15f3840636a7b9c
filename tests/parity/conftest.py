from __future__ import annotations

import pytest

from parity_matrix.launch import Launcher
from parity_matrix.matrix import Matrix


@pytest.fixture(scope="session")
def matrices(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Matrix]:
    """What the selected tests need of the matrix, by the number of steps: ``-k tp2`` runs the cells of that name."""
    every = [item.callspec.params for item in request.session.items if "matrix" in getattr(item, "fixturenames", ())]
    matrices = {}
    for steps in {params["steps"] for params in every}:
        chosen = [params for params in every if params["steps"] == steps]
        cells = {params["cell"] for params in chosen if "cell" in params}
        exchanges = {(params["writer"], params["reader"]) for params in chosen if "writer" in params}
        matrices[steps] = Matrix(Launcher(tmp_path_factory.mktemp("parity")), steps)
        matrices[steps].run(cells, exchanges, {params["training"] for params in chosen if "training" in params})
    return matrices


@pytest.fixture
def matrix(matrices: dict[int, Matrix], steps: int) -> Matrix:
    return matrices[steps]
