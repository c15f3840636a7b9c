from __future__ import annotations

import pytest

from parity_matrix.launch import Launcher
from parity_matrix.matrix import Matrix


@pytest.fixture(scope="session")
def matrix(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    """What the selected tests need of the matrix: ``-k tp2`` runs the cells of that name."""
    chosen = [item.callspec.params for item in request.session.items if "matrix" in getattr(item, "fixturenames", ())]
    cells = {params["cell"] for params in chosen if "cell" in params}
    exchanges = {(params["writer"], params["reader"]) for params in chosen if "writer" in params}
    matrix = Matrix(Launcher(tmp_path_factory.mktemp("parity")))
    matrix.run(cells, exchanges, {params["training"] for params in chosen if "training" in params})
    return matrix
